"""Action tokens of OpenVLA: bins, statistics, and a turn of several actions in gymnasium."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from configs.episodes import EpisodesConfig, GymnasiumEnvironment
from engines.environments.action_tokens import (
    ActionStatistics,
    actions_of,
    centres,
    tokens_of,
)
from engines.environments.sessions import Environments, Turn, digest_of

VOCABULARY = 32000
STATISTICS = ActionStatistics.of(
    {"q01": [-2.0, 0.0, 0.0], "q99": [2.0, 10.0, 1.0], "mask": [True, True, False]}
)
CODEC = """
from engines.environments.action_tokens import ActionStatistics, ActionTokens

class Force(ActionTokens):
    def __init__(self):
        super().__init__(100, ActionStatistics.of({"q01": [-2.0], "q99": [2.0]}), bins=16)

    def describe(self, observation, info):
        return f"{observation[2]:.3f}"
"""


def test_tokens_are_actions_as_openvla_reads_them() -> None:
    """The formula of OpenVLA's predict_action, written out."""
    random = np.random.RandomState(0)
    ids = random.randint(VOCABULARY - 256, VOCABULARY, 5 * 3)
    edges = np.linspace(-1, 1, 256)
    middle = (edges[:-1] + edges[1:]) / 2.0
    plain = middle[np.clip(VOCABULARY - ids - 1, 0, 254)].reshape(5, 3)
    wanted = plain.copy()
    wanted[:, 0] = 0.5 * (plain[:, 0] + 1) * 4.0 - 2.0
    wanted[:, 1] = 0.5 * (plain[:, 1] + 1) * 10.0
    np.testing.assert_allclose(actions_of(ids.tolist(), VOCABULARY, STATISTICS), wanted, rtol=1e-12)
    assert len(centres(256)) == 255


def test_actions_are_tokens_and_back_within_a_bin() -> None:
    random = np.random.RandomState(1)
    actions = random.uniform([-2.0, 0.0, -1.0], [2.0, 10.0, 1.0], (50, 3))
    ids = tokens_of(actions, VOCABULARY, STATISTICS)
    assert min(ids) >= VOCABULARY - 256 and max(ids) < VOCABULARY
    back = actions_of(ids, VOCABULARY, STATISTICS)
    half = np.array([4.0, 10.0, 2.0]) / 255 / 2
    assert (np.abs(back - actions) <= half + 1e-9).all()
    assert tokens_of(back, VOCABULARY, STATISTICS) == ids
    beyond = tokens_of(np.array([[-9.0, 99.0, 5.0]]), VOCABULARY, STATISTICS)
    assert beyond == [VOCABULARY - 1, VOCABULARY - 256, VOCABULARY - 256], "the outermost bins"


def test_what_is_no_action_is_said() -> None:
    with pytest.raises(ValueError, match="4 tokens are no actions of 3 each"):
        actions_of([VOCABULARY - 1] * 4, VOCABULARY, STATISTICS)
    with pytest.raises(ValueError, match="the token 17 is none of the last 256 of 32000"):
        actions_of([VOCABULARY - 1, 17, VOCABULARY - 256], VOCABULARY, STATISTICS)


def test_statistics_are_those_of_the_checkpoints_file(tmp_path: Path) -> None:
    file = tmp_path / "dataset_statistics.json"
    one = {"action": {"q01": [0.0], "q99": [1.0], "mean": [0.5]}}
    file.write_text(json.dumps({"libero_10": one}))
    assert ActionStatistics.read(file).scaled.tolist() == [True]
    file.write_text(json.dumps({"hidden_size": 8, "norm_stats": {"libero_10": one}}))
    assert ActionStatistics.read(file).high.tolist() == [1.0]
    file.write_text(json.dumps({"libero_10": one, "bridge": one}))
    assert ActionStatistics.read(file, "bridge").high.tolist() == [1.0]
    with pytest.raises(ValueError, match="libero_10, bridge. Name one of them"):
        ActionStatistics.read(file)
    with pytest.raises(ValueError, match="have 1, 2 and 1 numbers"):
        ActionStatistics.of({"q01": [0.0], "q99": [1.0, 2.0]})


def test_a_box_of_gymnasium_is_acted_on_by_token_ids(tmp_path: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    (tmp_path / "codec.py").write_text(CODEC)
    environment = GymnasiumEnvironment(
        id="Pendulum-v1", params={"max_episode_steps": 3}, codec=f"{tmp_path}/codec.py:Force"
    )
    config = EpisodesConfig(environment=environment, processes=1)
    with Environments(config, frames=True) as environments:
        ready = environments.start()
        assert ready.tokens and ready.in_part
        [opening] = environments.opening([{}], [3])
        statistics = ActionStatistics.of({"q01": [-2.0], "q99": [2.0]})
        ids = tokens_of(np.array([[0.5], [-1.0], [2.0], [0.0], [0.0]]), 100, statistics, 16)
        turn = Turn(
            episode="one",
            row={},
            seed=3,
            opening=digest_of(opening.observation),
            past=(),
            text="?",
            calls=None,
            tokens={"given": [], "written": ids, "logprobs": []},
        )
        [outcome] = environments.act([turn])
        assert (outcome.done, outcome.used) == (True, 3), "of five actions three were acted on"
        pendulum = gymnasium.make("Pendulum-v1", max_episode_steps=3)
        pendulum.reset(seed=3)
        rewards = []
        for action in actions_of(ids[:3], 100, statistics, 16):
            observation, reward, *_ = pendulum.step(action.astype(np.float32))
            rewards.append(reward)
        assert outcome.observation == f"{observation[2]:.3f}"
        assert outcome.reward == pytest.approx(sum(rewards))
