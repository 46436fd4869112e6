"""How completions are sampled."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from configs.base import Settings

# Arguments of vLLM's engine that follow from other settings, or that Refrain depends on; each with
# what to set instead.
OWN_ENGINE_ARGS = {
    "model": "model.path",
    "dtype": "rollout.dtype",
    "max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens",
    "max_num_seqs": "rollout.max_sequences",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "enforce_eager": "rollout.enforce_eager",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "load_format": None,
    "hf_overrides": None,
    "weight_transfer_config": None,
    "worker_extension_cls": None,
    "logprobs_mode": None,
    "generation_config": None,
    "seed": "rollout.seed",
    "enable_sleep_mode": "cluster.share_devices",
    "enable_lora": "lora.serving",
    "max_lora_rank": "lora.rank",
    "max_loras": None,
    "fully_sharded_loras": None,
    "lora_dtype": "rollout.dtype",
    "lora_target_modules": "lora.target_modules",
}


class ThinkingConfig(Settings):
    """A bound of thoughts. One that has not ended within it is ended by words that do not train."""

    budget: int = Field(
        ge=1,
        description="Most tokens of a turn, from its beginning, in which a thought may be open.",
    )
    start: str = Field("<think>", min_length=1, description="What begins a thought.")
    end: str = Field("</think>", min_length=1, description="What ends a thought.")
    closing: str = Field(
        "\n</think>\n\n", description="Words that end a thought at its budget; `end` is among them."
    )

    @model_validator(mode="after")
    def _the_words_end_it(self) -> Self:
        if self.end not in self.closing:
            raise ValueError(
                f"rollout.thinking.closing = {self.closing!r} has no {self.end!r} "
                "(rollout.thinking.end), so that the thought would go on. Put it in."
            )
        return self


class NgramSpeculation(Settings):
    """Tokens proposed because they followed the last ones before, in the prompt or the answer.

    A proposed token is kept with the probability that leaves what is drawn as without (Leviathan et
    al., 2023, arXiv:2211.17192).
    """

    kind: Literal["ngram"] = Field("ngram", description="Where proposals come from.")
    tokens: int = Field(4, ge=1, le=32, description="Tokens proposed at once.")
    longest_match: int = Field(
        4, ge=1, description="Last tokens that are looked for, at most; the longest match counts."
    )
    shortest_match: int = Field(
        2, ge=1, description="Last tokens of which there is a proposal, at least."
    )

    @model_validator(mode="after")
    def _matches_are_a_range(self) -> Self:
        if self.shortest_match > self.longest_match:
            raise ValueError(
                f"rollout.speculative.shortest_match = {self.shortest_match} is more than "
                f"longest_match = {self.longest_match}. Set it to {self.longest_match} or less."
            )
        return self


class RolloutConfig(Settings):
    """The rollout engine and its sampling parameters."""

    later = frozenset({"weight_transfer", "weight_transfer_timeout", "own_process"})

    engine: Literal["vllm", "transformers"] = Field(
        "vllm", description="Engine that samples: vLLM, or transformers generation."
    )
    max_new_tokens: int = Field(256, ge=1, description="Longest completion, in tokens.")
    temperature: float = Field(
        1.0, gt=0, description="Sampling temperature; the trainer's logits are divided by it too."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling: kept probability mass.")
    top_k: int = Field(0, ge=0, description="Sample from the k likeliest tokens; 0 is off.")
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Sample from the tokens with at least this share of the likeliest one's "
        "probability; 0 is off.",
    )
    sampling_mask: bool = Field(
        False,
        description="Keep of each token the words that top_p, top_k, min_p or a grammar left, and "
        "renormalise the trainer's distributions over the same words (Keep Sampling Mask, "
        "arXiv:2512.02556).",
    )
    thinking: ThinkingConfig | None = Field(
        None, description="A budget of thinking tokens for each turn. None: no bound but a turn's."
    )
    stop: tuple[str, ...] = Field((), description="Strings that end a completion (kept in it).")
    ignore_eos: bool = Field(False, description="Go on past the end-of-sequence token.")
    seed: int | None = Field(
        None,
        description="Seed of sampling. With one, each sample has its own seed and the same prompts "
        "under the same weights give the same completions; none is faster on CPU.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16",
        description="Number format of the rollout engine's weights and activations. Unless set, "
        "float32 on a CPU without AVX-512 or bf16 instructions.",
    )
    shards: int = Field(
        8,
        ge=1,
        description="Parts into which a step's prompts are split; the unit of retry. An engine works "
        "on as many at once as its pool has slots. Unless set, at most prompts_per_step, and as many "
        "with over_sampling.",
    )
    max_sequences: int = Field(
        64,
        ge=1,
        description="Sequences that an engine decodes at once. Unless set, 512 with vLLM where "
        "rollout workers have GPUs.",
    )
    kv_cache_gib: float = Field(
        2.0, gt=0, description="Memory of vLLM's key-value cache on CPU, in GiB."
    )
    gpu_memory_utilization: float = Field(
        0.85, gt=0, le=1, description="Share of the GPU's memory that vLLM may take."
    )
    sleep_level: Literal[1, 2] = Field(
        2,
        description="With cluster.share_devices, what becomes of the weights while other roles have "
        "the devices: kept in the host's memory (1), or dropped (2), since new ones come with the "
        "next sync. Keys and values are dropped either way.",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="Devices over which one engine is split."
    )
    enforce_eager: bool = Field(
        True,
        description="Run vLLM without compiled graphs: starts in seconds, samples slower on GPU. "
        "Unless set, false where rollout workers have GPUs.",
    )
    speculative: NgramSpeculation | None = Field(
        None,
        description="Have vLLM propose tokens and check several in one step: the distribution and "
        "the log-probs stay, a seed gives other answers. It pays where answers repeat themselves and "
        "few are decoded at once. Draft models: engine_args.speculative_config.",
    )
    engine_args: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Further arguments of vLLM's engine (AsyncEngineArgs) by name, as "
        "{max_num_batched_tokens: 32768}; that one is 16,384 on a GPU unless set.",
    )
    own_process: bool = Field(
        False,
        description="Have vLLM's front end in a process of its own, below the worker's: a trainer on "
        "the same worker and it do not wait for each other's Python. Unless set, true where the two "
        "share GPUs and steps overlap.",
    )
    kv_on_update: Literal["recompute", "keep"] = Field(
        "recompute",
        description="With max_staleness > 0, answers in progress when new weights arrive go on under "
        "them: with their keys and values computed again, or with those of the old weights.",
    )
    over_sampling: float = Field(
        1.0,
        ge=1,
        le=2,
        description="Groups under way in a step, as a multiple of prompts_per_step, rounded up. The "
        "step has its samples as soon as prompts_per_step groups are finished.",
    )
    partial_rollout: Annotated[
        Literal["off", "carry"], BeforeValidator(lambda value: "off" if value is False else value)
    ] = Field(
        "off",
        description="What becomes of the groups that over_sampling does not wait for: dropped, or "
        "carried to the next step, which goes on from their tokens. With carry the tokens of answers "
        "in progress are saved too, and another worker goes on from them when one dies.",
    )
    overdue: Literal["wait", "drop_and_refill", "cut"] = Field(
        "wait",
        description="A carried group that the next step could not train within max_staleness: the "
        "step waits for it, drops it (the next step draws another prompt), or ends its answers as "
        "they are, truncated.",
    )
    max_carried_steps: int | None = Field(
        None,
        ge=1,
        description="Most times that a group is carried, before it is overdue; none: as often as "
        "max_staleness allows.",
    )
    save_every: float = Field(
        30.0,
        gt=0,
        description="With partial_rollout = carry, seconds between two saves of a shard's tokens.",
    )
    probe_tolerance: float = Field(
        0.25,
        gt=0,
        description="Largest allowed mean absolute difference, in nats per token, between the "
        "rollout engine's and the trainer's log-probs on the probe after a weight sync.",
    )
    weight_transfer: Literal["store", "ipc", "nccl"] = Field(
        "store",
        description="How a new version gets to the engines: by the store; from the trainer's device "
        "to engines on the same one, by CUDA IPC (on CPUs by shared memory); or to other devices and "
        "machines by an NCCL broadcast (on CPUs by Gloo). It is stored either way, where an engine "
        "that misses it reads it.",
    )
    weight_transfer_timeout: float = Field(
        60.0,
        gt=0,
        description="With weight_transfer = ipc or nccl, seconds for which engines are waited for, "
        "and in which a version then has to travel; after it they read it from the store.",
    )
    deadline: float = Field(
        600.0,
        gt=0,
        description="Time after which a shard counts as hung, in seconds; with episodes, one turn.",
    )

    @property
    def processes(self) -> int:
        """Of an engine, that have a part of the model each."""
        stages = self.engine_args.get("pipeline_parallel_size", 1)
        return self.tensor_parallel_size * (stages if isinstance(stages, int) else 1)

    @field_validator("engine_args")
    @classmethod
    def _engine_args_are_further_ones(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in arguments:
            if name in OWN_ENGINE_ARGS:
                instead = OWN_ENGINE_ARGS[name]
                remedy = f"Set {instead} instead." if instead else "Remove it."
                raise ValueError(f"rollout.engine_args.{name} is set by Refrain itself. {remedy}")
        return arguments


def cut_by(rollout: RolloutConfig) -> str:
    """The settings by which tokens are drawn from a part of the distribution; empty: none."""
    cuts = [f"rollout.top_p = {rollout.top_p:g}"] if rollout.top_p < 1 else []
    cuts += [f"rollout.top_k = {rollout.top_k}"] if rollout.top_k else []
    cuts += [f"rollout.min_p = {rollout.min_p:g}"] if rollout.min_p else []
    return " and ".join(cuts)
