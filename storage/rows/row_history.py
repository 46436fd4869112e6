"""What became of each row of the data in the draws so far: what quarantine and difficulty go by.

A table with a line for each row that was ever drawn, kept as a batch that the commits name. It is
brought up to date once a step, from that step's samples, so it depends on committed work alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from configs.data import QuarantineConfig
from storage.batches.refs import BatchRef
from storage.objects.store import Store

REASONS = ("", "failures", "no_variance", "tokens", "seconds")  # by the number in column `reason`


@dataclass(frozen=True, kw_only=True, slots=True)
class RowHistory:
    """[R] rows that were drawn, ascending.

    Row 7 drawn twice, with group means 0.25 and 0.75: draws 2, scored 2, reward_sum 1.0.
    """

    prompt_row: NDArray[np.int64]  # [R] number in the data
    draws: NDArray[np.int64]  # [R] groups of it that were sampled
    scored: NDArray[np.int64]  # [R] those of which a sample was scored
    reward_sum: NDArray[np.float64]  # [R] of the mean rewards of these
    failures: NDArray[np.int64]  # [R] groups in a row with a failed sample
    uniform: NDArray[np.int64]  # [R] groups in a row whose rewards were all equal
    tokens: NDArray[np.float64]  # [R] response tokens of a sample, mean of the last group
    seconds: NDArray[np.float64]  # [R] in the environment, likewise; not a number without one
    reason: NDArray[np.int64]  # [R] why it is in quarantine, a number of REASONS; 0: it is not
    since: NDArray[np.int64]  # [R] step that put it there; 0: it is not

    @classmethod
    def empty(cls) -> Self:
        """That of a run before its first step."""
        floats = ("reward_sum", "tokens", "seconds")
        kinds = {
            column.name: np.float64 if column.name in floats else np.int64 for column in fields(cls)
        }
        columns: dict[str, NDArray[Any]] = {name: np.empty(0, kind) for name, kind in kinds.items()}
        return cls(**columns)

    @classmethod
    def read(cls, store: Store, ref: BatchRef | None) -> Self:
        """The table as it was stored; an empty one without a ref."""
        if ref is None:
            return cls.empty()
        columns: dict[str, NDArray[Any]] = {
            column.name: ref.fetch_numpy(store, column.name)[0] for column in fields(cls)
        }
        return cls(**columns)

    def columns(self) -> dict[str, NDArray[Any]]:
        """For `write_batch`."""
        return asdict(self)

    def kept_out(self, size: int, readmitted: Collection[int] | None = ()) -> NDArray[np.bool_]:
        """[size]: whether a row of the data is in quarantine. readmitted: not these; None: no row."""
        mask = np.zeros(size, np.bool_)
        if readmitted is not None:
            mask[self.prompt_row[self.reason > 0]] = True
            mask[np.fromiter(readmitted, np.int64)] = False
        return mask

    def ranks(self, size: int) -> NDArray[np.float64]:
        """[size]: by which a curriculum sorts rows, least first: unseen ones, then the easiest.

        Less the mean reward of a row's draws; minus infinity for one that was never scored.
        """
        ranks = np.full(size, -np.inf)
        has_score = self.scored > 0
        ranks[self.prompt_row[has_score]] = -self.reward_sum[has_score] / self.scored[has_score]
        return ranks

    def counts(self) -> dict[str, int]:
        """Rows in quarantine, by reason."""
        numbers = np.bincount(self.reason, minlength=len(REASONS))
        return {name: int(n) for name, n in zip(REASONS[1:], numbers[1:], strict=True) if n}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOutcomes:
    """[P] groups that a step sampled, each of a row of the data."""

    row: NDArray[np.int64]  # [P]
    reward: NDArray[np.float64]  # [P] mean over the scored samples; not a number where none was
    failed: NDArray[np.bool_]  # [P] some sample failed or timed out
    uniform: NDArray[np.bool_]  # [P] the rewards are all equal
    tokens: NDArray[np.float64]  # [P] response tokens of a sample, mean
    seconds: NDArray[np.float64]  # [P] in the environment, mean; not a number without one


def updated(
    before: RowHistory,
    outcomes: RowOutcomes,
    step: int,
    quarantine: QuarantineConfig | None,
    readmitted: Collection[int] | None = (),
) -> RowHistory:
    """The history after a step.

    Args:
        before: as it was.
        outcomes: of the step's groups, in their order.
        step: the step.
        quarantine: bounds beyond which a row leaves the draw; None: none does.
        readmitted: rows that are let in again first, with counts that begin anew; None: all.
    """
    rows = np.union1d(before.prompt_row, outcomes.row).astype(np.int64)
    new = _with_rows(before, rows)
    again = np.ones(len(rows), bool) if readmitted is None else np.isin(rows, list(readmitted))
    again &= new["reason"] > 0
    for name in ("reason", "since", "failures", "uniform"):
        new[name][again] = 0
    for number, at in enumerate(np.searchsorted(rows, outcomes.row).tolist()):
        new["draws"][at] += 1
        failed, reward = bool(outcomes.failed[number]), float(outcomes.reward[number])
        new["failures"][at] = new["failures"][at] + 1 if failed else 0
        if not failed:
            new["uniform"][at] = new["uniform"][at] + 1 if outcomes.uniform[number] else 0
        if not np.isnan(reward):
            new["scored"][at] += 1
            new["reward_sum"][at] += reward
        new["tokens"][at] = outcomes.tokens[number]
        new["seconds"][at] = outcomes.seconds[number]
        if quarantine is not None and new["reason"][at] == 0:
            reason = _reason({name: column[at] for name, column in new.items()}, quarantine)
            new["reason"][at], new["since"][at] = reason, step if reason else 0
    return RowHistory(**new)


def _with_rows(before: RowHistory, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The columns of a history for more rows, which nothing is known of yet."""
    at = np.searchsorted(rows, before.prompt_row)
    new: dict[str, NDArray[Any]] = {}
    for name, column in before.columns().items():
        new[name] = np.zeros(len(rows), column.dtype)
        new[name][at] = column
    new["prompt_row"] = rows
    return new


def _reason(line: Mapping[str, Any], quarantine: QuarantineConfig) -> int:
    """Why a row leaves the draw, a number of REASONS; 0 where it does not."""
    in_a_row: dict[str, tuple[int, int | None]] = {
        "failures": (line["failures"], quarantine.failures),
        "no_variance": (line["uniform"], quarantine.no_variance),
    }
    for name, (count, most) in in_a_row.items():
        if most is not None and count >= most:
            return REASONS.index(name)
    costs = {"tokens": quarantine.tokens, "seconds": quarantine.seconds}
    for name, bound in costs.items():
        if bound is not None and line[name] > bound:
            return REASONS.index(name)
    return 0
