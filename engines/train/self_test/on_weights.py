"""A coarse self-test of a trained model's real weights, on its device and over its ranks.

It sees what a small model in float32 on a CPU does not: this device's kernels, this number format,
these weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from engines.train.batching.packed_batch import pack
from engines.train.policy_update import Forward

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
