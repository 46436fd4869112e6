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
        return _judged(case, [_Gap(output="*", distance=float("inf"), note=_instead(answer))])
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
        known = _known(case, gap.output)
        if known is None:
            notes = "; ".join(f"{g.output}: {g.note}" for g in beyond)
            return _outcome(case, "failed", max(g.distance for g in beyond), notes)
        reasons.append(known.reason)
    return _outcome(case, "known", 0.0, "; ".join(dict.fromkeys(reasons)))


def _known(case: Case, output: str) -> Known | None:
    for known in KNOWN_DIFFERENCES:
        fits = fnmatch(case.function, known.function) and fnmatch(case.name, known.case)
        if fits and (output == "*" or fnmatch(output, known.output)):
            return known
    return None


def _outcome(case: Case, verdict: Verdict, worst: float, why: str) -> Outcome:
    return Outcome(case=case.name, function=case.function, verdict=verdict, worst=worst, why=why)


def _instead(answer: Answer) -> str:
    parts = []
    for name, value in answer.items():
        if isinstance(value, torch.Tensor):
            kind = "finite" if bool(torch.isfinite(value.detach()).all()) else "NaN"
            parts.append(f"{name} {kind}")
    return "the reference refuses or has NaN; we give " + ", ".join(parts)


def _gaps(case: Case, answer: Answer) -> Iterator[_Gap]:
    assert case.outputs is not None
    for name, want in case.outputs.items():
        if name not in answer:
            yield _Gap(output=name, distance=float("inf"), note="not given by us")
        elif isinstance(want, dict) and case.function != "group_filter":
            for key, value in want.items():
                got = answer[name].get(key)
                if got is None:
                    yield _Gap(
                        output=f"{name}/{key}", distance=float("inf"), note="not given by us"
                    )
                else:
                    yield _compared(case, f"{name}/{key}", got, value)
        else:
            yield _compared(case, name, answer[name], want)


def _compared(case: Case, name: str, got: Any, want: Any) -> _Gap:
    if want is None or isinstance(want, str | dict) or _has_strings(want):
        same = got is None if want is None else got == want
        return _Gap(output=name, distance=0.0 if same else float("inf"), note=f"{got} not {want}")
    if case.compare == "bound":
        return _bounded(name, float(got), float(want))
    ours = torch.as_tensor(got).detach().to(torch.float64)
    theirs = as_tensor(want, torch.float64)
    if ours.shape != theirs.shape:
        note = f"shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
        return _Gap(output=name, distance=float("inf"), note=note)
    distance = (ours - theirs).abs() / (case.atol + case.rtol * theirs.abs())
    distance = torch.where(ours.isnan() | theirs.isnan(), float("inf"), distance)
    if case.compare == "mask" and distance.dim() == 2:
        distance = distance[case.mask().view(distance.shape)]
    worst = float(distance.max()) if distance.numel() else 0.0
    return _Gap(output=name, distance=worst, note=f"{worst:.3g} times what is allowed")


def _bounded(name: str, got: float, want: float) -> _Gap:
    """Reach or beat: a minimum is to be large, a mean equal, anything else small."""
    if name.startswith("mean"):
        good = abs(got - want) < 1e-6
    else:
        good = got >= want if "min" in name.split("_") else got <= want
    return _Gap(output=name, distance=0.0 if good else float("inf"), note=f"{got}, bound {want}")


def _has_strings(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(v, str) and v != "NaN" for v in value)
