"""A model directory's weights into a sharded model: each rank reads its own rows.

A model is built on the meta device, sharded, and given memory for the rank's rows (fsdp.py); here
its values come. Why so, and what is done with files that cannot be read by rows, is in
docs/decisions/loading-by-rank.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from engines.models.checkpoints import build_empty, load_for_training
from engines.models.tensor_files import (
    CheckpointNames,
    StackedTensor,
    StoredTensor,
    distinct_weights,
    match,
    part_equals,
    read_part,
    stored_tensors,
)
from engines.start_progress import report
from engines.train.model.fsdp import own_part, spread
from engines.train.model.master_weights import MasterWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What is known of a model directory's weights before any of them is read."""

    directory: Path
    decoder: str  # what a name in the decoder has before it in the language model: "model."
    # The tensor in the files of each weight, by its name in the language model; of names that are
    # tied, one that the files lack has another's. None: the files hold it otherwise than the model,
    # and rank 0 loads them whole.
    tensors: Mapping[str, StoredTensor | StackedTensor] | None
    names: CheckpointNames  # of the weights in those files

    @property
    def stacked(self) -> bool:
        """Whether the files hold some weight in several tensors."""
        return any(isinstance(tensor, StackedTensor) for tensor in (self.tensors or {}).values())


def open_checkpoint(directory: Path) -> Checkpoint:
    """Look at a model directory's config.json and at the headers of its files.

    Raises ValueError naming the file or the tensor that is missing, of another shape, or not of
    the model, and for quantised weights.
    """
    model = build_empty(directory)
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            f"{directory}: config.json has a quantization_config, and quantised weights cannot be "
            "trained. Set model.path to the checkpoint that they were made of."
        )
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    stored = stored_tensors(directory)
    matched = None if stored is None else match(directory, model, stored)
    return Checkpoint(
        directory=directory,
        decoder=f"{name}." if name else "",
        tensors=None if matched is None else matched.tensors,
        names=CheckpointNames() if matched is None else matched.names,
    )


def load(
    model: PreTrainedModel,
    prefix: str,
    checkpoint: Checkpoint,
    group: dist.ProcessGroup,
    masters: MasterWeights,
) -> None:
    """Set every value of a sharded model; a collective where rank 0 loads for all.

    Args:
        model: The language model, or a part of it such as its decoder.
        prefix: What the part's names have before them in the language model.
        checkpoint: Of the directory that the model was built from.
        group: All ranks.
        masters: Where weights have one, its values are set instead.

    Raises:
        ValueError: A file is cut off, or tensors differ that config.json ties.
    """
    _compute_buffers(model)
    if checkpoint.tensors is None:
        _from_rank_0(model, prefix, checkpoint.directory, group, masters)
        return
    distinct = distinct_weights(model)
    for number, (names, target) in enumerate(distinct):
        report(f"reading the model's files: {number} of {len(distinct)} tensors")
        local, begin = own_part(masters.to_set(target))
        first, *others = (checkpoint.tensors[prefix + name] for name in names)
        read_part(first, begin, local)
        for other in others:
            if other != first and not part_equals(other, begin, local):
                raise ValueError(_not_tied(checkpoint.directory, first.name, other.name))
        masters.take()


def _from_rank_0(
    model: PreTrainedModel,
    prefix: str,
    directory: Path,
    group: dist.ProcessGroup,
    masters: MasterWeights,
) -> None:
    """Rank 0 loads the files as transformers does, and gives every rank its rows."""
    report("rank 0 loads the model's files")
    whole = load_for_training(directory).state_dict() if group.rank() == 0 else {}
    for names, target in distinct_weights(model):
        first, *others = (whole.pop(prefix + name, None) for name in names)
        for name, other in zip(names[1:], others, strict=True):
            if first is not None and other is not None and not torch.equal(first, other):
                raise ValueError(_not_tied(directory, names[0], name))
        spread(masters.to_set(target), first, 0, group)
        masters.take()


def _not_tied(directory: Path, first: str, second: str) -> str:
    return (
        f"{directory}: config.json ties {first} and {second}, whose values differ. Set "
        "tie_word_embeddings to false there."
    )


def _compute_buffers(model: PreTrainedModel) -> None:
    """Give buffers that no checkpoint holds, such as rotary frequencies, their values.

    transformers' own way: `initialize_weights` passes over tensors that are marked as initialised.
    """
    stored = model.state_dict(keep_vars=True)
    for tensor in stored.values():
        tensor._is_hf_initialized = True
    computed = {name: each for name, each in model.named_buffers() if name not in stored}
    for buffer in computed.values():
        buffer.fill_(_unset(buffer))
    model.initialize_weights()
    for name, buffer in computed.items():
        unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer)
        if buffer.dtype != torch.bool and bool(unset.any()):
            raise ValueError(
                f"{type(model).__name__} does not compute its buffer {name}. Choose another model."
            )


def _unset(buffer: Tensor) -> float | int:
    if buffer.is_floating_point():
        return float("nan")
    return 0 if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min
