"""distillation.json: its own form as cases of ours, and adapters for its functions.

A case there has a student's and a teacher's logits over one vocabulary, and values and gradients of
several divergences by enumeration. Expectations over sampled tokens are sums over the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from engines.algorithms.distillation import (
    BinDivergence,
    forward_kl,
    reverse_kl,
    reverse_kl_advantages,
    with_tail,
)
from engines.algorithms.kl import DIVERGENCES, penalty

if TYPE_CHECKING:
    from tests.parity.answers import Adapter, Answer
    from tests.parity.vectors import Case

# function -> what a case of theirs calls its value and its gradient
FIELDS: dict[str, dict[str, str]] = {
    "reverse_kl": {"value": "reverse_kl", "grad": "reverse_kl_grad"},
    "forward_kl": {"value": "forward_kl", "grad": "forward_kl_grad"},
    "reverse_kl_as_advantage": {"grad": "policy_gradient_expectation_grad"},
    "k1_backpropagated": {"grad": "k1_backprop_expectation_grad"},
    "k2_backpropagated": {"grad": "k2_backprop_expectation_grad"},
    "k3_backpropagated": {"grad": "k3_backprop_expectation_grad"},
    "forward_kl_topk": {"value": "forward_kl_topk_with_tail"},
    "forward_kl_topk_no_tail": {
        "value": "forward_kl_topk_unnormalised",
        "grad": "forward_kl_topk_grad",
    },
    "reverse_kl_topk": {
        "value": "reverse_kl_topk_with_tail",
        "grad": "reverse_kl_topk_with_tail_grad",
    },
    "reverse_kl_topk_no_tail": {
        "value": "reverse_kl_topk_no_tail",
        "grad": "reverse_kl_topk_no_tail_grad",
    },
}
KNOWN = {name for fields in FIELDS.values() for name in fields.values()}
INPUTS = ("student_logits", "teacher_logits", "teacher_topk_ids")


def is_distillation(content: dict[str, Any]) -> bool:
    """Whether a file has this form."""
    cases = content.get("cases")
    return isinstance(cases, list) and all(set(INPUTS) <= set(case) for case in cases)


def records(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Its cases in the form of the others: one for each function, as far as it has results.

    A result of a name that is not known here becomes a case whose function nobody has.
    """
    found = []
    for number, case in enumerate(content["cases"]):
        inputs = {name: case[name] for name in INPUTS}
        fields = dict(FIELDS)
        strange = set(case) - KNOWN - set(INPUTS) - {"V", "k", "name", "note"}
        fields |= {name: {"value": name} for name in strange}
        for function, names in fields.items():
            outputs = {ours: case[theirs] for ours, theirs in names.items() if theirs in case}
            if outputs:
                name = f"{function}/V{len(case['student_logits'])}/{number}/float64"
                record = {"name": name, "function": function, "dtype": "float64", "params": {}}
                found.append(record | {"inputs": inputs, "outputs": outputs})
    return found


def _student(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with gradient [V]; log-probs of student and teacher [1, V]."""
    logits = case.tensor("student_logits").requires_grad_(True)
    return (
        logits,
        logits.log_softmax(-1)[None],
        case.tensor("teacher_logits").log_softmax(-1)[None],
    )


def _answer(loss: Tensor, logits: Tensor) -> Answer:
    loss.backward()
    return {"value": loss, "grad": logits.grad}


def whole(divergence: BinDivergence) -> Adapter:
    """A divergence over the whole vocabulary."""

    def answer(case: Case) -> Answer:
        logits, student, teacher = _student(case)
        return _answer(divergence(student, teacher).sum(), logits)

    return answer


def over_words(divergence: BinDivergence, tail: bool) -> Adapter:
    """A divergence over the teacher's likeliest words, with a bin for the others or without."""

    def answer(case: Case) -> Answer:
        logits, student, teacher = _student(case)
        ids = case.inputs["teacher_topk_ids"]
        others = [word for word in range(len(logits)) if word not in ids]
        bins = []
        for logprobs in (student, teacher):
            words = logprobs[:, ids]
            bins.append(with_tail(words, logprobs[:, others].logsumexp(-1)) if tail else words)
        return _answer(divergence(*bins).sum(), logits)

    return answer


def expected_policy_gradient(case: Case) -> Answer:
    """The mean over sampled words of -A grad log pi."""
    logits, student, teacher = _student(case)
    advantages = reverse_kl_advantages(student, teacher)
    return _answer(-(student.detach().exp() * advantages * student).sum(), logits)


def expected_backpropagation(estimator: str) -> Adapter:
    """The mean over sampled words of an estimator's own gradient."""

    def answer(case: Case) -> Answer:
        logits, student, teacher = _student(case)
        values = penalty(DIVERGENCES[estimator])(student, teacher)  # k3 without its bound
        return _answer((student.detach().exp() * values).sum(), logits)

    return answer


ADAPTERS: dict[str, Adapter] = {
    "reverse_kl": whole(reverse_kl),
    "forward_kl": whole(forward_kl),
    "reverse_kl_as_advantage": expected_policy_gradient,
    "k1_backpropagated": expected_backpropagation("k1"),
    "k2_backpropagated": expected_backpropagation("k2"),
    "k3_backpropagated": expected_backpropagation("k3"),
    "forward_kl_topk": over_words(forward_kl, tail=True),
    "forward_kl_topk_no_tail": over_words(forward_kl, tail=False),
    "reverse_kl_topk": over_words(reverse_kl, tail=True),
    "reverse_kl_topk_no_tail": over_words(reverse_kl, tail=False),
}
