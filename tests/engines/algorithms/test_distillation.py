"""Distillation: whose gradient each loss has, what a tail is for, and what is reported."""

from __future__ import annotations

import pytest
import torch

from engines.algorithms.aggregation import Rows
from engines.algorithms.distillation import (
    BIN_DIVERGENCES,
    DistillationTerm,
    forward_kl,
    generalized_jsd,
    reverse_kl,
    reverse_kl_advantages,
    with_tail,
)
from engines.algorithms.inputs import PolicyBatch


def logits(words: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(2, 4, words, generator=generator, dtype=torch.float64)
    return student.requires_grad_(True), teacher


def binned(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    table = values.log_softmax(-1)
    rest = table.scatter(1, ids, -torch.inf).logsumexp(-1)
    return with_tail(table.gather(1, ids), rest)


@pytest.mark.parametrize("divergence", [forward_kl, reverse_kl, generalized_jsd])
def test_bins_bound_the_divergence_from_below_and_all_words_are_the_whole(divergence) -> None:
    student, teacher = logits()
    whole = divergence(student.log_softmax(-1), teacher.log_softmax(-1))
    found = []
    for k in (1, 3, 8):
        ids = teacher.topk(k).indices
        found.append(divergence(binned(student, ids), binned(teacher, ids)))
    assert (found[0] >= 0).all()
    for less, more in zip(found, [*found[1:], whole], strict=True):
        assert (less <= more + 1e-12).all()
    torch.testing.assert_close(found[-1], whole)  # the tail is then a single word


@pytest.mark.parametrize("divergence", [forward_kl, reverse_kl])
def test_without_the_tail_an_equal_student_would_be_moved(divergence) -> None:
    student, _ = logits()
    teacher = student.detach()
    ids = teacher.topk(2).indices
    loss = divergence(binned(student, ids), binned(teacher, ids)).sum()
    (grad,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(grad, torch.zeros_like(grad))
    words = [values.log_softmax(-1).gather(1, ids) for values in (student, teacher)]
    (pulled,) = torch.autograd.grad(divergence(*words).sum(), student)
    assert pulled.abs().max() > 0.01


def test_the_jsd_is_a_number_one_can_make_by_hand() -> None:
    student, teacher = torch.tensor([[0.6, 0.4]]).log(), torch.tensor([[0.9, 0.1]]).log()
    # m = [0.75, 0.25]: (0.9 ln 1.2 + 0.1 ln 0.4 + 0.6 ln 0.8 + 0.4 ln 1.6) / 2
    assert float(generalized_jsd(student, teacher)) == pytest.approx(0.0632878, abs=1e-6)
    # m = [0.66, 0.34]: (0.9 ln(0.9 / 0.66) + 0.1 ln(0.1 / 0.34)) / 5 + 4 (...) / 5
    assert float(generalized_jsd(student, teacher, 0.2)) == pytest.approx(0.0376095, abs=1e-6)


@pytest.mark.parametrize(
    ("beta", "share", "limit"), [(1e-6, 1e-6, forward_kl), (1 - 1e-6, 1e-6, reverse_kl)]
)
def test_at_its_ends_the_jsd_is_a_kl_times_what_is_left(beta: float, share: float, limit) -> None:
    student, teacher = logits()
    table, own = teacher.log_softmax(-1), student.log_softmax(-1)
    found, wanted = generalized_jsd(own, table, beta) / share, limit(own, table)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    ours, theirs = (
        torch.autograd.grad(one.sum(), student, retain_graph=True)[0] for one in (found, wanted)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_an_equal_teacher_gives_no_advantage_and_another_one_a_gradient() -> None:
    student, teacher = logits()
    own = student.detach().log_softmax(-1)
    assert not reverse_kl_advantages(own, own).any()
    advantages = reverse_kl_advantages(own, teacher.log_softmax(-1))
    assert advantages.abs().min() > 0
    torch.testing.assert_close(
        -(own.exp() * advantages).sum(-1), reverse_kl(own, teacher.log_softmax(-1))
    )


def batch(student: torch.Tensor, teacher: torch.Tensor, ids: torch.Tensor) -> PolicyBatch:
    """Two rows of 3 and 1 tokens; the second token is masked and holds what must not matter."""
    taught = binned(teacher, ids)
    taught[1] = torch.nan
    own = student.log_softmax(-1)[:, 0]
    return PolicyBatch(
        rows=Rows.of_lengths(torch.tensor([3, 1])),
        mask=torch.tensor([True, False, True, True]),
        logprobs=own,
        advantages=torch.zeros(4, dtype=torch.float64),
        teacher_logprobs=teacher.log_softmax(-1)[:, 0],
        student_bins=binned(student, ids),
        teacher_bins=taught,
    )


@pytest.mark.parametrize("loss", BIN_DIVERGENCES)
def test_the_term_leaves_masked_tokens_out_and_says_how_much_the_words_cover(loss: str) -> None:
    student, teacher = logits()
    ids = teacher.topk(3).indices
    values, sums = DistillationTerm(loss=loss, coefficient=1.0)(batch(student, teacher, ids))
    assert values is not None
    kept = [0, 2, 3]
    want = BIN_DIVERGENCES[loss](binned(student, ids), binned(teacher, ids)).detach()
    torch.testing.assert_close(values.detach()[kept], want[kept])
    assert values[1] == 0
    (grad,) = torch.autograd.grad(values.sum(), student)
    assert torch.isfinite(grad).all()
    assert not grad[1].any()
    metrics = sums.values()
    mass = teacher.softmax(-1).gather(1, ids).sum(-1)
    assert metrics["distillation/teacher_mass"] == pytest.approx(float(mass[kept].mean()))
    assert metrics[f"distillation/{loss}"] == pytest.approx(float(want[kept].mean()))
    gap = (student.log_softmax(-1) - teacher.log_softmax(-1))[kept, 0].mean()
    assert metrics["distillation/reverse_kl"] == pytest.approx(float(gap.detach()))


def test_the_reverse_kl_as_an_advantage_has_no_term_of_its_own() -> None:
    student, teacher = logits()
    term = DistillationTerm(loss="reverse_kl", coefficient=1.0)
    values, sums = term(batch(student, teacher, teacher.topk(3).indices))
    assert values is None
    assert set(sums.means) == {"distillation/reverse_kl"}
    assert term.needs == {"teacher_logprobs"}
