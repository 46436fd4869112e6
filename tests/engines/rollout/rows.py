"""Rows that the transformers engine decodes, without the engine."""

import torch

from engines.rollout.contract import Sampling
from engines.rollout.hf_decoding import Reader, Row
from engines.rollout.samples import NOTHING, Completion


def row_of(prompt: list[int], seed: int, sampling: Sampling, begun: Completion = NOTHING) -> Row:
    """One that ends at its limit of tokens alone."""
    reader = Reader(
        tokenizer=None,  # type: ignore[arg-type]  # nothing is stopped by its text
        ends=frozenset(),
        max_model_len=128,
        device=torch.device("cpu"),
    )
    return Row(prompt, seed, sampling, reader, begun)
