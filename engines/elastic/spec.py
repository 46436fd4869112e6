"""What aggregator, workers and flow tell each other of an optimizer step. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage.runs.gradients import GradientsOf
from storage.runs.weights import WeightsRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Rows whose tokens' gradients one worker sums."""

    number: int  # within the optimizer step; gradients are added up in this order
    rows: tuple[int, ...]  # row numbers of the batch, ascending


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCounts:
    """By what the loss of a mini-batch is divided: counts over all its units."""

    tokens: float  # with mask 1
    sequences: float  # rows with at least one such token
    rows: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Offered:
    """An optimizer step whose gradients are wanted."""

    of: GradientsOf
    folder: str  # key, where they are left
    weights: WeightsRef  # with which they are computed
    counts: LossCounts
    units: tuple[Unit, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitDone:
    """A unit whose gradient is in the store."""

    unit: int
    nbytes: int  # of its file
    computed: bool  # False: it was there already
    equal: bool = True  # False: another worker's first gradient stands, and has other bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What became of an optimizer step: it was made, unless gradients were refused."""

    refused: Mapping[int, str]  # by unit, why; their markers are gone
    nbytes: int = 0  # of gradients that were read
    seconds: float = 0.0
