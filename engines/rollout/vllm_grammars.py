"""Turns with a grammar in vLLM's core process: its own mechanism, with our grammars.

vLLM asks a grammar for the words that may come next, masks the logits of all others, and tells it
what was drawn. Its own grammars begin at a request's first token and leave special tokens; ours begin
where the turn was left, and leave what engines/models/grammars.py says, by which `VllmEngine` finds
the words of each token again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.models.checkpoints import load_tokenizer
from engines.models.grammars import BegunTurn, Grammars

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

# Of a request's extra arguments: the tokens that the turn has already, and those that end it.
TURN, ENDS = "turn", "ends"


def with_grammar(params: SamplingParams, turn: BegunTurn) -> SamplingParams:
    """A request for the rest of a turn."""
    from vllm.sampling_params import StructuredOutputsParams

    params.structured_outputs = StructuredOutputsParams(structural_tag=turn.structural_tag)
    params.extra_args = {TURN: turn.tokens, ENDS: list(params.stop_token_ids or ())}
    return params


def register() -> None:
    """Have this process begin our grammars where turns were left."""
    from vllm.v1.structured_output import StructuredOutputManager

    before = StructuredOutputManager._create_grammar
    made: dict[tuple[int, ...], Grammars] = {}  # by the tokens that end a turn

    def create(manager: StructuredOutputManager, request: Request) -> StructuredOutputGrammar:
        params = request.sampling_params
        if params is None or TURN not in (params.extra_args or {}):
            return before(manager, request)
        assert params.extra_args is not None
        ends = tuple(params.extra_args[ENDS])
        model = manager.vllm_config.model_config
        if ends not in made:
            tokenizer = load_tokenizer(Path(model.model))
            made[ends] = Grammars(tokenizer, ends, model.get_vocab_size())
        return _begun(made[ends], params)

    StructuredOutputManager._create_grammar = create  # type: ignore[method-assign,assignment]


def _begun(grammars: Grammars, params: SamplingParams) -> Any:
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    assert params.structured_outputs is not None and params.extra_args is not None
    tag = params.structured_outputs.structural_tag
    assert isinstance(tag, str)
    progress = grammars.begin(BegunTurn(structural_tag=tag, tokens=params.extra_args[TURN]))
    return XgrammarGrammar(
        vocab_size=progress.size, matcher=progress.matcher, ctx=grammars.compiled(tag)
    )
