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
    arguments, files = request.arguments, request.files
    if arguments.limit < 1:
        raise ValueError(f"--limit {arguments.limit} shows nothing. Give it a number from 1.")
    if arguments.version is not None:
        version = lineage.of_version(files, arguments.version, arguments.limit)
        tested = evaluations_of(files, version=arguments.version)
        record = asdict(version) | {
            "evaluations": [_evaluation(evaluation) for evaluation in tested]
        }
        return Answer(record=record, shown=[*_version(version), *_evaluations(tested)])
    if arguments.sample is not None:
        sample, commit = lineage.of_sample(files, arguments.sample)
        if isinstance(sample, RemovedSample):
            return _removed(sample, commit)
        return _sample(files, sample, commit)
    prompt = lineage.of_prompt(files, arguments.prompt, arguments.limit)
    return Answer(record=asdict(prompt), shown=_prompt(files, prompt))


def _version(origin: VersionOrigin) -> list[RenderableType]:
    there = origin.key if origin.there else f"{origin.key}, which retention removed"
    lines: list[RenderableType] = [
        heading(f"Version {origin.version} of {origin.run}"),
        text(f"  digest  {origin.digest}"),
        text(f"  weights {there}"),
        text(""),
    ]
    if not origin.steps:
        return [*lines, text("It is the model that the run began with: no sample made it.")]
    lines.append(heading(f"Made by {origin.updates} updates, the newest first"))
    several = len({step.run for step in origin.steps}) > 1
    columns = (
        "step", "sampled with", "samples", "trained", "tokens", "reward", "prompt rows", "workers",
        "retried", "reward code",
    )  # fmt: skip
    steps = table(
        *(["run"] if several else []),
        *columns,
        right=("step", "samples", "trained", "tokens", "reward", "retried"),
    )
    for step in origin.steps:
        place = [*([step.run] if several else []), str(step.step)]
        reward = "" if step.reward is None else f"{step.reward:.3f}"
        counts = (step.samples, step.trained, "" if step.tokens is None else step.tokens, reward)
        rows = f"{len(step.prompt_rows)}: {some(step.prompt_rows, 4)}"
        workers = ", ".join(f"{name} {count}" for name, count in step.workers.items())
        columns_left = (rows, workers, str(step.retried))
        steps.add_row(
            *place, short(step.sampled_with), *map(str, counts),
            *(("removed by retention", "", "") if step.removed else columns_left),
            ", ".join(step.reward_code) or "not recorded",
        )  # fmt: skip
    lines += [steps, *_code(origin.reward_code)]
    if origin.samples:
        lines.append(heading(f"Samples of step {origin.steps[0].step}"))
        lines.append(samples_table(origin.samples))
    of_step = 0 if origin.steps[0].removed else origin.steps[0].samples
    if len(origin.steps) < origin.updates or len(origin.samples) < of_step:
        lines.append(
            text(
                f"{len(origin.steps)} of {origin.updates} updates and {len(origin.samples)} of "
                f"{of_step} samples are shown: --limit N shows more."
            )
        )
    return lines


def _evaluation(result: EvaluationResult) -> dict[str, Any]:
    """What is known of an evaluation, but for its refs."""
    return result.model_dump(mode="json", exclude={"samples", "prompts"})


def _evaluations(results: list[EvaluationResult]) -> list[RenderableType]:
    """Evaluations of a version."""
    if not results:
        return []
    columns = ("suite", "reward", "95 % interval", "samples", "failed", "reward code", "stored as")
    rows = table(*columns, right=columns[1:5])
    for result in results:
        metrics, interval = result.metrics, result.interval()
        rows.add_row(
            result.suite,
            f"{metrics['reward']:.4f}" if "reward" in metrics else "none scored",
            "" if interval is None else f"{interval.low:.4f} to {interval.high:.4f}",
            *(f"{metrics[name]:.0f}" for name in ("samples", "failed")),
            ", ".join(result.reward_code),
            result.key,
        )
    return [heading("Evaluations"), rows]


def _code(code: dict[str, list[dict[str, Any]]]) -> list[RenderableType]:
    """What the digests of reward code stand for."""
    if not code:
        return []
    rows = table("reward code", "function", "weight", "its lines", "its file", "packages")
    for digest, functions in code.items():
        for function in functions:
            settings = function["settings"]
            name = settings.get("path") or f"{settings.get('kind')} ({function['name']})"
            packages = ", ".join(f"{p} {v}" for p, v in function["packages"].items())
            parts = (
                settings.get("weight"),
                short(function["source"]),
                short(function["module"]),
                packages,
            )
            rows.add_row(digest, name, *(str(part) for part in parts))
    return [rows]


def samples_table(samples: list[SampleOrigin]) -> RenderableType:
    """Samples, a line each."""
    rows = table(
        "sample", "prompt row", "group", "step", "tokens by version", "weights held", "worker",
        "attempt", "reward", "advantage", "trained",
        right=("sample", "prompt row", "group", "step", "attempt", "reward", "advantage"),
    )  # fmt: skip
    for sample in samples:
        reward = "failed" if sample.reward is None else f"{sample.reward:.3f}"
        advantage = "" if sample.advantage is None else f"{sample.advantage:+.3f}"
        rows.add_row(
            str(sample.sample), str(sample.prompt_row), str(sample.group), str(sample.step),
            spans(sample),
            short(sample.weights_digest), sample.worker, str(sample.attempt), reward, advantage,
            "yes" if sample.trained else "no",
        )  # fmt: skip
    return rows


def spans(sample: SampleOrigin) -> str:
    """Which tokens were drawn under which version."""
    if sample.finish_reason == GIVEN:
        return "of the data, drawn by no version"
    spans_text = ", ".join(f"v{span.version} [{span.start}, {span.stop})" for span in sample.spans)
    return f"{spans_text} of the opponent {sample.opponent}" if sample.opponent else spans_text


def _removed(sample: RemovedSample, commit: Outline) -> Answer:
    """What the commit still knows of a sample whose batches are gone."""
    reward = commit.metrics.get("reward/mean")
    facts = {
        "step": f"{sample.step} of {sample.run}, which drew its group {sample.group}",
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
    lines = [
        heading(f"Sample {sample.sample}"),
        *(text(f"  {name:<{width}}  {value}") for name, value in facts.items()),
        text(why),
    ]
    record = {
        **asdict(sample),
        "version_in": commit.version_in.model_dump(),
        "version_out": commit.version_out.model_dump(),
        "metrics": commit.metrics,
        "reward_code": commit.reward_code,
    }
    return Answer(record=record, shown=lines)


def _sample(files: RunStore, sample: SampleOrigin, commit: Outline) -> Answer:
    newest = lineage.last_version(files)
    prompt = lineage.prompt_of(files, sample)
    code = {sample.reward_code: commit.reward_code.get(sample.reward_code, [])}
    facts = {
        "step": f"{sample.step} of {sample.run}",
        "prompt row": f"{sample.prompt_row} (group {sample.group}): {prompt}",
        "response": f"{sample.tokens} tokens, {sample.finish_reason} ({STATUS[sample.status]})",
        "tokens": spans(sample),
        "weights held": sample.weights_digest,
        "drawn by": f"{sample.worker}, attempt {sample.attempt}",
        "reward": "none: scoring failed" if sample.reward is None else f"{sample.reward:.4f}",
        "scores": ", ".join(f"{name} {value}" for name, value in sample.scores.items()),
        **{f"extra {name}": repr(value) for name, value in sample.extras.items()},
        "reward code": sample.reward_code or "not recorded",
        **({"teacher": f"{sample.teacher}, {sample.teacher_digest}"} if sample.teacher else {}),
        "advantage": "none: it did not train"
        if sample.advantage is None
        else f"{sample.advantage:+.4f} on average",
    }
    goes_into = f"It is in version {sample.step} and every later one, to {newest} of {files.run}."
    left_out = "It is in no version: it was filtered or dropped before the update."
    if sample.opponent:
        left_out = f"It is in no version: {sample.opponent} wrote it, a frozen opponent."
    width = max(map(len, facts))
    lines = [
        heading(f"Sample {sample.sample}"),
        *(text(f"  {name:<{width}}  {value}") for name, value in facts.items()),
        *(_code(code) if code.get(sample.reward_code) else []),
        text(goes_into if sample.trained else left_out),
    ]
    record = {
        **asdict(sample),
        "prompt": prompt,
        "versions": [sample.step, newest] if sample.trained else None,
        "reward_functions": code.get(sample.reward_code, []),
    }
    return Answer(record=record, shown=lines)


def _prompt(files: RunStore, origin: PromptOrigin) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if origin.samples:
        row = lineage.prompt_of(files, origin.samples[0])
        lines += [heading(f"Row {origin.row}: {row}"), samples_table(origin.samples)]
        versions = sorted({sample.step for sample in origin.samples if sample.trained})
        into = f"It is in versions from {versions[0]} on." if versions else "It is in no version."
        times = len({sample.group for sample in origin.samples})
        lines.append(text(f"Drawn {times} time(s){', at least' * origin.more}. {into}"))
    lines += [
        text(f"Row {origin.row} was drawn in step {step} of {run} and dropped: {reason}.")
        for run, step, reason in origin.dropped
    ]
    lines += [
        text(
            f"Row {origin.row} was drawn in step {step} of {run}, whose batches retention removed."
        )
        for run, step in origin.removed
    ]
    if origin.more:
        lines.append(text("There may be more: --limit N shows more."))
    return lines


def short(digest: str) -> str:
    """The beginning of a digest: enough for a person to tell two apart."""
    return digest.rpartition(":")[2][:10]


def some(values: tuple[int, ...], count: int) -> str:
    """The first few numbers of many."""
    more = f", … {values[-1]}" if len(values) > count else ""
    return ", ".join(map(str, values[:count])) + more
