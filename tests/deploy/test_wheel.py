"""The wheel, in an environment and a folder of its own: nothing comes from the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.recipe_files import recipe_names
from tests.deploy.conftest import ROOT, Make
from tests.deploy.wheel import PACKAGES, built

OWN_REWARD = """
def short(prompts, completions, **columns):
    return [1.0 / (1 + len(one)) for one in completions]
"""
USE_OWN_REWARD = ("rewards.functions.0.kind=function", "rewards.functions.0.path=my_rewards:short")


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An environment with the wheel in it."""

    bin: Path
    version: str

    @property
    def environment(self) -> dict[str, str]:
        """Variables for its programs: nothing that leads to the checkout or to a server."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "PREFECT_", "VIRTUAL_ENV"))
        }
        return {**kept, "OMP_NUM_THREADS": "1"}

    def run(self, program: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin / program, *words],
            cwd=folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel of a copy of the sources, installed beside the libraries of this environment.

    Their folder is named in a .pth file. Such files inside it, as one of an editable install that
    leads to the checkout, are not read then.
    """
    home = tmp_path_factory.mktemp("wheel")
    wheel = built(home)
    name, version, *_ = wheel.name.split("-")
    assert name == "refrain_rl"
    venv.create(home / "venv", symlinks=True)
    python = home / "venv/bin/python"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True)
    (packages,) = (home / "venv/lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return Installed(bin=python.parent, version=version)


def test_every_package_comes_from_the_wheel(installed: Installed, tmp_path: Path) -> None:
    program = f"""
import importlib, json, sys
from importlib.metadata import version
from pathlib import Path
folders = [Path(importlib.import_module(name).__file__).parent for name in {PACKAGES}]
typed = [folder.name for folder in folders if (folder / "py.typed").exists()]
infra = [str(path.relative_to(folders[3])) for path in folders[3].rglob("*.*")]
print(json.dumps([version("refrain-rl"), sys.path, list(map(str, folders)), typed, sorted(infra)]))
"""
    done = installed.run("python", "-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    version, path, folders, typed, infra = json.loads(done.stdout)
    assert version == installed.version
    assert str(ROOT) not in path
    environment = installed.bin.parent
    assert all(Path(folder).is_relative_to(environment) for folder in folders)
    assert typed == [name for name in PACKAGES if name != "infra"]
    assert [name for name in infra if "kubernetes" in name] != []
    assert {"prefect.yaml", "automations.yaml", "compose.yaml", "backup.sh"} <= set(infra)


def test_the_command_names_what_there_is(installed: Installed, tmp_path: Path) -> None:
    done = installed.run("refrain", "--help", folder=tmp_path)
    assert done.returncode == 0
    named = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert {*recipe_names()} <= named, "its files are in the wheel"
    named -= {*recipe_names()}
    modules = {path.stem for path in (ROOT / "flows").glob("[!_]*.py")}
    assert {"grpo", "ppo", "inspect", "deploy"} <= named <= modules
    wrong = installed.run("refrain", "gpro", folder=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr == "There is no command gpro. Did you mean grpo? See refrain --help.\n"


def test_settings_are_checked_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    done = installed.run("refrain", "grpo", "tiny", "--check", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the settings are good" in done.stdout
    wrong = installed.run("refrain", "grpo", "tiny", "stepz=1", folder=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr == "stepz: there is no such setting. Did you mean steps?\n"


def folders_called_as_ours(folder: Path) -> None:
    """Folders of a user's own, which must hide none of ours from any process."""
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('the wrong one')")


def test_a_reward_from_the_working_folder(installed: Installed, tmp_path: Path) -> None:
    words = ["grpo", "tiny", "--check", *USE_OWN_REWARD]
    missing = installed.run("refrain", *words, folder=tmp_path)
    assert missing.returncode == 2
    assert "there is no module 'my_rewards'" in missing.stderr
    (tmp_path / "my_rewards.py").write_text(OWN_REWARD)
    folders_called_as_ours(tmp_path)
    done = installed.run("refrain", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_deploying_asks_for_a_server(installed: Installed, tmp_path: Path) -> None:
    usage = installed.run("refrain", "deploy", "--help", folder=tmp_path)
    assert usage.returncode == 0
    assert "infra/prefect.yaml" in usage.stdout
    done = installed.run("refrain", "deploy", "tiny", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("PREFECT_API_URL is not set")


@pytest.mark.slow
@pytest.mark.cluster
def test_a_run_with_a_reward_of_the_users_own(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(OWN_REWARD)
    folders_called_as_ours(tmp_path)
    done = installed.run("refrain", "grpo", "tiny", "steps=1", *USE_OWN_REWARD, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / ".refrain/store").iterdir()
    commit = json.loads((run / "steps/000001/commit.json").read_text())
    assert "my_rewards:short" in json.dumps(commit)
    assert json.loads((run / "run.json").read_text())["body"]["code"] == installed.version
    audited = installed.run("refrain", "audit", run.name, folder=tmp_path)
    assert audited.returncode == 0, audited.stdout + audited.stderr


@pytest.mark.slow
@pytest.mark.cluster
def test_a_worker_runs_a_deployment(installed: Installed, make_platform: Make) -> None:
    """Deployed from an empty folder by the wheel, run by a worker that has only the wheel."""
    platform = make_platform(python=installed.bin / "python", variables=installed.environment)
    (platform.home / "my_rewards.py").write_text(OWN_REWARD)
    assert platform.deploy("tiny").returncode == 0
    platform.start_worker()
    own = {"kind": "function", "path": "my_rewards:short"}
    config = platform.config("tiny", steps=1, **{"rewards.functions": [own]})
    platform.wait(platform.submit("tiny", config).json()["id"], "COMPLETED")
    (run,) = (platform.home / "store").iterdir()
    assert (run / "steps/000001/commit.json").exists()
