"""How much memory a train rank will take, from the model's shape and the settings; without torch.

Each term is in bytes of one rank. What is not counted is in docs/memory.md, against what it was
measured in docs/benchmarks.md. H is the hidden size, I that of the feed-forward layer, Q and G the
numbers of all query heads and of all key heads, V the vocabulary; T tokens of a micro-batch, S slots
of its sequences in attention, R response tokens; c the bytes of a number in products.

What a rank on a CPU keeps resident is more than its tensors. glibc's heap
(engines/processes/process_setup.py) grows where nothing free is long enough, and what has grown
stays: at most 1 GiB at its end is given back. So the most that a process holds is not the most that
its tensors are at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from configs.lora import LoraConfig
from configs.train import TrainConfig
from engines.models.facts import ModelShape
from engines.models.traced_shape import (
    Kept,
    Shape,
    TracedShape,
    adapted_sizes,
    adapter_parameters,
)
from engines.models.vla.shapes import TowerShape
from engines.train.batching.packing import WHOLE
from engines.train.optimizer_pieces import CODED, FEWEST, JOINED, PIECE, SLOTS, block_of
from engines.weight_transfer.offer import BUFFERS
from engines.weight_transfer.offer import PIECE as PIECE_SENT

FUSED = 4  # as engines/train/logprobs.py has it
RESULTS = 2  # copies of attention's result that its kernel on a GPU keeps (seen on an H200)
FLOAT = 4  # bytes
SHORT = 256  # tokens; as in engines/train/model/attention.py, likewise
CACHED_LOGITS = 2**22  # as in engines/train/logprobs.py, which imports torch
# Of a rank on a CPU.
LIBRARIES = 27 * 2**20  # bytes: what they touch once a rank computes, in the heap and beside it
# oneDNN's compiled products, by which bfloat16 goes on a CPU; it keeps 1,024. Bytes.
PRIMITIVES = 16 * 2**20
FRAGMENTS = 0.2  # of what a forward pass gives out is lost between tensors that stay


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The largest micro-batch of a rank."""

    tokens: int  # T, shared prompts once
    slots: int  # S, each sequence whole
    responses: int  # R
    longest: int  # tokens of a sequence
    several: bool  # whether an optimizer step has more than one of them on a rank
    images: int = 0  # that a policy looks at


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes of one rank by what holds them, and at most by stage.

    On a CPU `host` is empty: device and host are one.
    """

    held: dict[str, int]  # all the time: weights, optimizer
    passing: dict[str, int]  # during an update: gradients, gathered, activations, logits, …
    stages: dict[str, int]  # most at once by stage, what is held among it
    host: dict[str, int]  # of the machine's memory, where the rank computes on a GPU
    holes: int = 0  # on a CPU, at most beside tensors and libraries (see `most_resident`)

    @property
    def peak(self) -> int:
        """Most at once."""
        return max(self.stages.values())

    @property
    def passing_peak(self) -> int:
        """Most at once beyond what is held all the time."""
        return self.peak - sum(self.held.values())

    @property
    def resident(self) -> int:
        """Most that the process of a rank on a CPU holds beyond what it began with."""
        return self.peak + self.holes + LIBRARIES


def with_transfer(plan: MemoryPlan, shape: Shape, number: int, ranks: int) -> MemoryPlan:
    """The same of ranks that send versions to engines in numbers of so many bytes.

    Rank 0 gathers a tensor at a time where it is sharded, and copies it into pieces.
    """
    gathered = number * shape.largest if ranks > 1 else 0
    sending = sum(plan.held.values()) + gathered + BUFFERS * PIECE_SENT
    return replace(plan, stages={**plan.stages, "weight transfer": sending})


def moment_bytes(shape: Shape, train: TrainConfig, trained: int, adapter: bool) -> int:
    """Of the two moments of so many parameters: those of a model of that shape, or of its adapter.

    In eight bits rows are taken to be as long as the model is wide; norms and adapters, most of whose
    rows are too short, are in float32.
    """
    if train.optimizer_dtype == "bfloat16":
        return 2 * 2 * trained
    block = block_of((FEWEST, shape.hidden))
    if train.optimizer_dtype == "float32" or adapter or not block:
        return 2 * FLOAT * trained
    norms = (2 * shape.layers + 1) * shape.hidden
    matrices = trained - norms
    return 2 * (matrices + FLOAT * matrices // block + FLOAT * norms)


def largest_batch(
    budget: int,
    prompt: int,
    response: int,
    samples: int,
    group: int,
    ranks: int,
    sequence: int = 1,
    tree_training: bool = False,
    paths: int = 1,
    path: int | None = None,
) -> Batch:
    """A rank's part of the largest micro-batch of samples as long as they may be.

    Args:
        budget: train.micro_batch_tokens.
        prompt: Tokens of the longest prompt, which a group shares.
        response: Tokens of the longest response; the last is not read.
        samples: Of an optimizer step, on all ranks.
        group: Samples of a group.
        ranks: Of the gang.
        sequence: Ranks that share a micro-batch, of tokens and of heads.
        tree_training: Whether samples share what they begin with: any number of tokens, so they fill
            as many slots as plans allow.
        paths: Of a sample that may be a forest of requests, at most; they share tokens likewise.
        path: Tokens of the longest one, the prompt among them. None: prompt + response.
    """
    budget *= sequence
    longest = (path or prompt + response) - 1
    own_samples = math.ceil(samples * sequence / ranks)
    shared = min(group, own_samples)  # samples that share a prompt on a rank
    sample = response - 1 + prompt / shared  # its tokens
    fitting = max(1, min(own_samples, int(budget / sample)))
    tokens = min(budget, math.ceil(fitting * sample))
    together, responses = fitting, fitting * response
    if tree_training:
        together = max(fitting, min(own_samples, WHOLE * budget // (prompt + response - 1)))
        tokens = min(budget, math.ceil(together * sample))
        # What is predicted, shared tokens once: each token that is read, and each sample's last.
        responses = min(tokens + together, together * response)
    slots = together * longest
    if paths > 1:
        slots = min(own_samples * paths * longest, WHOLE * budget)
    return Batch(
        tokens=max(math.ceil(tokens / sequence), 1),
        slots=math.ceil((slots + 1) / sequence),
        responses=math.ceil(responses / sequence),
        longest=longest,
        several=fitting < own_samples,
    )


def largest_turns(
    budget: int, prompt: int, turn: int, turns: int, patches: int, samples: int, ranks: int
) -> Batch:
    """The same for a policy that looks at an image before each turn, which is a sequence of its own.

    Args:
        budget, prompt, samples, ranks: As `largest_batch` takes them.
        turn: Tokens of the longest turn.
        turns: Of an episode at most, each with the prompt and an image; no two share these.
        patches: Tokens that an image becomes.
    """
    longest = prompt + patches + turn - 1
    own_samples = math.ceil(samples / ranks)
    fitting = max(1, min(own_samples, budget // (turns * longest)))
    tokens = fitting * turns * longest
    return Batch(
        tokens=tokens,
        slots=tokens + 1,
        responses=fitting * turns * turn,
        longest=longest,
        several=fitting < own_samples,
        images=fitting * turns,
    )


def plan_rank(
    shape: Shape,
    train: TrainConfig,
    batch: Batch,
    *,
    role: str,
    ranks: int,
    on_gpu: bool,
    lora: LoraConfig | None = None,
) -> MemoryPlan:
    """What a rank of a role holds and takes in an update (ref, teacher: in a pass of no gradient).

    lora: the actor's adapter, which alone has gradients and moments then.
    """
    shards = ranks // train.replicas
    c = 2 if train.compute_dtype == "bfloat16" else FLOAT
    plain = without_fsdp(train, role, ranks, on_gpu, lora)
    head = 0 if role == "critic" else shape.vocabulary * shape.hidden
    parameters = shape.parameters - (0 if shape.tied or role != "critic" else head)
    adapter = 0 if lora is None else adapter_parameters(shape, lora)
    trained = adapter or parameters
    frozen = role in ("ref", "teacher")
    # These have float32 masters.
    rounded = not frozen and (plain or train.weights_dtype == "bfloat16")
    each = c if frozen or rounded else FLOAT
    weights = (each * parameters + (c if frozen else FLOAT) * adapter) // shards
    split = train.master_weights == "remainder"
    masters = (2 if split else FLOAT) * parameters // shards if rounded else 0
    logits = 0 if role == "critic" else logits_bytes(shape, train, batch, role, on_gpu)
    gathered, one = (
        0 if plain else gathered_bytes(shape, train, shards, c, adapter),
        max(
            *layers_bytes(shape, train, batch, c, on_gpu, lora), tower_layer_bytes(shape, batch, c)
        ),
    )
    if frozen:  # nothing is kept for a backward pass
        passing = {"gathered": gathered, "one layer": one // 2, "logits": logits}
        stages = {"log-probs": weights + sum(passing.values())}
        plan = MemoryPlan(held={"weights": weights}, passing=passing, stages=stages, host={})
        holes = 0 if on_gpu else _holes(shape, train, batch, plan, c, shards, lora)
        return replace(plan, holes=holes)
    gathered += expert_bytes(shape, train, shards, c)
    spread = sum(spread_experts(shape, train))
    moments = moment_bytes(shape, train, trained, lora is not None) // shards
    kept = activation_bytes(shape, train, batch, c, on_gpu, lora)
    kept += vision_bytes(shape, train, batch, c)
    away = on_gpu and train.activation_offload
    off = on_gpu and train.optimizer_device == "host"
    once = train.reduce_gradients == "optimizer_step"
    held = {"weights": weights, "optimizer": 0 if off else moments}
    here = not on_gpu or train.weights_dtype == "float32" or split
    if masters and here:
        held["master weights"] = masters
    passing = {
        "gradients": FLOAT * (trained - spread) // (1 if once else shards)
        + FLOAT * spread // shards,
        "gathered": gathered,
        "activations": 0 if away else kept,
        "one layer": one if away or train.gradient_checkpointing else 0,  # made anew, or fetched
        "logits": logits,
        # The gradient of the output head, until the embedding's joins it.
        "head": 0 if adapter else c * head,
    }
    host = {
        "activations": kept if away else 0,
        "optimizer": moments if off else 0,
        "master weights": 0 if here else masters,
    }
    fetched = moments * shards // trained if off else 0
    fetched += FLOAT if host["master weights"] else 0
    passing_through = (
        CODED if train.optimizer_dtype == "8bit" else JOINED if masters and split else 0
    )
    pieces = (SLOTS * fetched + passing_through) * min(PIECE, shape.largest // shards)
    plan = MemoryPlan(
        held=held,
        passing=passing,
        stages=_stages(shape, batch, sum(held.values()), passing, c, pieces, plain),
        host={what: size for what, size in host.items() if size},
    )
    holes = 0 if on_gpu else _holes(shape, train, batch, plan, c, shards, lora)
    return replace(plan, holes=holes)


def plan_worker(plan: MemoryPlan) -> MemoryPlan:
    """Of a lone rank's plan what is left for a worker of elastic training: it has no optimizer."""
    moments = plan.held.get("optimizer", 0)
    return MemoryPlan(
        held={what: size for what, size in plan.held.items() if what != "optimizer"},
        passing=plan.passing,
        stages={what: size - moments for what, size in plan.stages.items() if what != "optimizer"},
        host={what: size for what, size in plan.host.items() if what != "optimizer"},
        holes=plan.holes,
    )


def plan_aggregator(shape: Shape, train: TrainConfig, on_gpu: bool) -> MemoryPlan:
    """What the aggregator of elastic training holds, and takes to add gradients up.

    Of the largest weight: the sum, what is added to it, and its bytes as they come.
    """
    moments = moment_bytes(shape, train, shape.parameters, False)
    off = on_gpu and train.optimizer_device == "host"
    held = {"weights": FLOAT * shape.parameters, "optimizer": 0 if off else moments}
    coded = CODED if train.optimizer_dtype == "8bit" else 0
    passing = {"sums": max(3 * FLOAT * shape.largest, coded * min(PIECE, shape.largest))}
    return MemoryPlan(
        held=held,
        passing=passing,
        stages={"sum": sum(held.values()) + sum(passing.values())},
        host={"optimizer": moments} if off else {},
    )


def _stages(
    shape: Shape,
    batch: Batch,
    held: int,
    passing: dict[str, int],
    c: int,
    pieces: int,
    plain: bool,
) -> dict[str, int]:
    """Most bytes by stage. Gradients of a first micro-batch come as its activations go.

    pieces: bytes of the optimizer's state that come from the host at a time. plain: without FSDP.
    """
    table = shape.vocabulary * shape.hidden
    outside = shape.parameters - shape.inside
    before = passing["gradients"] if batch.several else 0
    first = held + before + passing["gathered"] + passing["activations"]
    busy = max(passing["logits"], passing["one layer"])
    # Layers have let go. The embedding's gradient is whole, and once more in float32 to be reduced.
    whole = (c + FLOAT) * table if passing["head"] else 0
    last = held + passing["gradients"] + (c * table if plain else c * outside + whole)
    return {
        "forward": first + busy,
        "backward": max(first + busy + passing["head"], last),
        "optimizer": held + passing["gradients"] + pieces,
    }


def gathered_bytes(shape: Shape, train: TrainConfig, shards: int, c: int, adapter: int = 0) -> int:
    """Weights gathered at once: all of them, or those outside the layers and of two layers.

    FSDP gathers the next layer while one computes, into a buffer that is copied out. A layer's
    experts are gathered apart: one layer's, and the buffer. Those that are spread over the ranks are
    not gathered.

    adapter: numbers in the factors, which are gathered with the layers.
    """
    again = shards > 1 if train.reshard_after_forward == "auto" else train.reshard_after_forward
    towers = () if shape.vision is None else shape.vision.towers
    outside = shape.parameters - shape.inside
    outside -= sum(tower.layers * tower.layer_parameters for tower in towers)
    each, experts = layer_weights(shape, train), gathered_experts(shape, train)
    inside = sum(each) + adapter
    if again:
        beside = max(layer - apart for layer, apart in zip(each, experts, strict=True))
        inside = min(inside, 3 * (beside + adapter // shape.layers) + 2 * max(experts))
    # Towers are gone through before the layers, whose weights are gathered where they are let go.
    seeing = [
        min(tower.layers, 3 if again else tower.layers) * tower.layer_parameters for tower in towers
    ]
    return c * (outside + (max(inside, *seeing, 0) if again else inside + sum(seeing)))


def layer_weights(shape: Shape, train: TrainConfig) -> list[int]:
    """Weights of each decoder layer, but for experts that are spread over the ranks."""
    if not isinstance(shape, TracedShape):
        return [shape.layer_parameters] * shape.layers
    spread = spread_experts(shape, train)
    return [layer.parameters - one for layer, one in zip(shape.stack, spread, strict=True)]


def spread_experts(shape: Shape, train: TrainConfig) -> list[int]:
    """Weights of each decoder layer's experts, over all ranks, where they are spread over these."""
    if not isinstance(shape, TracedShape) or train.expert_parallel == 1:
        return [0] * shape.layers
    return [layer.experts for layer in shape.stack]


def gathered_experts(shape: Shape, train: TrainConfig) -> list[int]:
    """Weights of each decoder layer's experts where FSDP gathers them."""
    if not isinstance(shape, TracedShape) or train.expert_parallel > 1:
        return [0] * shape.layers
    return [layer.experts for layer in shape.stack]


def expert_bytes(shape: Shape, train: TrainConfig, shards: int, c: int) -> int:
    """A rank's experts in the format of products, where weights have another: kept for backward.

    Of checkpointed layers those of one, as they are computed anew.
    """
    if c == FLOAT or train.weights_dtype == "bfloat16":
        return 0
    each = spread_experts(shape, train)
    again = checkpointed(train.gradient_checkpointing, shape.layers)
    return c * (sum(each[again:]) + max(each[:again], default=0)) // shards


def layers_bytes(
    shape: Shape,
    train: TrainConfig,
    batch: Batch,
    c: int,
    on_gpu: bool,
    lora: LoraConfig | None = None,
) -> list[int]:
    """What each decoder layer keeps for its backward pass.

    Of a shape that was traced what its code on a CPU keeps; on a GPU attention's result once more.
    """
    if not isinstance(shape, TracedShape):
        return [layer_bytes(shape, train, batch, c, on_gpu, lora)] * shape.layers
    low = 0
    if lora is not None and not shape.adapter:
        adapted = sum(lora.adapts_layer(name) for name, _ in shape.linear)
        low = math.ceil(c * batch.tokens * lora.rank * adapted / shape.layers)
    # On a GPU attention's kernel keeps its result once more.
    again = RESULTS - 1 if on_gpu else 0
    return [
        _of(layer.kept, batch, c) + again * _of(layer.attention, batch, c) + low
        for layer in shape.stack
    ]


def layer_bytes(
    shape: ModelShape,
    train: TrainConfig,
    batch: Batch,
    c: int,
    on_gpu: bool,
    lora: LoraConfig | None = None,
) -> int:
    """What one decoder layer keeps for its backward pass.

    Two norms (see `normed_bytes`), and what those of queries and keys read. Attention keeps queries,
    keys, values and its output in slots, and the output in tokens for the projection; by plain matrix
    products (short sequences in bfloat16 on a CPU) queries, keys and values twice, and the scores.
    The feed-forward layer keeps its two inputs, the gate's activation and their product; by kernels
    not the activation. Of an adapted linear layer what the second factor reads is kept besides.
    """
    kernels = by_kernels(train, on_gpu)
    heads, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    if on_gpu:
        slot = RESULTS * heads + heads + 2 * keys
    elif c == FLOAT or batch.longest > SHORT:
        slot = 2 * heads + 2 * keys
    else:
        slot = 2 * (heads + 2 * keys) + shape.heads * batch.longest
    attention = c * (batch.slots * slot + batch.tokens * heads)
    inner = 3 if kernels else 4
    feed_forward = inner * c * batch.tokens * shape.intermediate
    low = 0 if lora is None else c * batch.tokens * lora.rank * len(adapted_sizes(shape, lora))
    normed = 2 * normed_bytes(shape.hidden, batch, c, lora, kernels)
    if shape.head_norms:  # what they give goes on to be rotated, which keeps nothing
        read = c if kernels else FLOAT + (c if lora is None else 0)
        normed += batch.tokens * (heads + keys) * read
    return normed + attention + feed_forward + low


def selected_bytes(shape: ModelShape, batch: Batch, c: int) -> int:
    """What a layer keeps under train.recompute = selective: its input, its products' results.

    And the result of attention, in slots, with a float32 for each head.
    """
    heads, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    results = heads + 2 * keys + 2 * shape.hidden + 2 * shape.intermediate
    attention = batch.slots * (c * RESULTS * heads + FLOAT * shape.heads)
    return c * batch.tokens * (shape.hidden + results) + attention


def by_kernels(train: TrainConfig, on_gpu: bool) -> bool:
    """Whether layers are taken to be computed by kernels (engines/train/kernels)."""
    return on_gpu and train.kernels and not train.compile


def without_fsdp(
    train: TrainConfig, role: str, ranks: int, on_gpu: bool, lora: LoraConfig | None
) -> bool:
    """Whether a rank holds a plain model that FSDP knows nothing of, with bfloat16 weights.

    A lone rank on a GPU: FSDP would copy each layer's weights and gradients for every micro-batch to
    exchange them with nobody. Weights have float32 masters then, on the device unless
    train.weights_dtype says otherwise; all that is computed is the same to the bit. Where gathered
    float32 weights are to be let go of (train.reshard_after_forward = true), FSDP holds fewer bytes.
    """
    whole = ranks == 1 and lora is None and role != "critic"
    if train.reshard_after_forward is True and train.weights_dtype == "float32":
        return False
    return on_gpu and whole and train.engine != "elastic" and train.compute_dtype == "bfloat16"


def normed_bytes(
    width: int, batch: Batch, c: int, lora: LoraConfig | None, kernels: bool = False
) -> int:
    """What norms of so many numbers a token keep: states in float32, before and after the weight.

    Before it only where the weight itself has a gradient. By a kernel states before and after.
    """
    if kernels:
        return 2 * c * batch.tokens * width
    return batch.tokens * width * (FLOAT + (2 * c if lora is None else c))


def activation_bytes(
    shape: Shape,
    train: TrainConfig,
    batch: Batch,
    c: int,
    on_gpu: bool,
    lora: LoraConfig | None = None,
) -> int:
    """What is kept between forward and backward pass; of checkpointed layers their input alone."""
    again = checkpointed(train.gradient_checkpointing, shape.layers)
    whole = sum(layers_bytes(shape, train, batch, c, on_gpu, lora)[again:])
    if isinstance(shape, TracedShape):
        anew = _traced_inputs(shape, train, batch, c, on_gpu, again)
        outside = _of(shape.outside, batch, c)
        return whole + anew + outside
    if train.recompute == "selective":
        inputs = again * selected_bytes(shape, batch, c)
    else:
        inputs = again * c * batch.tokens * shape.hidden
    return whole + inputs + normed_bytes(shape.hidden, batch, c, lora, by_kernels(train, on_gpu))


def _traced_inputs(
    shape: TracedShape, train: TrainConfig, batch: Batch, c: int, on_gpu: bool, again: int
) -> int:
    """What the first layers keep, so many, where they are computed anew."""
    kept = sum(_of(layer.input, batch, c) for layer in shape.stack[:again])
    if train.recompute == "selective":
        kept += sum(_of(layer.products, batch, c) for layer in shape.stack[:again])
        if on_gpu:
            results = sum(_of(layer.attention, batch, c) for layer in shape.stack[:again])
            kept += (RESULTS - 1) * results
    return kept


def _of(kept: Kept, batch: Batch, c: int) -> int:
    return kept.of(batch.tokens, batch.slots, batch.longest, c)


def tower_layer_bytes(shape: Shape, batch: Batch, c: int) -> int:
    """What a layer of the wider vision tower keeps for its backward pass; 0 where there is none."""
    towers = () if shape.vision is None else shape.vision.towers
    return max((_tower_layer(one, batch.images, c) for one in towers), default=0)


def _tower_layer(tower: TowerShape, images: int, c: int) -> int:
    """Two norms' inputs and outputs, queries, keys, values, attention's output twice; in between.

    That is the feed-forward part before and after its activation. Of scaled ones what is scaled.
    """
    each = (11 if tower.scaled else 9) * tower.width + 2 * tower.hidden
    return c * images * (tower.patches + tower.prefix) * each


def vision_bytes(shape: Shape, train: TrainConfig, batch: Batch, c: int) -> int:
    """What the vision part keeps between the passes; of checkpointed layers their input alone.

    All layers of the towers are checkpointed where any of the decoder's is. The projector keeps what
    its three layers read and the two activations' inputs.
    """
    if shape.vision is None:
        return 0
    total = 0
    for tower in shape.vision.towers:
        layer = _tower_layer(tower, batch.images, c)
        if train.gradient_checkpointing:
            layer = c * batch.images * (tower.patches + tower.prefix) * tower.width
        total += tower.layers * layer + c * batch.images * 3 * tower.image**2
    features, wide = shape.vision.features, 4 * shape.vision.features
    inside = features + 2 * wide + 2 * shape.hidden
    return total + c * batch.images * shape.vision.patches * inside


def checkpointed(share: float, count: int) -> int:
    """How many of `count` layers train.gradient_checkpointing is, rounded up."""
    return math.ceil(share * count - 1e-9)


def logits_bytes(shape: Shape, train: TrainConfig, batch: Batch, role: str, on_gpu: bool) -> int:
    """Logits of a block, their exponentials and one copy, and hidden states with their gradient.

    By kernels a block is FUSED times as wide, and its logits are all there is of it. A teacher looks
    for its likeliest words without them. (So does an actor that is taught words: up to 4 bytes more
    for each logit of a block.)
    """
    most = train.logit_chunk_tokens
    rows = 2 * FLOAT * batch.responses * shape.hidden
    if role != "teacher" and on_gpu and train.kernels and train.compute_dtype == "bfloat16":
        return 2 * min(FUSED * most, batch.responses) * shape.vocabulary + rows
    chunk = most * shape.vocabulary
    block = min(chunk if on_gpu else min(chunk, CACHED_LOGITS), batch.responses * shape.vocabulary)
    return 3 * FLOAT * block + rows


def _holes(
    shape: Shape,
    train: TrainConfig,
    batch: Batch,
    plan: MemoryPlan,
    c: int,
    shards: int,
    lora: LoraConfig | None,
) -> int:
    """Resident on a CPU beside the tensors of a plan, and beside libraries."""
    layer = sum(layer_weights(shape, train)) // shape.layers  # of different ones the mean
    trained = "gradients" in plan.passing and lora is None
    table = 0
    if trained and plan.passing["head"]:
        whole = shape.vocabulary * shape.hidden
        before = FLOAT * whole // shards if batch.several else 0  # of earlier micro-batches
        table = before + (c + FLOAT) * whole + (FLOAT * whole if shards > 1 else 0)
    layers = sum(layers_bytes(shape, train, batch, c, False, lora))
    most = most_resident(
        plan.peak,
        sum(plan.held.values()),
        plan.passing,
        forward=layers if lora or trained else 0,
        buffers=buffer_bytes(shape.layers, c * layer, FLOAT * layer if trained else 0, shards),
        table=table,
    )
    return most - plan.peak + (PRIMITIVES if c != FLOAT else 0)


def buffer_bytes(layers: int, gathered: int, reduced: int, shards: int) -> int:
    """What the buffers of all layers take, through which FSDP gathers weights and reduces gradients.

    They are as long as a layer, one for the rank's shard and one for the whole, and free most of the
    time. Tensors of the layer settle in them then, so that the next layer's find no room. Gathering
    and reducing use the same; Gloo reduces in a copy.

    Args:
        layers: Of the decoder.
        gathered: Bytes of a layer's weights, whole.
        reduced: Of its gradients in float32, whole; 0: it has none.
        shards: Ranks that share a copy of the model.
    """
    copy = reduced if shards > 1 else 0
    longest = max(gathered, reduced)
    return layers * (longest + longest // shards + copy)


def most_resident(
    peak: int, held: int, passing: dict[str, int], *, forward: int, buffers: int, table: int
) -> int:
    """Bytes of the heap and of mappings at most, free ones among them; without the libraries.

    When the first layer's backward pass is done, the heap still has the room of all activations,
    and beside it the buffers of all layers; then comes the embedding's gradient, for which there is
    nowhere a hole that is long enough.

    Args:
        peak: Of tensors at once; there is never less.
        held: All the time.
        passing: As MemoryPlan has it.
        forward: What the forward passes of all layers give out, whether it is kept or not.
        buffers: See `buffer_bytes`.
        table: The embedding's gradient, its copy in float32, and what is reduced of it.
    """
    busy = max(passing["logits"], passing["one layer"])
    heap = held + passing["gathered"] + passing.get("activations", 0) + busy
    return max(peak, heap + int(FRAGMENTS * forward) + buffers + table)
