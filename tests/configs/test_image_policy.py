"""What a run whose policy looks at images is refused for, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "examples" / "seen_lake.yaml")


def loaded(*words: str, kind: type[GRPOConfig] = GRPOConfig) -> GRPOConfig:
    code = f"episodes.environment.codec={ROOT}/examples/seen_lake.py:Lake"
    rows = f"data.source.path={ROOT}/examples/seen_lake.py:rows"
    return load_recipe(kind, RECIPE, [code, rows, *words])


def test_it_keeps_frames() -> None:
    config = loaded()
    assert config.sees_frames and config.keeps_frames
    assert not loaded("episodes.sees=text").keeps_frames


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout.engine=vllm"], r"rollout\.engine = vllm does not\. Set rollout\.engine = tr"),
        (["episodes.max_turn_tokens=null", "episodes.full_turn=ends"], r"null is no number\. Set"),
        (["algorithm.advantage={kind: remax}"], r"does not go with greedy baselines"),
        (["lora={rank: 4}"], r"does not go with adapters\. Set lora = null"),
        (["train.engine=elastic"], r"does not go with train\.engine = elastic"),
        (["train.tree_training=true"], r"does not go with train\.tree_training"),
        (
            ["train.sequence_parallel=2", "cluster.pools.train.workers=2"],
            r"does not go with train\.sequence_parallel = 2",
        ),
        (
            ["episodes.environment={kind: textarena, id: GuessTheNumber-v0}"],
            r"episodes\.environment\.kind = textarena gives no frames",
        ),
        (
            [
                "episodes.environment={kind: class, path: 'engines.environments.builtin:Corridor'}",
                "episodes.players=2",
            ],
            r"episodes\.players = 2, and episodes\.sees = frames is of one who acts alone",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(words: list[str], said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        loaded(*words)
