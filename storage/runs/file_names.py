"""What a checkpoint's files call the tensors that a policy version has by other names, or in one.

transformers makes one tensor of the experts of a layer, which most checkpoints hold apart. Versions
have its form, which is fewer tensors; beside them lies how the files have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from storage.objects.errors import ObjectDamaged
from storage.runs.weights import Frozen

if TYPE_CHECKING:
    import torch

FILE_NAMES = "checkpoint_names.json"  # beside a version's tensors, where some differ


class Part(Frozen):
    """A tensor of the files."""

    name: str
    shape: tuple[int, ...]


class FileNames(Frozen):
    """What the files call a version's tensors; those that are not here have one name in both.

    Example:
        renamed = {"lm_head.weight": "embed_out.weight"}
        stacks = {"model.layers.0.mlp.experts.down_proj": (Part(name="….experts.0.w2.weight", …), …)}
    """

    renamed: Mapping[str, str] = Field(default_factory=dict)
    stacks: Mapping[str, tuple[Part, ...]] = Field(default_factory=dict)  # of theirs, in order

    def __bool__(self) -> bool:
        """Whether there is any difference."""
        return bool(self.renamed or self.stacks)

    def apart(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """A version's tensors as the files have them; parts are views of their whole.

        Raises ObjectDamaged naming a tensor that its parts do not make up.
        """
        for name, tensor in tensors:
            if name not in self.stacks:
                yield self.renamed.get(name, name), tensor
                continue
            parts = self.stacks[name]
            sizes = [math.prod(part.shape) for part in parts]
            if min(sizes, default=-1) < 0 or sum(sizes) != tensor.numel():
                raise ObjectDamaged(
                    f"{FILE_NAMES} says that {name} has {sum(sizes)} elements in the model's files, "
                    f"and it has {tensor.numel()}."
                )
            flat = tensor.reshape(-1)
            for part, size, stop in zip(parts, sizes, accumulate(sizes), strict=True):
                yield part.name, flat[stop - size : stop].view(part.shape)


def read_file_names(data: bytes | None) -> FileNames:
    """What lies beside a version's tensors; None: nothing does. ObjectDamaged."""
    if data is None:
        return FileNames()
    try:
        return FileNames.model_validate_json(data)
    except ValidationError as error:
        raise ObjectDamaged(f"{FILE_NAMES} of a policy version is damaged: {error}") from error
