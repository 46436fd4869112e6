"""The origin of a version, a sample or a prompt as an answer on the command line."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from storage.audit import lineage
from storage.audit.lineage import PromptOrigin, RemovedSample, VersionOrigin
from storage.audit.samples import SampleOrigin
from storage.batches.columns import GIVEN
from storage.evaluations.results import EvaluationResult, evaluations_of
from storage.runs.commit_log import Outline
from storage.runs.run_store import RunStore
from tasks.commands.command import Answer, Request, heading, table, text

if TYPE_CHECKING:
    from rich.console import RenderableType

STATUS = ("ok", "truncated", "failed")


def answer(request: Request) -> Answer:
    """Tell the origin of what was named."""
    asked, files = request.arguments, request.files
    if asked.limit < 1:
        raise ValueError(f"--limit {asked.limit} shows nothing. Give it a number from 1.")
    if asked.version is not None:
        version = lineage.of_version(files, asked.version, asked.limit)
        tested = evaluations_of(files, version=asked.version)
        record = asdict(version) | {"evaluations": [_evaluation(one) for one in tested]}
        return Answer(record=record, shown=[*_version(version), *_evaluations(tested)])
    if asked.sample is not None:
        sample, commit = lineage.of_sample(files, asked.sample)
        if isinstance(sample, RemovedSample):
            return _removed(sample, commit)
        return _sample(files, sample, commit)
    prompt = lineage.of_prompt(files, asked.prompt, asked.limit)
    return Answer(record=asdict(prompt), shown=_prompt(files, prompt))


def _version(found: VersionOrigin) -> list[RenderableType]:
    there = found.key if found.there else f"{found.key}, which retention removed"
    lines: list[RenderableType] = [
        heading(f"Version {found.version} of {found.run}"),
        text(f"  digest  {found.digest}"),
        text(f"  weights {there}"),
        text(""),
    ]
    if not found.steps:
        return [*lines, text("It is the model that the run began with: no sample made it.")]
    lines.append(heading(f"Made by {found.updates} updates, the newest first"))
    several = len({one.run for one in found.steps}) > 1
    columns = (
        "step", "sampled with", "samples", "trained", "tokens", "reward", "prompt rows", "workers",
        "retried", "reward code",
    )  # fmt: skip
    steps = table(
        *(["run"] if several else []),
        *columns,
        right=("step", "samples", "trained", "tokens", "reward", "retried"),
    )
    for one in found.steps:
        place = [*([one.run] if several else []), str(one.step)]
        reward = "" if one.reward is None else f"{one.reward:.3f}"
        counts = (one.samples, one.trained, "" if one.tokens is None else one.tokens, reward)
        rows = f"{len(one.prompt_rows)}: {some(one.prompt_rows, 4)}"
        workers = ", ".join(f"{name} {count}" for name, count in one.workers.items())
        columns_left = (rows, workers, str(one.retried))
        steps.add_row(
            *place, short(one.sampled_with), *map(str, counts),
            *(("removed by retention", "", "") if one.removed else columns_left),
            ", ".join(one.reward_code) or "not recorded",
        )  # fmt: skip
    lines += [steps, *_code(found.reward_code)]
    if found.samples:
        lines.append(heading(f"Samples of step {found.steps[0].step}"))
        lines.append(samples_table(found.samples))
    of_step = 0 if found.steps[0].removed else found.steps[0].samples
    if len(found.steps) < found.updates or len(found.samples) < of_step:
        lines.append(
            text(
                f"{len(found.steps)} of {found.updates} updates and {len(found.samples)} of "
                f"{of_step} samples are shown: --limit N shows more."
            )
        )
    return lines


def _evaluation(found: EvaluationResult) -> dict[str, Any]:
    """What is known of an evaluation, but for its refs."""
    return found.model_dump(mode="json", exclude={"samples", "prompts"})


def _evaluations(found: list[EvaluationResult]) -> list[RenderableType]:
    """Evaluations of a version."""
    if not found:
        return []
    columns = ("suite", "reward", "95 % interval", "samples", "failed", "reward code", "stored as")
    made = table(*columns, right=columns[1:5])
    for one in found:
        metrics, interval = one.metrics, one.interval()
        made.add_row(
            one.suite,
            f"{metrics['reward']:.4f}" if "reward" in metrics else "none scored",
            "" if interval is None else f"{interval.low:.4f} to {interval.high:.4f}",
            *(f"{metrics[name]:.0f}" for name in ("samples", "failed")),
            ", ".join(one.reward_code),
            one.key,
        )
    return [heading("Evaluations"), made]


def _code(code: dict[str, list[dict[str, Any]]]) -> list[RenderableType]:
    """What the digests of reward code stand for."""
    if not code:
        return []
    made = table("reward code", "function", "weight", "its lines", "its file", "packages")
    for digest, functions in code.items():
        for one in functions:
            settings = one["settings"]
            name = settings.get("path") or f"{settings.get('kind')} ({one['name']})"
            packages = ", ".join(f"{p} {v}" for p, v in one["packages"].items())
            parts = (settings.get("weight"), short(one["source"]), short(one["module"]), packages)
            made.add_row(digest, name, *(str(part) for part in parts))
    return [made]


def samples_table(samples: list[SampleOrigin]) -> RenderableType:
    """Samples, a line each."""
    made = table(
        "sample", "prompt row", "group", "step", "tokens by version", "weights held", "worker",
        "attempt", "reward", "advantage", "trained",
        right=("sample", "prompt row", "group", "step", "attempt", "reward", "advantage"),
    )  # fmt: skip
    for one in samples:
        reward = "failed" if one.reward is None else f"{one.reward:.3f}"
        advantage = "" if one.advantage is None else f"{one.advantage:+.3f}"
        made.add_row(
            str(one.sample), str(one.prompt_row), str(one.group), str(one.step), spans(one),
            short(one.weights_digest), one.worker, str(one.attempt), reward, advantage,
            "yes" if one.trained else "no",
        )  # fmt: skip
    return made


def spans(sample: SampleOrigin) -> str:
    """Which tokens were drawn under which version."""
    if sample.finish_reason == GIVEN:
        return "of the data, drawn by no version"
    said = ", ".join(f"v{one.version} [{one.start}, {one.stop})" for one in sample.spans)
    return f"{said} of the opponent {sample.opponent}" if sample.opponent else said


def _removed(found: RemovedSample, commit: Outline) -> Answer:
    """What the commit still knows of a sample whose batches are gone."""
    reward = commit.metrics.get("reward/mean")
    facts = {
        "step": f"{found.step} of {found.run}, which drew its group {found.group}",
        "sampled with": f"version {commit.version_in.version}, {commit.version_in.digest}",
        "step's update": f"made version {commit.version_out.version}, {commit.version_out.digest}",
        "step's samples": str(commit.rows.get("samples", 0)),
        "step's reward": "" if reward is None else f"{reward:.4f} on average",
        "reward code": ", ".join(commit.reward_code) or "not recorded",
    }
    width = max(map(len, facts))
    why = (
        "Retention removed the step's batches, so its tokens, its reward and whether it trained are "
        "gone. Set store.keep_steps higher, or to null, in a run whose samples are to be looked up."
    )
    shown = [
        heading(f"Sample {found.sample}"),
        *(text(f"  {name:<{width}}  {value}") for name, value in facts.items()),
        text(why),
    ]
    record = {
        **asdict(found),
        "version_in": commit.version_in.model_dump(),
        "version_out": commit.version_out.model_dump(),
        "metrics": commit.metrics,
        "reward_code": commit.reward_code,
    }
    return Answer(record=record, shown=shown)


def _sample(files: RunStore, found: SampleOrigin, commit: Outline) -> Answer:
    newest = lineage.last_version(files)
    prompt = lineage.prompt_of(files, found)
    code = {found.reward_code: commit.reward_code.get(found.reward_code, [])}
    facts = {
        "step": f"{found.step} of {found.run}",
        "prompt row": f"{found.prompt_row} (group {found.group}): {prompt}",
        "response": f"{found.tokens} tokens, {found.finish_reason} ({STATUS[found.status]})",
        "tokens": spans(found),
        "weights held": found.weights_digest,
        "drawn by": f"{found.worker}, attempt {found.attempt}",
        "reward": "none: scoring failed" if found.reward is None else f"{found.reward:.4f}",
        "scores": ", ".join(f"{name} {value}" for name, value in found.scores.items()),
        **{f"extra {name}": repr(value) for name, value in found.extras.items()},
        "reward code": found.reward_code or "not recorded",
        **({"teacher": f"{found.teacher}, {found.teacher_digest}"} if found.teacher else {}),
        "advantage": "none: it did not train"
        if found.advantage is None
        else f"{found.advantage:+.4f} on average",
    }
    goes_into = f"It is in version {found.step} and every later one, to {newest} of {files.run}."
    left_out = "It is in no version: it was filtered or dropped before the update."
    if found.opponent:
        left_out = f"It is in no version: {found.opponent} wrote it, a frozen opponent."
    width = max(map(len, facts))
    shown = [
        heading(f"Sample {found.sample}"),
        *(text(f"  {name:<{width}}  {value}") for name, value in facts.items()),
        *(_code(code) if code.get(found.reward_code) else []),
        text(goes_into if found.trained else left_out),
    ]
    record = {
        **asdict(found),
        "prompt": prompt,
        "versions": [found.step, newest] if found.trained else None,
        "reward_functions": code.get(found.reward_code, []),
    }
    return Answer(record=record, shown=shown)


def _prompt(files: RunStore, found: PromptOrigin) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if found.samples:
        row = lineage.prompt_of(files, found.samples[0])
        lines += [heading(f"Row {found.row}: {row}"), samples_table(found.samples)]
        versions = sorted({one.step for one in found.samples if one.trained})
        into = f"It is in versions from {versions[0]} on." if versions else "It is in no version."
        times = len({one.group for one in found.samples})
        lines.append(text(f"Drawn {times} time(s){', at least' * found.more}. {into}"))
    lines += [
        text(f"Row {found.row} was drawn in step {step} of {run} and dropped: {reason}.")
        for run, step, reason in found.dropped
    ]
    lines += [
        text(f"Row {found.row} was drawn in step {step} of {run}, whose batches retention removed.")
        for run, step in found.removed
    ]
    if found.more:
        lines.append(text("There may be more: --limit N shows more."))
    return lines


def short(digest: str) -> str:
    """The beginning of a digest: enough for a person to tell two apart."""
    return digest.rpartition(":")[2][:10]


def some(values: tuple[int, ...], count: int) -> str:
    """The first few numbers of many."""
    more = f", … {values[-1]}" if len(values) > count else ""
    return ", ".join(map(str, values[:count])) + more
