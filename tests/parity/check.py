"""Comparing an adapter's answer with a case: passed, failed, or a difference that is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

import torch

from tests.parity.answers import Adapter, Answer
from tests.parity.known import KNOWN_DIFFERENCES, Known
from tests.parity.vectors import Case, as_tensor

Verdict = Literal["passed", "failed", "known"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of one case."""

    case: str
    function: str
    verdict: Verdict
    worst: float  # largest distance in units of what is allowed; 1 is the limit
    why: str  # of a failure or a known difference


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gap:
    output: str
    distance: float  # in units of what is allowed
    under_mask: float  # the same over the tokens with mask 1
    note: str


def check(case: Case, adapter: Adapter) -> Outcome:
    """Run our functions on a case and compare."""
    refused = case.outputs is None and not case.nan_in
    try:
        answer = adapter(case)
    except ValueError as error:
        if refused:
            return _outcome(case, "passed", 0.0, f"refused too: {error}")
        return _outcome(case, "failed", float("inf"), f"we refuse: {error}")
    except KeyError as missing:
        return _outcome(case, "failed", float("inf"), f"the case lacks {missing}")
    if refused or case.outputs is None:
        return _judged(case, [_instead(answer)])
    gaps = list(_gaps(case, answer))
    worst = max((gap.distance for gap in gaps), default=0.0)
    beyond = [gap for gap in gaps if gap.distance > 1]
    return _judged(case, beyond) if beyond else _outcome(case, "passed", worst, "")


def in_dtype(case: Case, dtype: torch.dtype) -> Case:
    """The same case read in another dtype.

    Our float64 may differ from the reference's float32 by the rounding that the case states; our
    float32 from the reference's float64 by float32's own.
    """
    if dtype == case.dtype:
        return case
    atol, rtol = case.atol + 2 * case.rounding, max(case.rtol, 2e-5)
    return dataclasses.replace(case, dtype=dtype, atol=max(atol, 2e-6), rtol=rtol)


def _judged(case: Case, beyond: list[_Gap]) -> Outcome:
    """Known if a line of the table covers every output that differs."""
    reasons = []
    for gap in beyond:
        known = _known(case, gap)
        if known is None:
            notes = "; ".join(f"{g.output}: {g.note}" for g in beyond)
            return _outcome(case, "failed", max(g.distance for g in beyond), notes)
        reasons.append(known.reason)
    return _outcome(case, "known", 0.0, "; ".join(dict.fromkeys(reasons)))


def _known(case: Case, gap: _Gap) -> Known | None:
    for known in KNOWN_DIFFERENCES:
        named = any(fnmatch(case.function, pattern) for pattern in known.functions)
        fits = named and fnmatch(case.name, known.case)
        if fits and _covers(known, case, gap):
            return known
    return None


def _covers(known: Known, case: Case, gap: _Gap) -> bool:
    """Whether the line speaks of such a gap: a refusal, a NaN, the padding, or the output."""
    if gap.output == "*":
        return known.where == ("nan" if case.nan_in else "refused") and gap.under_mask == 0
    if not fnmatch(gap.output, known.output):
        return False
    return known.where == "anywhere" or (known.where == "padding" and gap.under_mask <= 1)


def _outcome(case: Case, verdict: Verdict, worst: float, why: str) -> Outcome:
    return Outcome(case=case.name, function=case.function, verdict=verdict, worst=worst, why=why)


def _instead(answer: Answer) -> _Gap:
    """The gap where the reference has no result; under_mask is 0 if all of ours is finite."""
    tensors = {n: v.detach() for n, v in answer.items() if isinstance(v, torch.Tensor)}
    wrong = [name for name, value in tensors.items() if not bool(torch.isfinite(value).all())]
    note = f"the reference refuses or has NaN; we give {', '.join(answer)}"
    if wrong:
        note += f", not finite in {', '.join(wrong)}"
    return _Gap(
        output="*", distance=float("inf"), under_mask=float("inf") if wrong else 0.0, note=note
    )


def _gaps(case: Case, answer: Answer) -> Iterator[_Gap]:
    assert case.outputs is not None
    for name, want in case.outputs.items():
        if name not in answer:
            yield _missing(name)
        elif isinstance(want, dict) and case.function != "group_filter":
            for key, value in want.items():
                got = answer[name].get(key)
                if got is None:
                    yield _Gap(
                        output=f"{name}/{key}",
                        distance=float("inf"),
                        under_mask=float("inf"),
                        note="not given by us",
                    )
                else:
                    yield _compared(case, f"{name}/{key}", got, value)
        else:
            yield _compared(case, name, answer[name], want)


def _compared(case: Case, name: str, got: Any, want: Any) -> _Gap:
    if want is None or isinstance(want, str | dict) or _has_strings(want):
        same = got is None if want is None else got == want
        return _Gap(
            output=name,
            distance=0.0 if same else float("inf"),
            under_mask=0.0,
            note=f"{got} not {want}",
        )
    if case.compare == "bound":
        return _bounded(name, float(got), float(want))
    ours = torch.as_tensor(got).detach().to(torch.float64)
    theirs = as_tensor(want, torch.float64)
    if ours.shape != theirs.shape:
        note = f"shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
        return _Gap(output=name, distance=float("inf"), under_mask=float("inf"), note=note)
    distance = (ours - theirs).abs() / (case.atol + case.rtol * theirs.abs())
    distance = torch.where(ours.isnan() | theirs.isnan(), float("inf"), distance)
    worst = float(distance.max()) if distance.numel() else 0.0
    under_mask = worst
    mask = case.padding_mask()
    if mask is not None and mask.shape == distance.shape and bool(mask.any()):
        under_mask = float(distance[mask].max())
    if case.compare == "mask":
        worst = under_mask
    note = f"{worst:.3g} times what is allowed"
    return _Gap(output=name, distance=worst, under_mask=under_mask, note=note)


def _missing(name: str) -> _Gap:
    return _Gap(output=name, distance=float("inf"), under_mask=float("inf"), note="not given by us")


def _bounded(name: str, got: float, want: float) -> _Gap:
    """Reach or beat: a minimum is to be large, a mean equal, anything else small."""
    if name.startswith("mean"):
        good = abs(got - want) < 1e-6
    else:
        good = got >= want if "min" in name.split("_") else got <= want
    return _Gap(
        output=name,
        distance=0.0 if good else float("inf"),
        under_mask=0.0,
        note=f"{got}, bound {want}",
    )


def _has_strings(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(v, str) and v != "NaN" for v in value)
