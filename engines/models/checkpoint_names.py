"""What the files of a model directory call each weight, and what they hold that the model lacks.

transformers renames weights as it loads them: what an image-text checkpoint calls
`model.language_model.layers.0.…` is `model.layers.0.…` of the text model inside. Its vision tower and
layers for multi-token prediction are in its files and no part of that model. Policy versions carry
the files' names and all that they hold, so that whoever reads the checkpoint reads a version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from engines.models.adapters import is_factor
from engines.models.checkpoints import build_empty
from engines.models.tensor_files import StoredTensor, map_tensors, stored_tensors, unfit

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

# Buffers that older checkpoints hold and that models now compute; transformers passes over them too.
COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


@dataclass(frozen=True, kw_only=True)
class CheckpointNames:
    """Of a text model that is trained, by what its checkpoint's files say.

    Example: of an image-text checkpoint
        in_files = {"model.norm.weight": "model.language_model.norm.weight"}
        unused = {"model.visual.patch_embed.weight": StoredTensor(…)}
    """

    in_files: Mapping[str, str] = field(default_factory=dict)  # by the model's; those that differ
    unused: Mapping[str, StoredTensor] = field(default_factory=dict)  # by the files' name

    def to_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model's tensors by the files' names, and after them those that the model lacks.

        The latter are mapped: they take memory as they are read.
        """
        return self.renamed(tensors) | map_tensors(self.unused)

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model's tensors by the files' names."""
        return {self.in_files.get(name, name): tensor for name, tensor in tensors.items()}

    def own(self, name: str) -> str | None:
        """The model's name of a tensor, which has that or the files'; None: the model lacks it."""
        return None if name in self.unused else self._own.get(name, name)

    def in_model(self, names: Iterable[str]) -> dict[str, str]:
        """The same of several, those left out that the model lacks."""
        return {name: own for name in names if (own := self.own(name)) is not None}

    @cached_property
    def _own(self) -> dict[str, str]:
        return {theirs: own for own, theirs in self.in_files.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchedTensors:
    """Where each weight of a model lies in the files of its directory."""

    # By the model's name; of names that are tied, one that the files lack has another's.
    tensors: Mapping[str, StoredTensor]
    names: CheckpointNames


def checkpoint_names(directory: Path) -> CheckpointNames:
    """Of the model of a directory; none where its files hold weights otherwise than the model does.

    Raises ValueError as `match` does.
    """
    stored = stored_tensors(directory)
    matched = None if stored is None else match(directory, build_empty(directory), stored)
    return CheckpointNames() if matched is None else matched.names


def match(
    directory: Path, model: PreTrainedModel, stored: Mapping[str, StoredTensor]
) -> MatchedTensors | None:
    """The stored tensor of each name in the model; None where transformers must convert some.

    Raises ValueError naming a tensor that is missing, of another shape, or not of the model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    wanted = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    matched: dict[str, StoredTensor] = {}
    unknown: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        prefix = model.base_model_prefix
        target, converted = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:  # as transformers does
            target, converted = name, None
        if converted is not None or target in matched or not tensor.readable:
            return None
        if target in wanted:
            matched[target] = tensor
        else:
            unknown[name] = tensor
    _check_unknown(directory, model, unknown)
    renamed = {own: one.name for own, one in matched.items() if own != one.name}
    bare = f"{model.base_model_prefix}."
    if all(name == own.removeprefix(bare) for own, name in renamed.items()):
        renamed = {}  # files of a model without its head: a version has one
    names = CheckpointNames(
        in_files=renamed,
        unused={name: one for name, one in unknown.items() if not _is_computed(name)},
    )
    for tied, weight in distinct_weights(model):
        source = next((matched[name] for name in tied if name in matched), None)
        if source is None:
            raise ValueError(unfit(directory, tied[0], "is not in its files"))
        for name in tied:
            if matched.setdefault(name, source).shape != tuple(weight.shape):
                raise ValueError(
                    unfit(
                        directory,
                        matched[name].name,
                        f"has shape {matched[name].shape} in {matched[name].file.name}, "
                        f"{tuple(weight.shape)} by config.json",
                    )
                )
    return MatchedTensors(tensors=matched, names=names)


class OriginalForm:
    """A model's tensors as the files of its checkpoint hold them, where transformers converts some.

    Of most mixtures it stacks the experts of a layer, and versions are in its form.
    """

    def __init__(self, directory: Path) -> None:
        """Of the model of a directory, whose files are looked at."""
        stored = stored_tensors(directory)
        self._model = build_empty(directory)
        self.other = stored is not None and match(directory, self._model, stored) is None

    def of(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """One tensor by the files' names: several, where they hold it in parts."""
        from transformers.core_model_loading import revert_weight_conversion

        if not self.other:
            return {name: tensor}
        found: dict[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return found


def distinct_weights(model: PreTrainedModel) -> list[tuple[list[str], Tensor]]:
    """Every weight and stored buffer once, with its name, or names where weights are tied.

    Adapters are in no model's files.
    """
    distinct: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_factor(name):
            continue
        distinct.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(distinct.values())


def _is_computed(name: str) -> bool:
    return any(re.search(pattern, name) for pattern in COMPUTED)


def _check_unknown(directory: Path, model: PreTrainedModel, names: Iterable[str]) -> None:
    """Refuse tensors of which the model knows nothing, save those that it is known to pass over."""
    passed = model._keys_to_ignore_on_load_unexpected or ()
    for name in sorted(names):
        if not (_is_computed(name) or any(re.search(pattern, name) for pattern in passed)):
            what = "is in its files, but not in the model of config.json"
            raise ValueError(unfit(directory, name, what))
