"""Rewards for progress on FrozenLake with a table as the policy: what learns, and what does not.

    python -m benchmarks.frozen_lake [--seeds 3] [--steps 60] [--start 0.12]

The lake of examples/frozen_lake.yaml, 8 groups of 16 episodes a step and 12 turns, played by a policy
that has four numbers for each tile (softmax) and is moved along advantage times gradient of the
log-prob, mean over turns. Rewards are those of engines/algorithms/progress_rewards.py on the
example's frames, beside 0 or 1. Advantages: reward less the group's mean, divided by the deviation of
the group or of the step (algorithm.advantage.normalize). Left out are no groups, those without a
success, or those of flows.srpo's default (a success rate below 0.1 or above 0.9).

`--start`: the policy begins where 0 or 1 has brought it to this share of successes, not at random.
Printed: means of the share of successes over ten steps each, and the tile on which most episodes of
the last step ended, with their share.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.encoder import ProjectionEncoder
from configs.srpo import ProgressConfig
from engines.algorithms.progress_rewards import progress_rewards
from engines.encoders.encoder import Projection
from examples.frozen_lake import HOLES, Ice

TILES, ACTIONS, GOAL = 16, 4, 15
GROUPS, GROUP, TURNS = 8, 16, 12
RATE = 4.8  # of learning
EPSILON = 1e-6  # beside the deviation
KEPT = {"all groups": (0.0, 1.0), "with a success": (0.01, 1.0), "0.1 to 0.9": (0.1, 0.9)}

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """How a step is rewarded."""

    progress: bool  # else 0 or 1
    normalize: str  # by the deviation of the "group" or of the "step"
    kept: str  # which groups train, in KEPT

    def __str__(self) -> str:
        rewards = "progress" if self.progress else "0 or 1"
        return f"{rewards}, {self.kept}, deviation of the {self.normalize}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """N episodes of at most TURNS turns."""

    tiles: Ints  # [TURNS, N] where one stood
    actions: Ints  # [TURNS, N]
    going: NDArray[np.bool_]  # [TURNS, N] whether the episode was still going on
    ends: Ints  # [N] the last tile


def moved(tile: int, action: int) -> int:
    """Where an action leads: 0 left, 1 down, 2 right, 3 up."""
    row, column = divmod(tile, 4)
    step = ((0, -1), (1, 0), (0, 1), (-1, 0))[action]
    return 4 * min(max(row + step[0], 0), 3) + min(max(column + step[1], 0), 3)


LEADS = np.array([[moved(tile, action) for action in range(ACTIONS)] for tile in range(TILES)])


def probabilities(table: Floats) -> Floats:
    """[TILES, ACTIONS] of each action."""
    raised = np.exp(table - table.max(1, keepdims=True))
    found: Floats = raised / raised.sum(1, keepdims=True)
    return found


def play(table: Floats, dice: np.random.RandomState) -> Played:
    """A step's episodes."""
    tile = np.zeros(GROUPS * GROUP, np.int64)
    over = np.zeros(len(tile), np.bool_)
    shares = probabilities(table).cumsum(1)
    turns = []
    for _ in range(TURNS):
        action = (shares[tile] > dice.rand(len(tile))[:, None]).argmax(1)
        turns.append((tile, action, ~over))
        tile = np.where(over, tile, LEADS[tile, action])
        over = over | np.isin(tile, (*HOLES, GOAL))
    tiles, actions, going = (np.stack(each) for each in zip(*turns, strict=True))
    return Played(tiles=tiles, actions=actions, going=going, ends=tile)


def embeddings() -> NDArray[np.float32]:
    """[TILES, D] of the example's frame of each tile."""
    encoder, ice = Projection(ProjectionEncoder()), Ice()
    return np.stack([encoder.embed([ice.frame(tile, {})]) for tile in range(TILES)])


def advantages(method: Method, ends: Ints, seen: NDArray[np.float32]) -> Floats:
    """[N] of episodes that ended on these tiles; 0 in groups that are left out."""
    success = ends == GOAL
    rewards = success.astype(np.float64)
    if method.progress:
        settings = ProgressConfig().model_dump(exclude={"task_column", "success"})
        one_task = np.zeros(len(ends), np.int64)
        rewards = progress_rewards(seen[ends], success, one_task, **settings).rewards
    groups = rewards.reshape(GROUPS, GROUP)
    centred = groups - groups.mean(1, keepdims=True)
    axis = 1 if method.normalize == "group" else None
    centred = centred / (groups.std(axis, ddof=1, keepdims=True) + EPSILON)
    low, high = KEPT[method.kept]
    rate = success.reshape(GROUPS, GROUP).mean(1)
    found: Floats = (centred * ((rate >= low) & (rate <= high))[:, None]).reshape(-1)
    return found


def learned(table: Floats, played: Played, weights: Floats) -> Floats:
    """The table after a step along the mean over turns of A grad log p(action | tile)."""
    own = probabilities(table)
    slope = np.zeros_like(table)
    for tile, action, going in zip(played.tiles, played.actions, played.going, strict=True):
        at, did, weight = tile[going], action[going], weights[going]
        np.add.at(slope, at, -weight[:, None] * own[at])
        np.add.at(slope, (at, did), weight)
    return table + RATE * slope / played.going.sum()


def run(method: Method, table: Floats, steps: int, seed: int) -> tuple[list[float], Ints, Floats]:
    """The share of successes of each step, the tiles where the last step's ended, the table."""
    dice, seen = np.random.RandomState(seed), embeddings()
    curve = []
    for _ in range(steps):
        played = play(table, dice)
        curve.append(float((played.ends == GOAL).mean()))
        table = learned(table, played, advantages(method, played.ends, seen))
    return curve, played.ends, table


def brought_to(share: float) -> Floats:
    """A policy that 0 or 1 has brought to this share of successes, as a mean over five steps."""
    table, method = np.zeros((TILES, ACTIONS)), METHODS[0]
    for seed in range(10_000):
        curve, _, table = run(method, table, 5, 1_000 + seed)
        if np.mean(curve) >= share:
            break
    return table


METHODS = [
    Method(progress=progress, normalize=normalize, kept=kept)
    for progress in (False, True)
    for kept in KEPT
    for normalize in ("group", "step")
    if progress or kept != "with a success"  # the others have no advantage by 0 or 1 anyway
]


def main() -> None:
    """Every method with every seed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--start", type=float, default=0.0, help="share of successes at first")
    arguments = parser.parse_args()
    for method in METHODS:
        for seed in range(arguments.seeds):
            start = brought_to(arguments.start) if arguments.start else np.zeros((TILES, ACTIONS))
            curve, ends, _ = run(method, start, arguments.steps, seed)
            tens = [np.mean(curve[at : at + 10]) for at in range(0, len(curve), 10)]
            tile = int(np.bincount(ends).argmax())
            print(
                f"{method!s:52} seed {seed}  {' '.join(f'{share:.2f}' for share in tens)}"
                f"   tile {tile} {(ends == tile).mean():.2f}"
            )


if __name__ == "__main__":
    main()
