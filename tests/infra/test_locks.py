"""The locked versions: what pyproject.toml asks for is there, each within its range and with a digest."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
IMAGE = [
    *PROJECT["project"]["dependencies"],
    *(line for extra in ("s3", "hub", "kubernetes", "dashboard") for line in EXTRAS[extra]),
]
ASKED = {
    "cpu": [*IMAGE, *EXTRAS["cpu"], *EXTRAS["demo"]],
    "gpu": [*IMAGE, *EXTRAS["gpu"]],
    "mlflow": PROJECT["dependency-groups"]["mlflow-server"],
    "tools": PROJECT["dependency-groups"]["tools"],
}
PIN = re.compile(
    r"^([a-zA-Z0-9._-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M
)


def text_of(name: str) -> str:
    return (ROOT / f"infra/locks/{name}.txt").read_text()


def locked(name: str) -> dict[str, Version]:
    return {canonicalize_name(one[1]): Version(one[2]) for one in PIN.finditer(text_of(name))}


@pytest.mark.parametrize("name", ASKED)
def test_each_direct_dependency_is_locked_within_its_range(name: str) -> None:
    found = locked(name)
    for line in ASKED[name]:
        wanted = Requirement(line)
        key = canonicalize_name(wanted.name)
        assert key in found, f"{line} is not in infra/locks/{name}.txt: make lock"
        assert found[key] in wanted.specifier, f"{key} {found[key]} is not {line}: make lock"


@pytest.mark.parametrize("name", ASKED)
def test_there_is_nothing_but_versions_with_digests(name: str) -> None:
    rest = PIN.sub("", text_of(name))
    assert all(line.startswith("#") for line in rest.splitlines()), rest  # no index, no folder


def test_torch_is_the_build_for_the_device() -> None:
    cpu, gpu = locked("cpu"), locked("gpu")
    assert cpu["torch"].local == "cpu" and gpu["torch"].local is None
    assert cpu["torch"].public == gpu["torch"].public
    assert {"torchvision", "torchaudio", "triton"} & set(cpu) == set()  # see [tool.uv]
    assert {"torchvision", "triton"} <= set(gpu)


def test_the_package_can_be_built_with_what_is_locked() -> None:
    for line in PROJECT["build-system"]["requires"]:
        wanted = Requirement(line)
        for name in ("cpu", "gpu"):
            assert locked(name)[wanted.name] in wanted.specifier
