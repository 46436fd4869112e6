"""The game of guessing.py behind a server of OpenEnv, for openenv.yaml.

python -m venv openenv && openenv/bin/pip install "openenv==0.10.*"
openenv/bin/python openenv_guessing.py &       # in this folder, on port 8000 of this machine
refrain grpo openenv.yaml
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from guessing import Guessing
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

SESSIONS = 256  # episodes at once: those of a step


class Guess(Action):
    """What the model wrote."""

    text: str


class Said(Observation):
    """What the game says of it."""

    text: str


class Server(Environment[Guess, Said, State]):
    """One game; its reward comes with its end."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> Said:
        """Begin; the seed decides on the number."""
        self._game = Guessing()
        return Said(text=self._game.reset(seed or 0))

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Said:
        """Answer a guess."""
        said, done = self._game.step(action.text), self._game.done
        return Said(text=said, done=done, reward=self._game.get_reward() if done else None)

    @property
    def state(self) -> State:
        """Nothing that a client asks for."""
        return State()


if __name__ == "__main__":
    app = create_app(Server, Guess, Said, max_concurrent_envs=SESSIONS)
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
