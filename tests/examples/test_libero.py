"""The recipe for LIBERO, with a stand-in for LIBERO and a tiny policy: what it says before a run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from configs.model import RandomModel, RandomVision
from engines.environments.action_tokens import ActionStatistics, tokens_of
from engines.models import checkpoints
from tests.flows.conftest import ROOT

STATISTICS = """{"libero_spatial_no_noops": {"action": {
    "q01": [-1, -1, -1, -1, -1, -1, 0], "q99": [1, 1, 1, 1, 1, 1, 1],
    "mask": [true, true, true, true, true, true, false]}}}"""
LIBERO = {
    "libero/__init__.py": "",
    "libero/libero/__init__.py": "def get_libero_path(name): return '/' + name\n",
    "libero/libero/benchmark.py": """
from types import SimpleNamespace

class Suite:
    n_tasks = 3
    def get_task(self, number):
        return SimpleNamespace(language=f"Lift {number}", name=f"lift_{number}", problem_folder="p", bddl_file="f")
    def get_task_init_states(self, number):
        return [10 * number, 10 * number + 1]

def get_benchmark_dict(): return {"libero_spatial": Suite}
""",
    "libero/libero/envs/__init__.py": """
import numpy as np

class OffScreenRenderEnv:
    def __init__(self, bddl_file_name, camera_heights, camera_widths):
        assert (bddl_file_name, camera_heights, camera_widths) == ("/bddl_files/p/f", 256, 256)
    def seed(self, seed): pass
    def reset(self): pass
    def close(self): pass
    def seen(self):
        image = np.zeros((256, 256, 3), np.uint8)
        image[0, 0] = self.place
        return {"agentview_image": image}
    def set_init_state(self, state):
        self.place = state
        return self.seen()
    def step(self, action):
        assert len(action) == 7 and action[6] in (-1.0, 1.0)
        self.place += 1
        return self.seen(), 0.0, self.place > 40, {}
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the recipe, with LIBERO beside it."""
    pytest.importorskip("gymnasium")
    for name, text in LIBERO.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    for name in ("libero_tasks.py", "libero.yaml"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    (tmp_path / "dataset_statistics.json").write_text(STATISTICS)
    return tmp_path


@pytest.fixture
def tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(folder / "site"))
    spec = importlib.util.spec_from_file_location("libero_tasks", folder / "libero_tasks.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "libero"]:
        del sys.modules[name]


def test_an_episode_of_it(tasks: ModuleType) -> None:
    """A row's task from a row's beginning, once all lies still; pictures the right way up."""
    rows = tasks.rows()
    assert len(rows) == 150 and rows[4]["name"] == "lift_1"
    assert rows[4]["question"] == "In: What action should the robot take to lift 1?\nOut: "
    world, arm = tasks.LiberoTask(), tasks.Arm()
    seen, _ = world.reset(seed=1, options=arm.options(rows[4]))
    assert seen.shape == (256, 256, 3) and seen[-1, -1].tolist() == [10 + 1 + tasks.SETTLE] * 3
    statistics = ActionStatistics.read(Path(tasks.__file__).with_name("dataset_statistics.json"))
    wanted = np.array([[0.5, 0, 0, 0, 0, -0.5, 1.0], [0.5, 0, 0, 0, 0, -0.5, 0.0]])
    tokens = tokens_of(wanted, tasks.VOCABULARY, statistics)
    found = arm.actions_of_tokens(tokens)
    assert [stop for _, stop in found] == [7, 14]
    assert [float(action[6]) for action, _ in found] == [-1.0, 1.0], "open, then shut"
    np.testing.assert_allclose(found[0][0][:6], wanted[0, :6], atol=0.01)
    reward = done = None
    for _ in range(20):
        _, reward, done, _, _ = world.step(found[0][0])
    assert (reward, done) == (1.0, True)
    world.close()


def test_its_check_passes(folder: Path) -> None:
    tiny = RandomModel(vision=RandomVision(actions=64), max_positions=512)
    path = checkpoints.materialize(tiny, folder / "models")
    pools = [f"cluster.pools.{name}.gpus=0" for name in ("train", "rollout", "encoder")]
    # The tiny model's tokens are characters, and its encoder's files are not here.
    words = [
        f"model.path={path}",
        "data.max_prompt_tokens=72",
        "encoder={kind: projection}",
        *pools,
    ]
    found = subprocess.run(
        [sys.executable, "-m", "flows.srpo", "libero.yaml", "--check", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}/site"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    out = found.stdout + found.stderr
    assert found.returncode == 0, out
    assert "looks at 16 patches before each turn" in out
    assert "frames of 256 x 256 x 3, uint8" in out and "a run would start" in out
