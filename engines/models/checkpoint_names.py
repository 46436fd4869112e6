"""What the files of a model directory call each weight, and what they hold that the model lacks.

transformers renames weights as it loads them: what an image-text checkpoint calls
`model.language_model.layers.0.…` is `model.layers.0.…` of the text model inside. Its vision tower and
layers for multi-token prediction are in its files and no part of that model. Policy versions carry
the files' names and all that they hold, so that whoever reads the checkpoint reads a version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from engines.models.adapters import is_factor
from engines.models.checkpoints import build_empty
from engines.models.tensor_files import (
    StackedTensor,
    StoredTensor,
    map_tensors,
    stored_tensors,
    unfit,
)
from storage.runs.weights import FileNames, Part

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

# Buffers that older checkpoints hold and that models now compute; transformers passes over them too.
COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


@dataclass(frozen=True, kw_only=True)
class CheckpointNames:
    """Of a text model that is trained, by what its checkpoint's files say.

    Example: of an image-text checkpoint
        in_files = {"model.norm.weight": "model.language_model.norm.weight"}
        stacks = {"model.layers.0.mlp.experts.down_proj": (Part(…), …)}
        unused = {"model.visual.patch_embed.weight": StoredTensor(…)}
    """

    in_files: Mapping[str, str] = field(default_factory=dict)  # by the model's; those that differ
    stacks: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)  # as the files have them
    unused: Mapping[str, StoredTensor] = field(default_factory=dict)  # by the files' name

    def to_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model's tensors by the files' names, and after them those that the model lacks.

        The latter are mapped: they take memory as they are read.
        """
        return self.renamed(tensors) | map_tensors(self.unused)

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model's tensors by the files' names."""
        return {self.in_files.get(name, name): tensor for name, tensor in tensors.items()}

    def untold(self, told: CheckpointNames) -> FileNames:
        """What tensors that are named as `told` says are in the files."""
        renamed = {own: name for own, name in self.in_files.items() if own not in told.in_files}
        return FileNames(renamed=renamed, stacks=self.stacks)

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
    tensors: Mapping[str, StoredTensor | StackedTensor]
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
    """Where the files have each name of the model; None where they hold some in another form.

    transformers may make a weight of several tensors. Such a one is found here if it has theirs one
    after the other, as experts that are stacked have.

    Raises ValueError naming a tensor that is missing, of another shape, or not of the model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    wanted = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    matched: dict[str, StoredTensor | StackedTensor] = {}
    unknown: dict[str, StoredTensor] = {}
    parts: dict[str, dict[str, list[StoredTensor]]] = {}  # by the model's name and the pattern
    for name, tensor in stored.items():
        prefix = model.base_model_prefix
        target, converted = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:  # as transformers does
            target, converted = name, None
        if target in matched or not tensor.readable:
            return None
        if target not in wanted:
            unknown[name] = tensor
        elif converted is None:
            matched[target] = tensor
        else:
            parts.setdefault(target, {}).setdefault(converted, []).append(tensor)
    for target, by_pattern in parts.items():
        for found in by_pattern.values():  # as transformers does
            found.sort(key=lambda one: dot_natural_key(one.name))
        stack = _stack(by_pattern, converters)
        if stack is None or target in matched:
            return None
        matched[target] = stack
    if not parts:  # a mixture's files may have layers that no list of transformers names
        _check_unknown(directory, model, unknown)
    renamed = {
        own: one.name
        for own, one in matched.items()
        if own != one.name and isinstance(one, StoredTensor)
    }
    stacks = {own: one.parts for own, one in matched.items() if isinstance(one, StackedTensor)}
    bare = f"{model.base_model_prefix}."
    if all(name == own.removeprefix(bare) for own, name in renamed.items()):
        # Files of a model without its head: a version has one.
        stacks = {own: _below(bare if renamed else "", parts) for own, parts in stacks.items()}
        renamed = {}
    names = CheckpointNames(
        in_files=renamed,
        stacks=stacks,
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


def _below(prefix: str, parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(Part(name=prefix + part.name, shape=part.shape) for part in parts)


def _stack(
    by_pattern: Mapping[str, Sequence[StoredTensor]], converters: Iterable[WeightConverter]
) -> StackedTensor | None:
    """What transformers makes of tensors, by their patterns; None: it has not theirs in order."""
    converter = next(one for one in converters if set(by_pattern) <= set(one.source_patterns))
    lists = [by_pattern.get(pattern, ()) for pattern in converter.source_patterns]
    kinds = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
    if len({len(one) for one in lists}) != 1 or len(converter.target_patterns) != 1:
        return None
    # Each expert's tensors stand together: gate, up, gate, up.
    pieces = tuple(tensor for group in zip(*lists, strict=True) for tensor in group)
    shapes = {tensor.shape[1:] for tensor in pieces}
    if len(shapes) != 1:
        return None
    rest, rows = shapes.pop(), sum(tensor.shape[0] for tensor in pieces if tensor.shape)
    if kinds == [("Concatenate", 0)]:
        return StackedTensor(pieces=pieces, shape=(rows, *rest))
    stacked = kinds == [("MergeModulelist", 0)] and len(lists) == 1
    if not (stacked or kinds == [("MergeModulelist", 0), ("Concatenate", 1)]):
        return None
    experts = len(lists[0])
    return StackedTensor(pieces=pieces, shape=(experts, rows // experts, *rest))


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
