"""The self-test of a model before it trains: run in a child process, its verdict cached.

A small model of the same config by the train engine and by transformers' own forward pass.
Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.train.cached_child import BrokeOff, CachedChild
from engines.train.self_test.verdict import Verdict


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
