"""Forward passes over a batch, without gradients, whose numbers are written as new columns.

Log-probs of the policy or the reference, values of a critic: whatever a function gives for the
response tokens of a micro-batch.

And passes over a few samples that are handed in, of whose log-probs is made a coarse self-test of a
trained model's real weights, on its device and over its ranks. It sees what a small model in float32
on a CPU does not: this device's kernels, this number format, these weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from engines.models.vla.openvla import OpenVLA
from engines.train.batching.image_turns import SeenRow, pack_turns
from engines.train.batching.mfu import CostModel
from engines.train.batching.micro_batch import MicroBatch, read_ahead
from engines.train.batching.packed_batch import PLAIN, RowNeeds, pack
from engines.train.batching.packing import LoneRankPlans, plan_logprobs, read_lengths
from engines.train.model.sequence_parallel import SequenceGroup
from engines.train.policy import Forward
from storage.batches.refs import BatchRef
from storage.batches.writing import Jagged, write_batch
from storage.objects.store import Store

# Numbers [R] or [R, k] of the response tokens of a micro-batch, by name.
ForwardPass: TypeAlias = Callable[[MicroBatch], Mapping[str, Tensor]]
TEACHER_COLUMNS = (
    "teacher_logprobs",
    "teacher_topk_ids",
    "teacher_topk_logprobs",
    "teacher_tail_logprobs",
)


def write_token_columns(
    store: Store,
    sequence: SequenceGroup,
    device: torch.device,
    batch: BatchRef,
    out_key: str,
    forward_pass: ForwardPass,
    columns: Collection[str],
    *,
    budget: int,
    cost: CostModel,
    tree_training: bool = False,
    lone_rank: LoneRankPlans = "whole_groups",
    needs: RowNeeds = PLAIN,
) -> tuple[BatchRef | None, dict[str, float]]:
    """Write columns over the response tokens of this rank's rows, computed without gradients.

    Ranks take contiguous rows, so that their refs, concatenated, are in the batch's order.

    Args:
        store: Where the batch is read and the columns are written.
        sequence: The ranks that share micro-batches with this one; their first one writes.
        device: This rank's.
        batch: [N] rows of all ranks.
        out_key: Of the object that is written; with several ranks its number is put in.
        forward_pass: Makes the numbers.
        columns: Names of those that are written.
        budget: Most tokens of a forward pass.
        cost: By which rows are balanced over ranks.
        tree_training: Whether what rows of a group begin with alike is computed once.
        lone_rank: See `plan_update`.
        needs: Of the model.

    Returns:
        The ref of the columns, None where this rank has no rows. And the sum of each name's numbers
        [R], written or not, over the tokens with mask 1; "tokens" is the number of those.
    """
    known = read_lengths(store, batch, tree_training, cost.patches)
    plan = plan_logprobs(
        known, world=sequence.replicas, budget=budget, cost=cost, lone_rank=lone_rank
    )
    rows_of: dict[str, dict[int, np.ndarray]] = {}  # by column and row
    sums = {"tokens": 0.0}
    own_micro_batches = plan.ranks[sequence.replica]
    with read_ahead(
        store, batch, own_micro_batches, (), device, tree_training, cost.patches, needs
    ) as micros:
        for rows, micro in zip(own_micro_batches, micros, strict=True):
            with torch.no_grad():
                numbers = forward_pass(micro)
            if not sequence.counts:
                continue
            lengths = micro.packed.rows.lengths.tolist()
            sums["tokens"] += float(micro.mask.sum())
            for name, values in numbers.items():
                if values.dim() == 1:
                    sums[name] = sums.get(name, 0.0) + float(values.where(micro.mask, 0.0).sum())
                if name in columns:
                    whole = values.float() if values.is_floating_point() else values
                    parts = [part.numpy() for part in whole.cpu().split(lengths)]
                    rows_of.setdefault(name, {}).update(zip(rows, parts, strict=True))
    if not any(rows_of.values()):
        return None, sums
    if sequence.replicas > 1:
        stem, dot, suffix = out_key.rpartition(".")
        out_key = f"{stem}-{sequence.replica}of{sequence.replicas}{dot}{suffix}"
    return write_batch(store, out_key, {n: _jagged(rows) for n, rows in rows_of.items()}), sums


def chosen_logprobs(forward: Forward, column: str, squared: bool) -> ForwardPass:
    """Of a micro-batch's tokens [R] log-probs as `column`, and entropy; squared: sum_pi_squared."""

    def forward_pass(micro: MicroBatch) -> dict[str, Tensor]:
        logprobs, entropy, *squares = forward(micro.packed, squared=squared)
        numbers = {column: logprobs, "entropy": entropy}
        return {**numbers, "sum_pi_squared": squares[0]} if squared else numbers

    return forward_pass


def likeliest_words(forward: Forward, top_k: int, among: int | None) -> ForwardPass:
    """TEACHER_COLUMNS of a micro-batch's tokens: the chosen ones' log-probs, and the top_k words.

    among: the words are of the first so many, all if None. top_k: 0 leaves the words out.
    """

    def forward_pass(micro: MicroBatch) -> dict[str, Tensor]:
        logprobs, _, *words = forward(micro.packed, top=top_k, among=among)
        columns = [logprobs]
        if words:
            bins, ids = words
            columns += [ids, bins[:, :-1], bins[:, -1]]
        return dict(zip(TEACHER_COLUMNS, columns, strict=False))

    return forward_pass


@torch.no_grad()
def score(
    forward: Forward,
    token_ids: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    device: torch.device,
) -> list[list[float]]:
    """Log-probs of what follows the first prompt_lengths[i] tokens of each sequence.

    A policy that looks at images takes each for a turn after the image of a probe.
    """
    pairs = list(zip(token_ids, prompt_lengths, strict=True))
    model = forward.policy.model
    if isinstance(model, OpenVLA):
        rows = [_probed(model, ids, length) for ids, length in pairs]
        logprobs, *_ = forward(pack_turns(rows, model.patches, device))
        counts = [len(row.response) for row in rows]
        return [row.tolist() for row in logprobs.float().cpu().split(counts)]
    packed = pack(
        [np.asarray(ids[:length], dtype=np.int64) for ids, length in pairs],
        [np.asarray(ids[length:], dtype=np.int64) for ids, length in pairs],
        device,
        needs=forward.policy.needs,
    )
    logprobs, *_ = forward(packed)
    return [row.tolist() for row in logprobs.float().cpu().split(packed.rows.lengths.tolist())]


def _probed(model: OpenVLA, ids: Sequence[int], length: int) -> SeenRow:
    tokens = np.array(model.probed(ids, length), np.int64)
    return SeenRow(
        prompt=tokens[:length],
        response=tokens[length:],
        turns=np.zeros(len(tokens) - length, np.int64),
        frames=model.probe_image,
    )


def _jagged(rows: Mapping[int, np.ndarray]) -> Jagged:
    """The rows in their order."""
    ordered = [rows[row] for row in sorted(rows)]
    return Jagged(np.concatenate(ordered), np.cumsum([0, *map(len, ordered)], dtype=np.int64))


# Nats by which half of the tokens may differ: rounding in bfloat16, and not what a wrong head does.
# Of the other half, tokens that rounding sends to other experts may be far off.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
LENGTHS = ((6, 8), (6, 5), (3, 4))  # tokens of prompts and responses; the first two have one prompt


@torch.no_grad()
def median_difference(forward: Forward, device: torch.device) -> float:
    """Median of |log-prob, packed - log-prob, by transformers| over some tokens, nats; a collective.

    The weights are left as they were: sharded.
    """
    policy = forward.policy
    model, training = policy.model, policy.training
    generator = torch.Generator().manual_seed(0)
    words = int(model.config.get_text_config().vocab_size)
    prompt = torch.randint(words, (LENGTHS[0][0],), generator=generator)
    samples = [
        (
            prompt
            if length == len(prompt)
            else torch.randint(words, (length,), generator=generator),
            torch.randint(words, (count,), generator=generator),
        )
        for length, count in LENGTHS
    ]
    prompts, responses = ([each.numpy() for each in some] for some in zip(*samples, strict=True))
    packed = pack(prompts, responses, device, needs=policy.needs)
    policy.eval()
    ours, *_ = forward(packed)
    packing = model.config._attn_implementation
    model.set_attn_implementation("eager")
    if isinstance(policy, FSDPModule):
        register_fsdp_forward_method(policy, "own_logits")
    try:
        theirs = torch.cat([_own(forward, *sample, device) for sample in samples])
    finally:
        model.set_attn_implementation(packing)
        policy.train(training)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # who asks for parameters from now on gets this rank's
    return float((ours - theirs).abs().median())


def _own(forward: Forward, prompt: Tensor, response: Tensor, device: torch.device) -> Tensor:
    """Log-probs [R] of a response by the model's own forward pass."""
    tokens = torch.cat([prompt, response]).to(device)
    logits = forward.policy.own_logits(tokens[None, :-1])[0, len(prompt) - 1 :]
    table = logits.float().log_softmax(-1)
    return table.gather(-1, tokens[len(prompt) :, None])[:, 0]
