"""In what two runs differ: settings, code, data, curves, evaluations, the first step that differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from pydantic import JsonValue

from configs.environment import GIT as GIT
from storage.batches.forest import LENGTHS, PARENTS
from storage.batches.refs import BatchRef
from storage.evaluations.results import ConfidenceInterval, EvaluationResult, newest_evaluations
from storage.objects.documents import Digester
from storage.objects.errors import ObjectMissing
from storage.objects.store import Store
from storage.runs.commit_log import Outline, head, read_commit, read_outline
from storage.runs.run_store import RunStore, committer, origin_of, start_of

# What a step is made of, in the order in which it comes about: name, ref of the commit, columns.
PARTS = (
    ("prompts", "prompts", ("prompt_ids", "prompt_row")),
    ("samples", "samples", ("response_ids", LENGTHS, PARENTS)),
    ("rewards", "samples", ("reward",)),
    ("batch", "batch", ("sample_id", "advantages")),
)
WEIGHTS = "weights"
# Metrics that equal steps have equal; a clock makes the others.
SAME = ("reward/mean", "reward/std", "response/tokens_mean", "rollout/tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Differs:
    """Something that is not the same in both runs."""

    name: str  # dotted, of a setting; or what it is
    first: JsonValue
    second: JsonValue


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstStep:
    """The first step in which two runs differ."""

    step: int
    parts: tuple[
        str, ...
    ]  # that differ, in the order in which they are made; the first one decides
    unread: tuple[str, ...]  # whose objects are no longer in the store


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """A suite on the same version of both runs, on the same rows and in the same manner."""

    suite: str
    version: int
    metric: str
    first: float
    second: float
    intervals: tuple[tuple[float, float] | None, tuple[float, float] | None]  # 95 %


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What is not the same, and how far apart the curves are."""

    steps: tuple[int, int]  # last committed step of each
    settings: list[Differs]
    code: list[Differs]  # Refrain, flow, reward functions
    data: list[Differs]  # digests of the data
    differs: FirstStep | None  # None: no step of both
    curves: dict[str, list[tuple[int, float, float]]]  # metric -> step, its value in each
    evaluations: list[Paired]


def compare(first: RunStore, second: RunStore) -> Comparison:
    """Compare two runs step by step, a fork's parent included. ValueError where one has no step."""
    runs = (first, second)
    last = tuple(head(run) or start_of(run) for run in runs)
    for run, step in zip(runs, last, strict=True):
        if step <= start_of(run):
            raise ValueError(f"Run {run.run} has no committed step to compare.")
    outlines = [
        [outline_of(run, step) for step in range(first_step(run), step + 1)]
        for run, step in zip(runs, last, strict=True)
    ]
    by_step = [{outline.step: outline for outline in history} for history in outlines]
    both = sorted(by_step[0].keys() & by_step[1].keys())
    records = [run.read_run() or {} for run in runs]
    return Comparison(
        steps=(last[0], last[1]),
        settings=differences(flat(records[0].get("config")), flat(records[1].get("config"))),
        code=differences(
            *(code_of(r, history) for r, history in zip(records, outlines, strict=True))
        ),
        data=differences(*({"data": history[-1].cursor.get("digest")} for history in outlines)),
        differs=first_difference(runs, [(by_step[0][n], by_step[1][n]) for n in both]),
        curves=curves_of([(by_step[0][n], by_step[1][n]) for n in both]),
        evaluations=paired(*(list(newest_evaluations(run).values()) for run in runs)),
    )


def first_step(run: RunStore) -> int:
    """The first step of a run's past that it counts: of a fork, its parent's first."""
    origin = origin_of(run)
    while origin is not None and origin.fork:
        run = RunStore(run.store, origin.run)
        origin = origin_of(run)
    return start_of(run) + 1


def outline_of(run: RunStore, step: int) -> Outline:
    """The outline of a step of a run's past, in whichever run it was committed."""
    owner, number = committer(run, step)
    return read_outline(owner, number)


def flat(value: JsonValue | object, prefix: str = "") -> dict[str, JsonValue]:
    """Nested settings as dotted names; entries of lists by their number."""
    if isinstance(value, Mapping) and value:
        pairs = [(f"{prefix}.{key}" if prefix else str(key), inner) for key, inner in value.items()]
    elif isinstance(value, list) and value:
        pairs = [(f"{prefix}.{number}", inner) for number, inner in enumerate(value)]
    else:
        return {prefix: value}  # type: ignore[dict-item]
    return {name: leaf for key, inner in pairs for name, leaf in flat(inner, key).items()}


def differences(first: Mapping[str, JsonValue], second: Mapping[str, JsonValue]) -> list[Differs]:
    """By name, where they are not equal; None where one has no such name."""
    names = sorted({*first, *second})
    return [
        Differs(name=name, first=first.get(name), second=second.get(name))
        for name in names
        if first.get(name) != second.get(name)
    ]


def code_of(record: Mapping[str, object], outlines: list[Outline]) -> dict[str, JsonValue]:
    """Which code made a run: Refrain, the working folder, the flow, the reward functions' digests."""
    rewards = sorted({digest for outline in outlines for digest in outline.reward_code})
    return {
        "refrain": str(record.get("code")),
        "git": cast("JsonValue", record.get(GIT)),
        "flow": str(record.get("flow")),
        "reward_code": ", ".join(rewards),
    }


def first_difference(
    runs: tuple[RunStore, RunStore], steps: list[tuple[Outline, Outline]]
) -> FirstStep | None:
    """The first step that differs, by what its commits say; of that one the batches are read."""
    for a, b in steps:
        same = a.version_out.digest == b.version_out.digest and a.rows == b.rows
        same = same and all(a.metrics.get(name) == b.metrics.get(name) for name in SAME)
        if not same:
            parts, unread = parts_that_differ(runs, a.step)
            if a.version_out.digest != b.version_out.digest:
                parts.append(WEIGHTS)
            return FirstStep(step=a.step, parts=tuple(parts), unread=tuple(unread))
    return None


def parts_that_differ(runs: tuple[RunStore, RunStore], step: int) -> tuple[list[str], list[str]]:
    """Parts of a step whose content differs, and those that cannot be read any more."""
    commits = [read_commit(*committer(run, step)) for run in runs]
    parts, unread = [], []
    for name, ref, columns in PARTS:
        try:
            contents = [
                content(run.store, commit.refs[ref], columns)
                for run, commit in zip(runs, commits, strict=True)
            ]
        except ObjectMissing:
            unread.append(name)
            continue
        if contents[0] != contents[1]:
            parts.append(name)
    return parts, unread


def content(store: Store, ref: BatchRef, columns: tuple[str, ...]) -> str:
    """A digest of columns of a batch, however its rows are spread over objects."""
    digester = Digester()
    for name in columns:
        if name in ref.names:
            values, offsets = ref.fetch_numpy(store, name)
            digester.update(name.encode())
            digester.update(values.tobytes())
            digester.update(b"" if offsets is None else offsets.tobytes())
    return digester.digest()


def curves_of(steps: list[tuple[Outline, Outline]]) -> dict[str, list[tuple[int, float, float]]]:
    """Metrics that both runs have, by step."""
    curves: dict[str, list[tuple[int, float, float]]] = {}
    for a, b in steps:
        for name, value in a.metrics.items():
            other = b.metrics.get(name)
            if value is not None and other is not None:
                curves.setdefault(name, []).append((a.step, value, other))
    return curves


def paired(first: list[EvaluationResult], second: list[EvaluationResult]) -> list[Paired]:
    """Evaluations of the same suite, rows, manner and version, metric by metric."""
    return [
        Paired(
            suite=result.suite,
            version=result.version,
            metric=name,
            first=value,
            second=other.metrics[name],
            intervals=(bounds(result.interval(name)), bounds(other.interval(name))),
        )
        for result, other in matched(first, second)
        for name, value in result.metrics.items()
        if name in other.metrics
    ]


def matched(
    first: list[EvaluationResult], second: list[EvaluationResult]
) -> list[tuple[EvaluationResult, EvaluationResult]]:
    """Evaluations of the same suite, rows, manner and version."""
    others = {(result.suite, result.on, result.version): result for result in second}
    names = ((result, (result.suite, result.on, result.version)) for result in first)
    return [(result, others[name]) for result, name in names if name in others]


def bounds(interval: ConfidenceInterval | None) -> tuple[float, float] | None:
    """Low and high."""
    return None if interval is None else (interval.low, interval.high)
