"""The same numbers on a CUDA device as on the CPU."""

import dataclasses

import pytest
import torch
from pydantic import TypeAdapter

from configs.algorithm.advantages import Advantage
from configs.algorithm.algorithm import AlgorithmConfig
from engines.algorithms.advantages import ADVANTAGES
from engines.algorithms.aggregation import Normaliser, Rows
from engines.algorithms.from_config import objective_of
from engines.algorithms.losses import POLICY_LOSSES
from engines.train.logprobs import token_statistics
from tests.engines.algorithms.batches import advantage_batch, policy_batch, vars_of

pytestmark = pytest.mark.gpu(1)


def moved(carrier):
    """A copy on the device."""
    rows = Rows(offsets=carrier.rows.offsets.cuda(), ids=carrier.rows.ids.cuda())
    tensors = {
        name: value.detach().cuda()
        for name, value in vars_of(carrier).items()
        if isinstance(value, torch.Tensor)
    }
    more = {}
    if "components" in vars_of(carrier):
        more["components"] = {name: value.cuda() for name, value in carrier.components.items()}
    return dataclasses.replace(carrier, rows=rows, **tensors, **more)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_estimators(kind):
    batch = advantage_batch(1)
    options = TypeAdapter(Advantage).validate_python({"kind": kind}).arguments()
    here = ADVANTAGES[kind](batch, **options).advantages
    there = ADVANTAGES[kind](moved(batch), **options).advantages
    torch.testing.assert_close(there.cpu(), here)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_losses(kind):
    recipe = {
        "loss": {"kind": kind},
        "kl": {"coefficient": 0.1},
        "correction": [{"kind": "truncate"}, {"kind": "reject", "upper": 2.0}, {"kind": "dppo"}],
    }
    objective = objective_of(AlgorithmConfig.model_validate(recipe))
    batch = policy_batch(2)
    there = moved(batch)
    logprobs = there.logprobs.requires_grad_(True)
    counts = Normaliser.of(batch.mask, batch.rows, max_tokens=16)
    loss, metrics = objective(batch, counts)
    loss2, metrics2 = objective(dataclasses.replace(there, logprobs=logprobs), counts)
    torch.testing.assert_close(loss2.detach().cpu(), loss.detach())
    assert metrics2.values() == pytest.approx(metrics.values())
    loss.backward()
    loss2.backward()
    torch.testing.assert_close(logprobs.grad.cpu(), batch.logprobs.grad)


def test_log_probs_never_hold_the_whole_table():
    tokens, size, words, chunk = 8192, 256, 65536, 512
    hidden = torch.randn(tokens, size, device="cuda", requires_grad=True)
    head = torch.randn(words, size, device="cuda", requires_grad=True)
    labels = torch.randint(0, words, (tokens,), device="cuda")
    for _ in range(2):  # the first pass also allocates what cuBLAS works in
        hidden.grad = head.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = token_statistics(hidden, head, labels, chunk=chunk, entropy_gradient=True)
        (found.logprobs.sum() + found.entropy.sum()).backward()
        peak = torch.cuda.max_memory_allocated() - before
        del found
    own = head.nbytes + 4 * hidden.nbytes  # gradients, and columns of a number a token
    assert peak < 2.5 * 4 * chunk * words + own  # of a block the logits and one copy
