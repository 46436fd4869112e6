"""What a replay has to give: the committed weights to the bit, or within a tolerance, and why.

Where sums come in another order they are rounded otherwise. The measure is the share of the way: of
two versions the sum over all weights of the absolute differences, divided by that sum between the
stored state that the replay began with and the committed version.

The tolerance is a tenth. Products of bfloat16 round a number by up to 2^-8 of its size, so a gradient
whose sums are in another order is another one by about that share, and AdamW, which divides a
gradient by its own size, gives an element whose gradient is smaller than its rounding any step there
is. Together that may be some per cent of the way; on a CPU it was a thousandth. The update of another
batch is off by half of the way and more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from engines.train.spec import MadeOn, WeightsComparison

TOLERANCE = 0.1  # share of the way


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayDemand:
    """What is demanded of a replay."""

    bits: bool  # equal weights; else within the tolerance
    why: str  # a clause, for people


def demand_of(
    update: Mapping[str, JsonValue], now: MadeOn, ranks: int, threads: int
) -> ReplayDemand:
    """What a replay must give.

    Args:
        update: What the commit says of how its update was made.
        now: On what it was made again.
        ranks: That made it again.
        threads: Of each of them.
    """
    record = update.get("made_on")
    if not isinstance(record, Mapping):
        return ReplayDemand(bits=True, why="the commit does not say on what it was made")
    was = MadeOn.of(record)
    reasons = (
        None if was.fixed else _open(update, was),
        None if now.fixed else f"here ({now.device}) sums have no fixed order",
        _changed("devices", was.device, now.device),
        _changed("versions of torch", was.torch, now.torch),
        _changed("numbers of ranks", update.get("ranks"), ranks),
        _changed("numbers of threads", update.get("threads"), threads),
        _before_kernels(update, was),
    )
    for reason in reasons:
        if reason is not None:
            return ReplayDemand(bits=False, why=reason)
    return ReplayDemand(
        bits=True, why=f"both were made on a {was.device} with a fixed order of sums"
    )


def share_of_way(apart: WeightsComparison, way: WeightsComparison) -> float:
    """How far the replayed weights are from the committed ones; both compared with the latter.

    Args:
        apart: The replayed weights.
        way: The weights of the stored state that the replay began with.
    """
    whole = sum(one.total for one in way.differing)
    off = sum(one.total for one in apart.differing)
    return off / whole if whole else float("inf") if off else 0.0


def _open(update: Mapping[str, JsonValue], was: MadeOn) -> str:
    train = update.get("train")
    if isinstance(train, Mapping) and train.get("compile"):
        return "layers were compiled (train.compile), whose kernels may add in another order"
    return (
        f"on the {was.device} sums had no fixed order (train.deterministic = false): attention's "
        "backward pass adds with atomics"
    )


def _before_kernels(update: Mapping[str, JsonValue], was: MadeOn) -> str | None:
    """Of an update on a GPU by an older Refrain, whose commits have no train.kernels."""
    train = update.get("train")
    if was.on_cpu or not isinstance(train, Mapping) or "kernels" in train:
        return None
    return "it was made by a Refrain without train.kernels, whose sums on a GPU have another order"


def _changed(what: str, was: object, now: object) -> str | None:
    return None if was == now else f"{what} differ, {was} and {now}"
