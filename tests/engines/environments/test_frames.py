"""What environments give to see, and turns of several actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.episodes import ClassEnvironment, EpisodesConfig, GymnasiumEnvironment
from engines.environments.protocol import Outcome
from engines.environments.sessions import Environments
from engines.episodes.frames import array_of, check_first_frames, check_frame
from tests.engines.environments.playing import begin

WORLD = """
import numpy as np

class World:
    def __init__(self, kind="uint8"):
        self._kind = kind

    def reset(self):
        self.steps = 0
        return "go"

    def step(self, text):
        self.steps += 1
        return f"{self.steps}", 1.0, text == "end"

    def frame(self):
        if self._kind == "text":
            return "a picture"
        if self._kind == "large":
            return np.zeros(2**24 + 1, np.uint8)
        if self._kind == "infinite":
            return [float("inf")]
        return np.full((2, 3), self.steps, self._kind)

class Tools:
    def reset(self): return "go"
    def look(self) -> str:
        "Look around."
        return "nothing"
    def frame(self): return np.zeros(3)

class Blind:
    def reset(self): return "go"
    def step(self, text): return "on"

class Codec:
    def describe(self, observation, info): return str(observation)
    def actions(self, text):
        if not text.isdigit():
            raise ValueError("write digits")
        return [(int(one) % 4, place) for place, one in enumerate(text, 1)]
"""


def environments(tmp_path: Path, name: str, frames: bool = True, **params: Any) -> Environments:
    (tmp_path / "world.py").write_text(WORLD)
    environment = ClassEnvironment(path=f"{tmp_path}/world.py:{name}", params=params)
    return Environments(EpisodesConfig(environment=environment, processes=1), frames=frames)


@pytest.mark.parametrize(
    ("kind", "stored"), [("uint8", np.uint8), ("float64", np.float32), ("int64", np.float32)]
)
def test_a_class_gives_an_array(tmp_path: Path, kind: str, stored: Any) -> None:
    with environments(tmp_path, "World", kind=kind) as played:
        [opening] = played.opening([{}], [7])
        assert opening.frame is not None
        first = array_of(opening.frame)
        assert first.dtype == stored and first.tolist() == [[0, 0, 0]] * 2
        episode = begin(played)
        outcome = episode.act(played, "on")
        assert outcome.frame is not None and array_of(outcome.frame).tolist() == [[1, 1, 1]] * 2
        assert episode.finish(played).frame is None


def test_frames_are_not_made_unasked(tmp_path: Path) -> None:
    with environments(tmp_path, "World", frames=False) as played:
        assert begin(played).act(played, "on").frame is None


def test_frame_is_no_tool_where_frames_are_kept(tmp_path: Path) -> None:
    with environments(tmp_path, "Tools") as played:
        assert [one["function"]["name"] for one in played.start().tools] == ["look"]


def test_an_environment_without_frames_is_refused(tmp_path: Path) -> None:
    with (
        environments(tmp_path, "Blind") as played,
        pytest.raises(ValueError, match=r"Blind has no method frame\(\)"),
    ):
        played.start()


@pytest.mark.parametrize(
    ("kind", "said"),
    [("text", "no array of numbers"), ("large", "16777217 bytes"), ("infinite", "no float32")],
)
def test_what_is_no_frame_fails(tmp_path: Path, kind: str, said: str) -> None:
    with environments(tmp_path, "World", kind=kind) as played:
        [opening] = played.opening([{}], [7])
        assert opening.failed is not None and said in opening.failed


def test_frames_of_another_form_fail() -> None:
    def seen(shape: tuple[int, ...]) -> Outcome:
        array = np.zeros(shape, np.uint8)
        return Outcome(frame={"dtype": "uint8", "shape": shape, "data": array.tobytes()})

    good, other, none = check_first_frames([seen((2, 2)), seen((2, 3)), Outcome()])
    assert good.failed is None
    assert other.failed is not None and "of uint8 (2, 3), and before that" in other.failed
    assert none.failed == "the environment gave no frame when it was reset"
    without = check_frame(Outcome(), (np.dtype(np.uint8), (2, 2)))
    assert without.failed is None, "a turn may have none"


def lake(tmp_path: Path, codec: str, **params: Any) -> Environments:
    environment = GymnasiumEnvironment(
        id="FrozenLake-v1", params={"is_slippery": False, **params}, codec=codec
    )
    return Environments(EpisodesConfig(environment=environment, processes=1), frames=True)


def test_gymnasium_shows_what_its_codec_draws_or_else_the_observation(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    example = Path(__file__).parents[3] / "examples/frozen_lake.py"
    with lake(tmp_path, f"{example}:Ice") as played:
        seen = begin(played).act(played, "m").frame  # down
        assert seen is not None
        image = array_of(seen)
        assert image.shape == (4, 4) and image.argmax() == 4
    (tmp_path / "world.py").write_text(WORLD)
    with lake(tmp_path, f"{tmp_path}/world.py:Codec") as played:
        seen = begin(played).act(played, "1").frame
        assert seen is not None and array_of(seen).tolist() == 4.0


def test_several_actions_of_a_turn_end_with_the_episode(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    (tmp_path / "world.py").write_text(WORLD)
    with lake(tmp_path, f"{tmp_path}/world.py:Codec") as played:
        assert played.start().in_part
        episode = begin(played)
        assert episode.act(played, "left").observation == "That is no action: write digits"
        assert episode.act(played, "11").observation == "8"
        outcome = episode.act(played, "2212333")  # right right down right: the goal
        assert (outcome.observation, outcome.reward, outcome.done) == ("15", 1.0, True)
        assert outcome.used == 4


PAINTED = """
import gymnasium
import numpy as np

class Painted(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Discrete(9)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        self.place = (options or {}).get("place", 0)
        return self.place, {}

    def step(self, action):
        self.place += int(action)
        return self.place, 0.0, False, False, {}

    def render(self):
        return np.full((2, 2, 3), self.place, np.uint8)

gymnasium.register("Painted-v0", entry_point=Painted)

class Codec:
    def describe(self, observation, info): return str(observation)
    def action(self, text): return int(text)

class Placed(Codec):
    def options(self, row): return {"place": row["place"]}
"""


def test_a_codec_says_by_the_row_how_gymnasium_is_reset(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    (tmp_path / "painted.py").write_text(PAINTED)
    environment = GymnasiumEnvironment(id="Painted-v0", codec=f"{tmp_path}/painted.py:Placed")
    with Environments(EpisodesConfig(environment=environment, processes=1)) as played:
        opened = played.opening([{"place": 3}, {"place": 4}], [7, 7])
        assert [one.observation for one in opened] == ["3", "4"]


def test_gymnasium_shows_its_picture_where_it_was_made_to(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    (tmp_path / "painted.py").write_text(PAINTED)
    environment = GymnasiumEnvironment(
        id="Painted-v0",
        params={"render_mode": "rgb_array"},
        codec=f"{tmp_path}/painted.py:Codec",
    )
    config = EpisodesConfig(environment=environment, processes=1)
    with Environments(config, frames=True) as played:
        episode = begin(played)
        seen = episode.act(played, "1").frame
        assert seen is not None
        image = array_of(seen)
        assert (image.shape, image.dtype, int(image.max())) == ((2, 2, 3), np.uint8, 1)
        assert episode.act(played, "jump").frame is None, "no action, and nothing new to see"
