"""What the self-test says of a model: asked of a child process, its verdict cached.

A small model of the same config by the train engine and by transformers' own forward pass. Imports
neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.train.model_probes import BrokeOff, CachedChild


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Of a model at a length of samples. Example: Verdict(largest=2e-6), which is exact."""

    refused: str | None = None  # why the train engine may not train it; a clause
    untested: str | None = None  # why it could not be tested; a clause
    largest: float | None = None  # nats by which log-probs differed at most
    # Why its layers are not compiled and its samples not divided over ranks; a clause.
    together: str | None = None
    # By how much gradients differ where layers keep their products only (train.recompute =
    # selective), as a share of the largest one; infinite: they cannot be had.
    selective: float = 0.0
    unrounded: str | None = None  # why its products cannot be in bfloat16; a clause
    routers: int = 0  # of a mixture of experts, that the train engine knows
    experts: int = 0  # of each layer that transformers stacks; of several numbers what divides all
    biased: int = 0  # of these have a bias that balances experts
    told: bool = False  # whether they take experts that they are told
    linear: tuple[str, ...] = ()  # the last parts of the names of the decoder's linear layers
    stacked: tuple[str, ...] = ()  # names of the weights of its experts

    def to_json(self) -> str:
        """In one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """What `to_json` made; ValueError, TypeError or KeyError for anything else."""
        fields = json.loads(text)
        names = {name: tuple(fields[name]) for name in ("linear", "stacked")}
        return cls(**{**fields, **names})


@contextmanager
def self_test(directory: Path, longest: int) -> Iterator[Callable[[], Verdict]]:
    """Begin the self-test of a model; what is given waits for the verdict. Ends with the body.

    Args:
        directory: Of the model's files, of which config.json is read.
        longest: Tokens of the longest sample.
    """
    child = CachedChild(
        module="engines.train.self_test.child",
        read=Verdict.from_json,
        directory=directory,
        arguments=(str(longest),),
        folder="self-tests",
    )
    with child.begun() as results:

        def wait() -> Verdict:
            try:
                return results()
            except BrokeOff as error:
                return Verdict(untested=f"its self-test {error}")

        yield wait
