"""Refrain's carriers in vLLM's terms and back: settings, sampling parameters, outputs.

Nothing here talks to an engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from configs.lora import NOT_ADAPTED, LoraConfig
from configs.rollout import RolloutConfig, cut_by
from engines.models import checkpoints
from engines.models.grammars import BegunTurn
from engines.models.routed_experts import RoutedExperts, checked
from engines.rollout.contract import RolloutSpec, Sampling
from engines.rollout.memory_plan import adapter_rank
from engines.rollout.samples import NOTHING, Completion
from engines.rollout.vllm_grammars import with_grammar
from engines.rollout.vllm_plugin import TRANSFER_BACKEND
from storage.batches.columns import UNFINISHED
from storage.batches.sampling_mask import SamplingMask, Words

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput

    from engines.models.routers import ChosenExperts

# Tokens that one step of vLLM takes at most: on CPU, where a prompt is not prefilled in parts, and on
# a GPU, where an engine that is made by its arguments would have 2,048, and vLLM's own LLM has these.
_STEP_TOKENS = 4096
_GPU_STEP_TOKENS = 16384


def engine_arguments(spec: RolloutSpec, directory: Path) -> AsyncEngineArgs:
    """vLLM's settings for the model in `directory`."""
    from vllm import AsyncEngineArgs
    from vllm.config import StructuredOutputsConfig, WeightTransferConfig
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.platforms import current_platform

    from engines.rollout.vllm_cpu_kernels import OPERATIONS, PROVIDER

    config, on_cpu = spec.rollout, current_platform.is_cpu()
    arguments = AsyncEngineArgs(
        model=str(directory),
        dtype=config.dtype,
        max_model_len=spec.max_model_len,
        max_num_seqs=config.max_sequences,
        tensor_parallel_size=config.tensor_parallel_size,
        enforce_eager=config.enforce_eager,
        ir_op_priority=IrOpPriorityConfig(
            **{name: [PROVIDER] for name in OPERATIONS if on_cpu},
        ),
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30) if on_cpu else None,
        enable_sleep_mode=spec.sleeps,
        # A tied head can stay stale after a sync: it is a weight of its own, and every weight
        # arrives by a sync.
        load_format="dummy",
        hf_overrides={"tie_word_embeddings": False},
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER_BACKEND),
        worker_extension_cls="engines.rollout.vllm_weight_loading.WeightsReporter",
        # Log-probs of the distribution that is sampled from.
        logprobs_mode="processed_logprobs",
        # Nothing that a request does not ask for.
        generation_config="vllm",
        # A seeded request whose prompt is prefilled in parts ends vLLM 0.32's process on CPU ("CPU
        # Generator does not use offset"). Not reported to vLLM; a fork's account of the same fault:
        # https://github.com/RBLN-SW/vllm-rbln/pull/1025
        enable_chunked_prefill=not on_cpu,
        max_num_batched_tokens=step_tokens(spec, on_cpu),
        # Engines must not all draw the same noise; a sample's own seed comes with its request.
        seed=int.from_bytes(os.urandom(4), "big") >> 1,
        enable_return_routed_experts=spec.routed_experts,
        return_sampling_mask=gives_masks(spec.rollout),
        # vLLM would choose by the first request.
        structured_outputs_config=StructuredOutputsConfig(backend="xgrammar"),
        disable_log_stats=not spec.measured,
    )
    further: dict[str, Any] = dict(config.engine_args)
    if proposed := speculation(config):
        further["speculative_config"] = proposed
    if spec.lora is not None:
        further |= adapter_arguments(spec.lora, checkpoints.tensor_shapes(directory))
    return replace(arguments, **further) if further else arguments


def gives_masks(config: RolloutConfig) -> bool:
    """Whether vLLM has to say which words are left; a grammar's follow from the tokens."""
    return config.sampling_mask and bool(cut_by(config))


def speculation(config: RolloutConfig) -> dict[str, Any]:
    """vLLM's settings for proposed tokens; empty: there are none.

    The weights of a draft model come with its files, and those of the policy by a sync.
    """
    if (ngram := config.speculative) is not None:
        return {
            "method": ngram.kind,
            "num_speculative_tokens": ngram.tokens,
            "prompt_lookup_max": ngram.longest_match,
            "prompt_lookup_min": ngram.shortest_match,
        }
    settings = config.engine_args.get("speculative_config")
    return (
        {"draft_load_config": {"load_format": "auto"}, **settings}
        if isinstance(settings, dict)
        else {}
    )


def adapter_arguments(lora: LoraConfig, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """With which vLLM takes a version's adapter; shapes: of the model's tensors by name."""
    tables = {name.split(".")[-2] for name, shape in shapes.items() if len(shape) == 2}
    layers = tables.difference(NOT_ADAPTED)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": adapter_rank(lora.rank),
        "lora_target_modules": sorted(
            layers if lora.target_modules == "all-linear" else lora.target_modules
        ),
    }


def step_tokens(spec: RolloutSpec, on_cpu: bool) -> int:
    """Tokens that one step of vLLM takes at most, unless rollout.engine_args says otherwise."""
    if on_cpu:
        return max(spec.max_model_len, _STEP_TOKENS)
    config = spec.rollout
    tokens = min(_GPU_STEP_TOKENS, config.max_sequences * spec.max_model_len)
    if config.engine_args.get("enable_chunked_prefill") is False:
        tokens = max(tokens, spec.max_model_len)
    return max(tokens, config.max_sequences)


def sampling_params(
    sampling: Sampling,
    ends: Sequence[int],
    seed: int | None,
    begun: Completion,
    masks: bool = False,
    turn: BegunTurn | None = None,
) -> SamplingParams:
    """What one completion is drawn with.

    ends: the model's end-of-sequence tokens. begun: what it has already, in the prompt. With
    top_k = 1 vLLM draws among tokens with the same logit; a temperature of 0 takes the likeliest one.
    masks: whether the engine gives the words that tokens were drawn from; it takes no request with a
    temperature of 0 then. turn: with a grammar, which alone says where it ends.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    likeliest = sampling.greedy and not masks
    stop = [] if turn is not None else list(sampling.stop)
    ignore_eos = sampling.ignore_eos and turn is None
    params = SamplingParams(
        max_tokens=sampling.most(len(begun.tokens), begun.turn) - len(begun.tokens),
        temperature=0.0 if likeliest else sampling.temperature,
        top_p=1.0 if sampling.greedy else sampling.top_p,
        top_k=0 if likeliest else sampling.top_k,
        min_p=0.0 if sampling.greedy else sampling.min_p,
        stop=stop,
        include_stop_str_in_output=True,
        stop_token_ids=[] if ignore_eos else list(ends),
        ignore_eos=ignore_eos,
        seed=None if sampling.greedy else seed,
        logprobs=0,
        # Kept as an array (vllm_logprobs.py); a stop string is looked for in what vLLM's dicts have.
        flat_logprobs=not stop,
        detokenize=bool(stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return params if turn is None else with_grammar(params, turn)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredTokens:
    """Of each of R tokens that were given, at temperature 1 and unfiltered."""

    logprobs: NDArray[np.float32]  # [R] nats
    ids: NDArray[np.int32]  # [R, k] the k likeliest words, the likeliest first
    words: NDArray[np.float32]  # [R, k] nats


def scoring_params(top_k: int = 0, masks: bool = False) -> SamplingParams:
    """A request that wants only the log-probs of its prompt, and of top_k words at each place.

    masks: as `sampling_params`; an engine that gives them takes no request without a top_k.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        top_k=int(masks),
        prompt_logprobs=top_k,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion(
    output: RequestOutput,
    sampling: Sampling,
    experts: ChosenExperts | None = None,
    mask: Callable[[list[int]], SamplingMask] | None = None,
) -> Completion:
    """The one completion of a request that has finished, or was aborted: then it is unfinished.

    sampling: how it was asked for. Of the likeliest tokens vLLM gives log-probs of what it did not
    draw from; they are 0.
    experts: of the model's routers, where those of each token are wanted. mask: of the words that
    tokens were drawn from, where vLLM does not say them.
    """
    (answer,) = output.outputs
    read, cached = len(output.prompt_token_ids or ()), output.num_cached_tokens
    if not answer.token_ids:
        return replace(NOTHING, read=read, cached=cached)
    tokens = list(answer.token_ids)
    spans, reason = answer.weight_versions, answer.finish_reason
    assert spans is not None, "every version is set by a sync"
    assert reason is not None, "only finished requests are handed on"
    words = None
    if sampling.sampling_mask:
        words = _words_left(answer, len(tokens)) if mask is None else mask(tokens)
    return Completion(
        tokens=tokens,
        logprobs=[0.0] * len(tokens) if sampling.greedy else _drawn_logprobs(answer, tokens),
        spans=[(int(span.version), span.start, span.end) for span in spans],
        finish_reason=UNFINISHED if reason == "abort" else reason,
        read=read,
        cached=cached,
        routed_experts=None
        if experts is None
        else _routed(answer, read + len(tokens) - 1, experts),
        sampling_mask=words,
    )


def _words_left(drawn: CompletionOutput, tokens: int) -> SamplingMask:
    mask = drawn.sampling_mask
    assert mask is not None, "vLLM was started to give it"
    if len(mask.token_ids) != tokens:
        raise ValueError(
            f"vLLM gave the words that {len(mask.token_ids)} tokens were drawn from, not {tokens}."
        )
    return SamplingMask.of(
        [
            Words(ids=np.sort(np.array(ids, np.int32))) if len(ids) else None
            for ids in mask.token_ids
        ]
    )


def _routed(drawn: CompletionOutput, tokens: int, experts: ChosenExperts) -> RoutedExperts:
    """Those of so many tokens, which are all but the last; vLLM has a row for every layer."""
    given = drawn.routed_experts
    assert given is not None, "vLLM was started to give them"
    if len(given) != tokens:
        raise ValueError(f"vLLM gave the experts of {len(given)} tokens, not of {tokens}.")
    return checked(given[:, experts.places], experts.of_no_token, experts.experts)


def _drawn_logprobs(drawn: CompletionOutput, tokens: Sequence[int]) -> list[float]:
    from engines.rollout.vllm_logprobs import DrawnLogprobs

    places = drawn.logprobs
    assert places is not None, "log-probs were asked for"
    assert len(places) == len(tokens), "each token has one"
    if isinstance(places, DrawnLogprobs):
        return places.drawn.tolist()
    return [place[token].logprob for place, token in zip(places, tokens, strict=True) if place]


def scores(output: RequestOutput, start: int) -> ScoredTokens:
    """Of a request's prompt tokens from `start` on, at least 1."""
    from vllm.logprobs import FlatLogprobs

    tokens, places = output.prompt_token_ids, output.prompt_logprobs
    assert tokens is not None, "requests are made of tokens"
    assert isinstance(places, FlatLogprobs), "prompt log-probs were asked for, and flat"
    # Of each place but the first, which nothing predicts: the token's own, then the words'.
    shape = (len(tokens) - 1, -1)
    ids = np.array(places.token_ids, np.int32).reshape(shape)[start - 1 :]
    logprobs = np.array(places.logprobs, np.float32).reshape(shape)[start - 1 :]
    return ScoredTokens(logprobs=logprobs[:, 0], ids=ids[:, 1:], words=logprobs[:, 1:])
