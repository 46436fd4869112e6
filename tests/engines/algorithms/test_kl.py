"""KL estimators against the KL that they estimate, by enumeration."""

import math

import pytest
import torch
from torch import tensor

from engines.algorithms.kl import (
    KL_ESTIMATORS,
    absolute,
    binary_kl,
    bounded_k3,
    inside_trust_region,
    k1,
    k2,
    k3,
)

P, Q = tensor([0.5, 0.3, 0.2]).double(), tensor([0.25, 0.25, 0.5]).double()
KL = float((P * (P / Q).log()).sum())


def test_k1_and_k3_are_unbiased():
    log_ratio = (Q / P).log()
    assert float((P * k1(log_ratio)).sum()) == pytest.approx(KL)
    assert float((P * k3(log_ratio)).sum()) == pytest.approx(KL)
    assert (k3(log_ratio) > 0).all()
    assert k2(tensor([-2.0, 1.0])).tolist() == [2.0, 0.5]
    assert absolute(tensor([-2.0, 1.0])).tolist() == [2.0, 1.0]


@pytest.mark.parametrize("name", ["k2", "k1+", "k3+"])
def test_the_gradient_of_k2_is_that_of_the_kl(name):
    logits = P.log().requires_grad_(True)
    logprobs = logits.log_softmax(-1)
    (P * KL_ESTIMATORS[name](logprobs, Q.log())).sum().backward()
    want = P * ((P / Q).log() - KL)  # of KL(softmax(logits), Q)
    torch.testing.assert_close(logits.grad, want)


def test_k3_is_bounded_where_it_is_a_penalty():
    assert bounded_k3(tensor([0.0, 1.0, 5.0, -40.0])).tolist() == pytest.approx(
        [0.0, math.e - 2, 10.0, 10.0]
    )


def test_binary_kl_is_that_of_this_token_or_another():
    p, q = tensor([0.5]), tensor([0.25])
    want = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert float(binary_kl(p, q, (p / q).log())) == pytest.approx(want)
    assert float(binary_kl(p, p, torch.zeros(1))) == 0.0


@pytest.mark.parametrize(
    ("measure", "low", "high"), [("tv", 0.2, 0.2), ("kl", 0.05, 0.05)], ids=["tv", "kl"]
)
def test_the_trust_region_holds_back_what_moves_on_in_its_direction(measure, low, high):
    old = tensor([0.5, 0.5, 0.5, 0.5, 0.5])
    new = tensor([0.8, 0.8, 0.2, 0.2, 0.6])
    advantages = tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    inside = inside_trust_region(
        new.log(), old.log(), advantages, measure=measure, low=low, high=high
    )
    assert inside.tolist() == [False, True, True, False, True]
