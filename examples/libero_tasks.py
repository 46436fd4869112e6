"""Tasks of LIBERO (arXiv:2306.03310) for a policy of OpenVLA's form: pictures in, actions out.

On a machine with GPUs, in an environment of its own if its libraries ask for one (episodes.python):
pip install 'gymnasium>=1.0' and LIBERO from github.com/Lifelong-Robot-Learning/LIBERO
refrain srpo libero.yaml        # in this folder; --check says first whether it would start

It was never run with LIBERO itself: its tests have a stand-in for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from engines.environments.action_tokens import ActionStatistics, ActionTokens

SIDE = 256  # pixels of the camera
SETTLE = 10  # steps in which nothing is done, while objects fall to where they lie
STILL = [0.0] * 6 + [-1.0]  # that action: the gripper stays open
VOCABULARY = 32000  # of Llama 2: action tokens are its last 256
WORDS = "In: What action should the robot take to {task}?\nOut: "  # as OpenVLA was fine-tuned


class LiberoTask(gymnasium.Env[Any, Any]):
    """One task of a suite, from one of its stored beginnings; 1 for success, which ends it."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, suite: str = "libero_spatial") -> None:
        from libero.libero import benchmark

        self.observation_space = gymnasium.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (7,), np.float32)
        self._suite = benchmark.get_benchmark_dict()[suite]()
        self._task = -1
        self._world: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """options: `task` and `beginning`, numbers of the suite's."""
        super().reset(seed=seed)
        wanted = options or {"task": 0, "beginning": 0}
        if wanted["task"] != self._task:
            self.close()
            self._task, self._world = wanted["task"], self._made(wanted["task"])
        self._world.seed(0)
        self._world.reset()
        beginnings = self._suite.get_task_init_states(self._task)
        seen = self._world.set_init_state(beginnings[wanted["beginning"] % len(beginnings)])
        for _ in range(SETTLE):
            seen, _, _, _ = self._world.step(STILL)
        return picture(seen), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, _, done, _ = self._world.step(np.asarray(action).tolist())
        return picture(seen), float(done), bool(done), False, {}

    def close(self) -> None:
        """Let go of the simulator."""
        if self._world is not None:
            self._world.close()
            self._world = None

    def _made(self, number: int) -> Any:
        from libero.libero import get_libero_path
        from libero.libero.envs import OffScreenRenderEnv

        task = self._suite.get_task(number)
        file = Path(get_libero_path("bddl_files"), task.problem_folder, task.bddl_file)
        return OffScreenRenderEnv(bddl_file_name=str(file), camera_heights=SIDE, camera_widths=SIDE)


def picture(seen: Mapping[str, Any]) -> Any:
    """The camera's picture, which LIBERO gives upside down, [256, 256, 3] of 8 bits."""
    return np.ascontiguousarray(seen["agentview_image"][::-1, ::-1])


class Arm(ActionTokens):
    """Seven action tokens are one action; the gripper's becomes -1 (open) or 1 (shut), as LIBERO's.

    Statistics are those of the checkpoint's own data: dataset_statistics.json, a copy in this folder.
    """

    def __init__(self) -> None:
        file = Path(__file__).with_name("dataset_statistics.json")
        name = next(iter(json.loads(file.read_text())))
        super().__init__(VOCABULARY, ActionStatistics.read(file, name))

    def options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Which task, and from where."""
        return {"task": row["task"], "beginning": row["beginning"]}

    def frame(self, observation: Any, info: dict[str, Any]) -> Any:
        """What the camera sees."""
        return observation

    def actions_of_tokens(self, ids: Any) -> list[tuple[Any, int]]:
        """The actions of a turn; OpenVLA says 1 for an open gripper, 0 for a shut one."""
        found = []
        for action, stop in super().actions_of_tokens(ids):
            action[-1] = -1.0 if action[-1] > 0.5 else 1.0
            found.append((action, stop))
        return found


def rows(suite: str = "libero_spatial", beginnings: int = 50) -> list[dict[str, Any]]:
    """Every task of a suite from so many beginnings; `name` is what episodes are compared by."""
    from libero.libero import benchmark

    tasks = benchmark.get_benchmark_dict()[suite]()
    return [
        {
            "question": WORDS.format(task=tasks.get_task(number).language.lower()),
            "name": tasks.get_task(number).name,
            "task": number,
            "beginning": beginning,
        }
        for beginning in range(beginnings)
        for number in range(tasks.n_tasks)
    ]


gymnasium.register(
    id="LiberoTask-v0",
    entry_point=lambda **params: LiberoTask(**params),
    disable_env_checker=True,
)
