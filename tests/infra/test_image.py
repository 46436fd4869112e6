"""Dockerfile: what it copies is there and is all that the package needs, and others build it as it is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
TEXT = (ROOT / "Dockerfile").read_text()
STAGES = re.findall(r"^FROM \S+ AS (\w+)$", TEXT, re.MULTILINE)


def copied() -> set[str]:
    """What comes from the checkout, not from another stage."""
    lines = [line for line in TEXT.splitlines() if line.startswith("COPY ")]
    words = [line.split()[1:-1] for line in lines if "--from=" not in line]
    return {word for line in words for word in line}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_what_it_copies_is_there(device: str) -> None:
    for source in copied():
        assert (ROOT / source.replace("${DEVICE}", device)).exists(), source


def test_it_copies_every_package_and_the_build_sees_no_more() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {
        name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    whole = {source for source in copied() if not source.startswith("infra/")}
    assert whole == packages | {"pyproject.toml", "README.md", "LICENSE"}
    first, *others = (ROOT / ".dockerignore").read_text().split()
    assert first == "*"
    assert {name.removeprefix("!") for name in others if name.startswith("!")} == whole


def test_the_manifests_use_its_stages_and_arguments() -> None:
    services = yaml.safe_load((INFRA / "compose.yaml").read_text())["services"]
    builds = {name: one["build"] for name, one in services.items() if "build" in one}
    assert set(builds) == {"mlflow", "worker"}
    for build in builds.values():
        assert (INFRA / build["context"] / "Dockerfile").exists()
        assert build.get("target", STAGES[-1]) in STAGES
        assert all(f"ARG {name}=" in TEXT for name in build.get("args", {}))
    assert STAGES[-1] == "refrain"  # what a build makes that names no stage


def test_what_a_stage_takes_from_another_is_a_stage_before() -> None:
    for line in TEXT.splitlines():
        for name in re.findall(r"--from=(\w+)|^FROM (?!\$)(\w+)", line):
            (source,) = filter(None, name)
            assert f"AS {source}\n" in TEXT[: TEXT.index(line)], line
