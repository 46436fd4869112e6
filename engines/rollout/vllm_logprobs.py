"""Log-probs of the tokens that vLLM draws, in four bytes each.

vLLM keeps a dict and an object for each token until its request ends, or lists of six numbers
(`flat_logprobs`): 512 answers of 32k tokens are gigabytes. Of requests that want the drawn token's
alone, which are all of ours without stop strings, an array is kept instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain
from typing import overload

from vllm.logprobs import FlatLogprobs, LogprobsOnePosition, SampleLogprobs
from vllm.v1.engine import logprobs as of_engine


class DrawnLogprobs(FlatLogprobs):
    """The log-prob of each token that was drawn, float32; nothing of other tokens."""

    def __init__(self, drawn: array[float] | None = None) -> None:
        super().__init__()
        self.drawn = array("f") if drawn is None else drawn

    def append_fast(
        self,
        token_ids: list[int],
        logprobs: list[float],
        ranks: chain[int],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Take the next token's: vLLM puts the drawn one's first."""
        self.drawn.append(logprobs[0])

    def __len__(self) -> int:
        return len(self.drawn)

    @overload
    def __getitem__(self, position: int) -> LogprobsOnePosition: ...

    @overload
    def __getitem__(self, s: slice, /) -> DrawnLogprobs: ...

    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | DrawnLogprobs:
        if isinstance(index, slice):
            return DrawnLogprobs(self.drawn[index])
        raise TypeError("of a drawn token only the log-prob is kept; read `drawn`")


def register() -> None:
    """Have this process keep DrawnLogprobs for requests with `flat_logprobs`."""
    before = of_engine.create_sample_logprobs

    def create(flat_logprobs: bool) -> SampleLogprobs:
        return DrawnLogprobs() if flat_logprobs else before(flat_logprobs)

    of_engine.create_sample_logprobs = create
