"""The origin of a version, a sample or a prompt as an answer on the command line."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from storage.audit import lineage
from storage.audit.lineage import PromptOrigin, SampleOrigin, VersionOrigin
from storage.runs.commit_log import Commit, read_commit
from storage.runs.origins import committer
from storage.runs.run_store import RunStore
from tasks.commands.command import Answer, Request, heading, table, text

if TYPE_CHECKING:
    from rich.console import RenderableType

STATUS = ("ok", "truncated", "failed")


def answer(request: Request) -> Answer:
    """Tell the origin of what was named."""
    asked, files = request.arguments, request.files
    if asked.version is not None:
        version = lineage.of_version(files, asked.version)
        return Answer(record=asdict(version), shown=_version(version, asked.limit))
    if asked.sample is not None:
        sample, commit = lineage.of_sample(files, asked.sample)
        owner = RunStore(files.store, sample.run)
        return _sample(files, owner, sample, commit)
    prompt = lineage.of_prompt(files, asked.prompt)
    return Answer(record=asdict(prompt), shown=_prompt(files, prompt))


def _version(found: VersionOrigin, limit: int) -> list[RenderableType]:
    there = found.key if found.there else f"{found.key}, which retention removed"
    lines: list[RenderableType] = [
        heading(f"Version {found.version} of {found.run}"),
        text(f"  digest  {found.digest}"),
        text(f"  weights {there}"),
        text(""),
    ]
    if not found.steps:
        return [*lines, text("It is the model that the run began with: no sample made it.")]
    lines.append(heading(f"Made by {len(found.steps)} updates, the newest first"))
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
    for one in found.steps[:limit]:
        place = [*([one.run] if several else []), str(one.step)]
        if one.removed:
            steps.add_row(*place, short(one.sampled_with), "removed by retention")
            continue
        reward = "" if one.reward is None else f"{one.reward:.3f}"
        counts = (one.samples, one.trained, one.tokens, reward)
        rows = f"{len(one.prompt_rows)}: {some(one.prompt_rows, 4)}"
        workers = ", ".join(f"{name} {count}" for name, count in one.workers.items())
        steps.add_row(
            *place, short(one.sampled_with), *map(str, counts), rows, workers,
            str(one.retried), ", ".join(one.reward_code) or "not recorded",
        )  # fmt: skip
    lines += [steps, *_code(found.reward_code)]
    if found.samples:
        lines.append(heading(f"Samples of step {found.steps[0].step}"))
        lines.append(samples_table(found.samples[:limit]))
    if max(len(found.samples), len(found.steps)) > limit:
        lines.append(text(f"At most {limit} rows are shown: --limit N shows more, --json all."))
    return lines


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
    return ", ".join(f"v{one.version} [{one.start}, {one.stop})" for one in sample.spans)


def _sample(files: RunStore, owner: RunStore, found: SampleOrigin, commit: Commit) -> Answer:
    newest = lineage.last_version(files)
    prompt = lineage.prompt_of(owner, commit, found.group)
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
        "advantage": "none: it did not train"
        if found.advantage is None
        else f"{found.advantage:+.4f} on average",
    }
    goes_into = f"It is in version {found.step} and every later one, to {newest} of {files.run}."
    left_out = "It is in no version: it was filtered or dropped before the update."
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
        first = found.samples[0]
        owner, step = committer(files, first.step)
        row = lineage.prompt_of(owner, read_commit(owner, step), first.group)
        lines += [heading(f"Row {found.row}: {row}"), samples_table(found.samples)]
        versions = sorted({one.step for one in found.samples if one.trained})
        into = f"It is in versions from {versions[0]} on." if versions else "It is in no version."
        lines.append(text(f"Drawn {len({s.group for s in found.samples})} time(s). {into}"))
    lines += [
        text(f"Row {found.row} was drawn in step {step} of {run} and dropped: {reason}.")
        for run, step, reason in found.dropped
    ]
    return lines


def short(digest: str) -> str:
    """The beginning of a digest: enough for a person to tell two apart."""
    return digest.rpartition(":")[2][:10]


def some(values: tuple[int, ...], count: int) -> str:
    """The first few numbers of many."""
    more = f", … {values[-1]}" if len(values) > count else ""
    return ", ".join(map(str, values[:count])) + more
