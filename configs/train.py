"""How the policy is updated: optimizer, precision, batching."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from configs.base import Settings

FlashAttention = Literal["FA2", "FA3", "FA4"]


class TrainConfig(Settings):
    """The train engine."""

    form_first: ClassVar[tuple[str, ...]] = ("learning_rate",)

    engine: Literal["fsdp", "elastic"] = Field(
        "fsdp",
        description="fsdp: the workers are ranks that hold the model together (FSDP2). elastic: each "
        "holds the whole model, comes and goes as it likes, and leaves gradients in the store, which "
        "an aggregator adds up.",
    )
    unit_tokens: int = Field(
        65536,
        ge=16,
        description="elastic: tokens of a unit, the samples whose gradients a worker adds up and "
        "leaves as one object, of the size of the model.",
    )
    unit_lease: float = Field(
        600.0,
        gt=0,
        description="elastic: time after which a unit goes to another idle worker too, in seconds.",
    )
    gradient_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="elastic: number format of stored gradients (4 or 2 bytes a parameter); they are "
        "added up in float32.",
    )
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Learning rate after warm-up; linear and cosine end at 0 after the steps with "
        "which the run began.",
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first-moment decay.")
    beta2: float = Field(0.99, ge=0, lt=1, description="AdamW's second-moment decay.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float = Field(
        1.0, gt=0, description="Global gradient norm above which gradients are scaled down."
    )
    epochs: int = Field(1, ge=1, description="Passes over a step's batch.")
    mini_batches: int = Field(
        1, ge=1, description="Optimizer steps into which one pass over a step's batch is split."
    )
    micro_batch_tokens: int = Field(
        8192, ge=16, description="Token budget of one packed forward and backward pass, per rank."
    )
    router_aux_loss_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the load-balancing loss of a mixture of experts (Switch Transformer, "
        "arXiv:2101.03961): the mean of its layers, over each micro-batch. 0: none.",
    )
    router_bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="By how much each optimizer step moves the biases of routers' scores towards an "
        "even load of the experts, where the model has such biases (DeepSeek-V3, GLM 4 and others; "
        "arXiv:2408.15664). 0: they stay as they are.",
    )
    router_dtype: Literal["compute", "float32"] = Field(
        "compute",
        description="Number format in which routers of experts multiply. compute: that of "
        "compute_dtype, or what the model's own code says. float32: of their weights as they are "
        "rounded for compute_dtype.",
    )
    router_replay: bool = Field(
        False,
        description="Whether a mixture of experts trains with the experts that each token was "
        "sampled with (rollout routing replay, arXiv:2510.11370): engines store them, and the gates "
        "are the train engine's own.",
    )
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="Ranks that share each micro-batch, each with a part of its tokens and, in "
        "attention, of the heads (Ulysses): for samples longer than one device takes.",
    )
    tree_training: bool = Field(
        False,
        description="Compute what samples begin with alike once, in updates and in passes for "
        "log-probs: a group's prompt, and what its responses share. The same gradients but for "
        "rounding. Off: prompts alone.",
    )
    logit_chunk_tokens: int = Field(
        1024, ge=1, description="Response tokens whose logits are held at once, per rank."
    )
    compute_dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16",
        description="Number format of matrix products; what is trained and sums stay float32. Unless "
        "set, float32 on a CPU without AVX-512 or bf16 instructions.",
    )
    weights_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Number format of weights on the device (4 or 2 bytes a parameter). bfloat16: a "
        "float32 master of each is in the host's memory, and goes to the device and back for its "
        "optimizer step (unless master_weights says otherwise); only with compute_dtype bfloat16, "
        "where the same weights come out.",
    )
    master_weights: Literal["float32", "remainder"] = Field(
        "float32",
        description="What is beside weights in bfloat16, so that steps change float32 numbers. "
        "float32: those numbers, in the host's memory. remainder: the 16 bits that they have besides "
        "the weight, on the device (4 bytes a parameter for both, the same bits after every step).",
    )
    gradient_checkpointing: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of layers whose activations are computed again in the backward pass: less "
        "memory, more time, the same gradients. true is 1, false is 0.",
    )
    recompute: Literal["all", "selective"] = Field(
        "all",
        description="What layers under train.gradient_checkpointing compute again. all: they keep "
        "their input alone. selective: the results of matrix products and of attention are kept too, "
        "and what lies between is computed again: some more memory, little more time.",
    )
    kernels: bool = Field(
        True,
        description="On a GPU, Triton kernels for the output head's statistics, and for norms, gated "
        "feed-forward parts and rotary positions where a trial at the start shows that the model's "
        "are the usual ones. Off, and on a CPU: torch's own operations.",
    )
    flash_attention: FlashAttention = Field(
        "FA2",
        description="Attention's kernel on a GPU. FA2: torch's own. FA3 (Hopper GPUs), FA4 (Hopper "
        "and Blackwell): of the package flash-attn-3 or flash-attn-4, to which torch 2.13 and newer "
        "hand attention; a trial at the start must find it right.",
    )
    activation_offload: bool = Field(
        False,
        description="Keep activations in the host's memory between forward and backward pass: less "
        "memory of the GPU, more time, the same gradients. On a CPU nothing moves.",
    )
    compile: bool = Field(
        False,
        description="Compile the layers (torch.compile): seconds to minutes at each start of an "
        "engine, then fewer and larger kernels; other rounding. On a CPU it needs a C++ compiler, on "
        "a GPU Triton.",
    )
    deterministic: bool = Field(
        False,
        description="Sums of an update in a fixed order on GPUs too, so that a replay is equal to "
        "the bit: slower kernels. On a CPU they have one anyway.",
    )
    reshard_after_forward: bool | Literal["auto"] = Field(
        "auto",
        description="Let go of a layer's gathered weights after its forward pass and gather them in "
        "the backward pass again: less memory, more traffic. auto: where there are several ranks.",
    )
    reduce_gradients: Literal["micro_batch", "optimizer_step"] = Field(
        "micro_batch",
        description="When gradients are summed over ranks: after each micro-batch, or once for an "
        "optimizer step, with less traffic, for which each rank holds the gradients of the whole "
        "model (4 bytes a parameter).",
    )
    optimizer_device: Literal["device", "host"] = Field(
        "device",
        description="Where AdamW's two moments lie: with the weights, or in the host's memory, from "
        "where each parameter's come and go at each optimizer step.",
    )
    optimizer_dtype: Literal["float32", "bfloat16", "8bit"] = Field(
        "float32",
        description="Number format of AdamW's two moments (8, 4 or about 2 bytes a parameter). "
        "bfloat16 is rounded stochastically. 8bit: codes in blocks of up to 256 numbers of a row, "
        "each with its largest (arXiv:2110.02861); of small tensors and short rows float32.",
    )
    replicas: int = Field(
        1,
        ge=1,
        description="Copies of the model among the ranks of the gang. With more than one, a copy is "
        "sharded over workers / replicas neighbouring ranks and gradients are summed over copies "
        "(HSDP): layers are gathered within a machine, where a copy's ranks share one.",
    )
    expert_parallel: int = Field(
        1,
        ge=1,
        description="Ranks over which the experts of each layer of a mixture are spread: states of "
        "tokens go to the ranks of their experts and back, and experts are not gathered. It is the "
        "number of ranks that share a copy of the model, workers / replicas. 1: they are gathered.",
    )
    recompute_old_logprobs: bool | Literal["auto"] = Field(
        "auto",
        description="Log-probs of the policy before the update by the train engine (true), or the "
        "detached ones of the first pass (auto, exact when a batch is used for one optimizer step).",
    )
    deadline: float = Field(
        1800.0, gt=0, description="Time after which a train call counts as hung, in seconds."
    )

    @property
    def shared_micro_batch_tokens(self) -> int:
        """Most tokens of a micro-batch, over the ranks that share it."""
        return self.micro_batch_tokens * self.sequence_parallel

    @property
    def of_experts(self) -> tuple[str, str]:
        """A setting that is for routers of experts alone, and what to set instead; empty: none."""
        if self.router_aux_loss_coef:
            name = "train.router_aux_loss_coef"
            return f"{name} = {self.router_aux_loss_coef:g}", f"{name} = 0"
        if self.router_bias_update_rate:
            name = "train.router_bias_update_rate"
            return f"{name} = {self.router_bias_update_rate:g}", f"{name} = 0"
        if self.router_replay:
            return "train.router_replay = true", "train.router_replay = false"
        if self.router_dtype != "compute":
            return f"train.router_dtype = {self.router_dtype}", "train.router_dtype = compute"
        return "", ""

    @property
    def planned_tokens(self) -> int:
        """Most tokens of the parts into which an update is cut: micro-batches, or units."""
        return self.unit_tokens if self.engine == "elastic" else self.shared_micro_batch_tokens

    @model_validator(mode="after")
    def _elastic_workers_share_nothing(self) -> "TrainConfig":
        if self.engine != "elastic":
            return self
        alone = {
            "sequence_parallel": 1,
            "replicas": 1,
            "expert_parallel": 1,
            "reduce_gradients": "micro_batch",
        }
        for name, value in alone.items():
            if (current := dict(self)[name]) != value:
                raise ValueError(
                    f"train.{name} = {current} is about ranks that share a model, and with "
                    f"train.engine = elastic each worker has all of it. Set train.{name} = {value}."
                )
        return self

    @model_validator(mode="after")
    def _rounded_weights_are_multiplied_so(self) -> "TrainConfig":
        if self.weights_dtype == "float32":
            return self
        if self.compute_dtype == "float32":
            raise ValueError(
                "train.weights_dtype = bfloat16 does not go with train.compute_dtype = float32: "
                "products would be made of rounded weights. Set train.weights_dtype = float32 or "
                "train.compute_dtype = bfloat16."
            )
        if self.engine == "elastic":
            raise ValueError(
                "train.weights_dtype = bfloat16 is for ranks with an optimizer, and with "
                "train.engine = elastic the workers have none. Set train.weights_dtype = float32."
            )
        return self

    @model_validator(mode="after")
    def _remainders_are_of_rounded_weights(self) -> "TrainConfig":
        if self.master_weights == "remainder" and self.weights_dtype == "float32":
            raise ValueError(
                "train.master_weights = remainder is what float32 numbers have besides weights in "
                "bfloat16, and train.weights_dtype = float32. Set train.weights_dtype = bfloat16 or "
                "train.master_weights = float32."
            )
        return self

    @model_validator(mode="after")
    def _order_of_sums_is_known(self) -> "TrainConfig":
        if self.deterministic and self.compile:
            raise ValueError(
                "train.deterministic = true does not go with train.compile = true: the order of sums "
                "in compiled kernels depends on the sizes that came first. Set one of them to false."
            )
        return self

    @model_validator(mode="after")
    def _old_logprobs_exist(self) -> "TrainConfig":
        if self.recompute_old_logprobs is False and self.epochs * self.mini_batches > 1:
            raise ValueError(
                "train.recompute_old_logprobs = false needs one optimizer step per batch, but "
                f"epochs x mini_batches = {self.epochs * self.mini_batches}. "
                "Set train.recompute_old_logprobs = auto."
            )
        return self
