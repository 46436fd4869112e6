"""Which modules of a model let a token see others, and in whose code: found in the code, by no list.

A mixer is a module that takes what was computed of earlier tokens (keys and values, or a state) and
has no such module below it. transformers' attention hands its work to a function of a table
(`ALL_ATTENTION_FUNCTIONS`), in which ours are; recurrent layers (Mamba, gated delta-net, short
convolutions, lightning attention) and the attention of some older families do it themselves.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

_STATES = {"past_key_values", "past_key_value", "layer_past", "cache_params"}  # arguments
_TABLE = "ALL_ATTENTION_FUNCTIONS"
_RECURRENT = re.compile(r"Mamba|SSM|Delta|Recurrent|Rglru|Lightning|LinearAtt|Conv(?!1D)|LSTM|Rwkv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixers:
    """Those of a decoder, by how they mix."""

    attention: tuple[nn.Module, ...]  # by a function of transformers' table
    recurrent: tuple[nn.Module, ...]  # carry a state from token to token
    own: tuple[nn.Module, ...]  # neither

    @property
    def names(self) -> tuple[str, ...]:
        """Classes of those that do not call a function of the table."""
        return tuple(sorted({type(each).__name__ for each in (*self.recurrent, *self.own)}))


def mixers(model: PreTrainedModel) -> Mixers:
    """Of a model's decoder."""
    decoder = model.get_decoder()
    own_name = type(model).__name__.partition("For")[0]  # RecurrentGemma's norms are not recurrent
    kinds: dict[str, list[nn.Module]] = {"attention": [], "recurrent": [], "own": []}
    for module in _lowest(decoder):
        if _TABLE in _code(module).co_names:
            kinds["attention"].append(module)
        elif _is_recurrent(module, own_name):
            kinds["recurrent"].append(module)
        else:
            kinds["own"].append(module)
    return Mixers(**{kind: tuple(modules) for kind, modules in kinds.items()})


def hands_on(model: PreTrainedModel) -> bool:
    """Whether the decoder gives its keyword arguments to its layers, and these to attention."""
    decoder = model.get_decoder()
    attention = mixers(model).attention
    above = [
        module
        for module in decoder.modules()
        if _takes(module, _STATES)
        and not any(module is each for each in attention)
        and any(each in set(module.modules()) for each in attention)
    ]
    return all(_passes_on(module) for module in above) and all(
        _takes_any(module) for module in attention
    )


def _lowest(decoder: nn.Module) -> Iterator[nn.Module]:
    """Modules that take a state, none of whose parts does."""
    for module in decoder.modules():
        if module is decoder or not _takes(module, _STATES):
            continue
        if isinstance(module, GradientCheckpointingLayer):  # one whose part mixes nothing
            continue
        if not any(_takes(part, _STATES) for part in module.modules() if part is not module):
            yield module


def _is_recurrent(module: nn.Module, own_name: str) -> bool:
    named = _RECURRENT.search(type(module).__name__.removeprefix(own_name))
    return bool(named) or any(isinstance(part, nn.Conv1d) for part in module.children())


def _takes(module: nn.Module, names: set[str]) -> bool:
    return bool(names & inspect.signature(_forward(module)).parameters.keys())


def _takes_any(module: nn.Module) -> bool:
    parameters = inspect.signature(_forward(module)).parameters.values()
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def _passes_on(module: nn.Module) -> bool:
    """Whether the code of a module calls something with arguments that it was given by any name."""
    calls = (step.opname for step in dis.get_instructions(_code(module)))
    return _takes_any(module) and "CALL_FUNCTION_EX" in calls


def _forward(module: nn.Module) -> Callable[..., Any]:
    return inspect.unwrap(type(module).forward)


def _code(module: nn.Module) -> Any:
    return _forward(module).__code__
