"""What a person finds on the Prefect dashboard: shards, lineage, curves, the timeline."""

from __future__ import annotations

import base64
import math
import os
import re
import socket
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from configs.flows import command
from storage.audit.samples import (
    WROTE,
    Transcript,
    ending,
    printable,
)
from storage.runs.live import read_end
from tasks.markdown import cell, code, escaped
from tasks.reporting.cost_note import cost_lines
from tasks.reporting.progress_line import untrained
from tasks.reporting.shown_samples import shown_samples
from tasks.reporting.ways_on import show_ways_on, ways_on
from tasks.run.events import (
    Listeners,
    RunBegan,
    RunRolledBack,
    RunStopped,
    StepCommitted,
    StepsEnded,
)
from tasks.run.facts import RunFacts
from tasks.run.features import features_of
from tasks.run.pictures import TIMELINE_STEPS

if TYPE_CHECKING:
    from storage.runs.commit_log import Commit, Ledger
    from storage.runs.live import End
    from storage.runs.run_store import Origin
    from tasks.results import Metrics, Scored
    from tasks.run.attempts import Attempt

LOOKED_AT = 64  # samples of a step among which those shown are chosen
SHOWN_CHARACTERS = 1000  # of a prompt or an answer
TABLE_STEPS = 200  # the last ones; MLflow has all


def key(run: str, what: str) -> str:
    """An artifact key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run}-{what}".lower()).strip("-")


class Pages:
    """The artifacts of a run."""

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._ways_on: list[str] = []  # known from the begin, for there is no time at the end

    def listen(self, listeners: Listeners) -> None:
        """Hear what the run says."""
        listeners.on(RunBegan, self.run_began)
        listeners.on(RunStopped, self.run_stopped)
        listeners.later(StepCommitted, self.step_committed)
        listeners.on(StepsEnded, self.steps_ended)
        listeners.on(RunRolledBack, lambda event: show_run(self._facts, event.step, event.fresh))

    def run_began(self, event: RunBegan) -> None:
        """The run's note."""
        self._ways_on = ways_on(self._facts)
        show_run(self._facts, event.head, event.fresh, self._ways_on)

    def run_stopped(self, event: RunStopped) -> None:
        """How to go on."""
        name = key(self._facts.name, "stopped")
        show_ways_on(self._facts, name, event.step, self._ways_on)

    def step_committed(self, event: StepCommitted) -> None:
        """A step's pages."""
        show_step(self._facts, event.record, event.scored, event.attempts)
        show_samples(self._facts, event.record)

    def steps_ended(self, event: StepsEnded) -> None:
        """The pages of all steps."""
        show_picture(self._facts, "curves", "reward, KL and time by stage", event.curves)
        show_steps(self._facts, event.history)
        what = f"what each engine did in the last {TIMELINE_STEPS} steps"
        show_picture(self._facts, "timeline", what, event.timeline)


def show_step(run: RunFacts, commit: Commit, scored: list[Scored], attempts: list[Attempt]) -> None:
    """The step's table of shards and its lineage note."""
    create_table_artifact(
        key=key(run.name, "shards"),
        table=shard_rows(scored),
        description=f"Shards of step {commit.step}: where each was sampled, and how.",
    )
    create_markdown_artifact(
        key=key(run.name, "lineage"),
        markdown=lineage(run, commit, attempts),
        description=f"What went into and came out of step {commit.step}.",
    )


def show_samples(run: RunFacts, commit: Commit) -> None:
    """What a few of the step's samples were asked and wrote, of the first ones that it drew."""
    found = shown_samples(run.files, commit, run.config.tracking.shown_samples)
    if not found:
        return
    lines = [f"### Samples of step {commit.step} of {escaped(run.name)}", ""]
    for one in found:
        lines += sample_lines(one)
    more = command("flows.samples", run.config.store, f"{run.name}@{commit.step}", "--worst")
    create_markdown_artifact(
        key=key(run.name, "samples"),
        markdown="\n".join([*lines, f"More of them: {code(more)}."]),
        description=f"What the model was asked and wrote in step {commit.step}.",
    )


def sample_lines(one: Transcript) -> list[str]:
    """Markdown of a sample: its texts as code blocks, in which nothing is interpreted."""
    origin = one.origin
    reward = "scoring failed" if origin.reward is None else f"reward {origin.reward:.4g}"
    by = "" if origin.player is None else f", player {origin.player}"
    by += f", played by the opponent {escaped(origin.opponent)}" if origin.opponent else ""
    lines = [
        f"**Sample {origin.sample}**, group {origin.group}, {reward}, {origin.tokens} tokens{by}; "
        f"{escaped(ending(origin))}",
        "",
    ]
    parts = one.parts or (("policy", one.response),)
    wrote = [(WROTE[who], text) for who, text in parts if who in WROTE]
    for what, said in (("asked", one.prompt), *wrote):
        block = printable(said, SHOWN_CHARACTERS).splitlines() or [""]
        lines += [f"{what}:", "", *(f"    {line}" for line in block), ""]
    return lines


def shard_rows(scored: list[Scored]) -> list[dict[str, str | int | float]]:
    """The table of shards: a line for each or, of many, for those of a rollout task."""
    rows, first = [], 1
    for one in scored:
        stats = [shard.stats for shard in one.sampled]
        last = first + len(stats) - 1
        tokens, seconds = sum(each.tokens for each in stats), max(each.seconds for each in stats)
        rows.append(
            {
                "shard": first if first == last else f"{first}-{last}",
                "worker": listed(each.worker for each in stats),
                "attempt": max(each.attempt for each in stats),
                "samples": sum(each.rows for each in stats),
                "tokens": tokens,
                "tokens/s": round(tokens / max(seconds, 1e-9), 1),
                "seconds": round(seconds, 2),
                "truncated": sum(each.truncated for each in stats),
                "scoring failed": one.failures,
                "policy version": listed(each.version for each in stats),
                "weights held": listed(each.digest for each in stats),
            }
        )
        first = last + 1
    return rows


def listed(values: Iterable[str | int]) -> str | int:
    """One value as it is; of several the first ones, and how many there are."""
    found = list(dict.fromkeys(values))
    if len(found) == 1:
        return found[0]
    more = f", … {len(found)} in all" if len(found) > 4 else ""
    return ", ".join(map(str, found[:4])) + more


def nothing_trained(commit: Commit) -> list[str]:
    """A line for a step that trained no token."""
    said = untrained(commit.metrics)
    return ["", f"**{said[0].upper()}{said[1:]}.**"] if said else []


def lineage(run: RunFacts, commit: Commit, attempts: list[Attempt]) -> str:
    """Markdown: versions, refs, counts, times and retries of a committed step.

    Lists, where an entry is long: the dashboard cuts wide tables off.
    """
    lines = [f"### Step {commit.step} of {escaped(run.name)}", ""]
    for name, weights in (("Sampled with", commit.version_in), ("Gave", commit.version_out)):
        if weights is not None:
            lines.append(
                f"- {name} **version {weights.version}**, digest {code(weights.digest)}, in "
                f"{code(run.store.url(weights.key))}"
            )
    lines += ["", "#### Batches", ""]
    for name, ref in commit.refs.items():
        columns = ", ".join(map(code, ref.names))
        lines.append(f"- **{escaped(name)}**, {len(ref)} rows of {columns}")
        objects = sorted(ref.objects)
        lines += [f"  - {code(place)}" for place in objects[:8]]
        lines += [f"  - and {len(objects) - 8} more"] if len(objects) > 8 else []
    ledger = commit.ledger
    lines += [
        "",
        f"Prompts so far: {ledger.drawn} drawn = {ledger.trained} trained + {ledger.filtered} "
        f"filtered + {sum(ledger.dropped.values())} dropped + {ledger.in_flight} in flight.",
        *nothing_trained(commit),
        *left_out(ledger),
        *sampled_in_rounds(commit),
        *(line for one in features_of(run.config) for line in one.page(commit)),
        "",
        "#### Where the time went",
        "",
        *stage_table(commit, attempts),
    ]
    cost = cost_lines(commit.metrics, run.config.cluster.currency)
    lines += ["", "#### What it cost", "", *cost] if cost else []
    lines += reward_code(commit)
    if run.origin is not None:
        lines += ["", f"The run goes on from {escaped(run.origin)}."]
    store = run.config.store
    samples = command("flows.lineage", store, run.name, "--version", commit.version_out.version)
    again = command("flows.replay", store, run.name, commit.step)
    lines += [
        "",
        f"- Sample by sample: {code(samples)}",
        f"- Made again and compared: {code(again)}",
    ]
    failures = [attempt for attempt in attempts if attempt.error]
    if failures:
        lines += ["", "#### Failed attempts, each tried again", ""]
        lines += [
            f"- **{attempt.stage} {attempt.shard or ''}**, attempt {attempt.number} on "
            f"{escaped(attempt.assignment.worker or 'the train workers')}, after "
            f"{attempt.ended - attempt.started:.1f} s: {escaped(attempt.error[:300])}"
            for attempt in failures
        ]
    return "\n".join(lines)


def left_out(ledger: Ledger) -> list[str]:
    """Markdown lines: why prompts were filtered or dropped, if any were."""
    reasons = {**ledger.filtered_by, **ledger.dropped}
    told = ", ".join(f"{escaped(reason)} {count}" for reason, count in reasons.items())
    return ["", f"Filtered or dropped so far: {told}."] if told else []


def sampled_in_rounds(commit: Commit) -> list[str]:
    """Markdown lines of a step that sampled in rounds, as those of DAPO do."""
    names = ("rounds", "groups", "informative")
    rounds, groups, share = (commit.metrics.get(f"sampling/{name}") for name in names)
    if rounds is None or groups is None or share is None:
        return []
    return [
        "",
        f"Sampled in {rounds:.0f} round{'s' * (rounds > 1)}: {groups:.0f} groups, of which "
        f"{share:.0%} have rewards that differ.",
    ]


def stage_table(commit: Commit, attempts: list[Attempt]) -> list[str]:
    """Seconds, workers and retries of each stage of a step; stages overlap, so shares do too."""
    whole = commit.metrics.get("time/step") or 0.0
    lines = ["| stage | seconds | share | calls | retries | workers |", "|---|---|---|---|---|---|"]
    for stage in dict.fromkeys(attempt.stage for attempt in attempts):
        own = [attempt for attempt in attempts if attempt.stage == stage]
        seconds = max(one.ended for one in own) - min(one.started for one in own)
        workers = sorted({one.assignment.worker for one in own} - {""}) or ["train workers"]
        lines.append(
            f"| {stage} | {seconds:.2f} | {seconds / max(whole, 1e-9):.0%} | {len(own)} "
            f"| {sum(one.number > 1 for one in own)} | {escaped(', '.join(workers))} |"
        )
    return [*lines, f"| whole step | {whole:.2f} | | | | |"]


def show_run(run: RunFacts, head: int, fresh: int, ways: Sequence[str] = ()) -> None:
    """The run's own note: its name, where it works, and where its things are.

    head: its last committed step. fresh: rows that had not been seen and are drawn first. ways: lines
    on how to go on with it, should it be stopped.
    """
    lines = [
        f"### {escaped(run.name)}",
        "",
        f"- Flow process {os.getpid()} on {escaped(socket.gethostname())}",
        f"- Store {code(run.store.url(run.name))}",
        f"- MLflow {code(run.config.tracking.uri)}, experiment "
        f"{escaped(run.config.tracking.experiment)}, run {escaped(run.name)}",
        f"- Data {escaped(run.source.name)}, {len(run.source)} rows, {code(run.source.digest)}",
    ]
    if run.origin is not None:
        what = "trainer state" if run.origin.trainer_state else "weights"
        lines.append(f"- Goes on from the {what} of **{escaped(run.origin)}**")
        lines += went_back(run.origin)
    lines += continued(read_end(run.files))
    if fresh:
        lines.append(f"- {fresh} rows had not been seen; they are drawn first")
    if head:
        lines.append(f"- Goes on after its step {head}")
    if ways:
        lines += ["", "Should it be stopped:", "", *ways]
    create_markdown_artifact(
        key=key(run.name, "run"),
        markdown="\n".join(lines),
        description=f"What {run.name} is, and where its things are.",
    )


def went_back(origin: Origin) -> list[str]:
    """Markdown lines of a run that began as the way back of another one."""
    back = origin.rollback
    if back is None:
        return []
    changes = f" with {', '.join(map(code, back.change))}" if back.change else ""
    return [
        f"- Rollback {back.number}: **{escaped(back.run)}** went back to step {origin.at} after "
        f"its step {back.after}, and this run goes on from there{changes}. {escaped(back.why)}"
    ]


def continued(end: End | None) -> list[str]:
    """Markdown lines of a run that ended by going back."""
    if end is None or end.rolled_back is None:
        return []
    back = end.rolled_back
    return [
        f"- **Rolled back to step {back.to} by {escaped(back.guard)}, continued as "
        f"{escaped(back.child)}.** {escaped(back.why)}"
    ]


def show_steps(run: RunFacts, history: list[tuple[int, Metrics]]) -> None:
    """The run's steps in one table: reward, time by stage, retries."""
    rows = [
        {
            "step": step,
            "mean reward": round(metrics.get("reward/mean", math.nan), 4),
            "seconds": round(metrics["time/step"], 2),
            **{
                stage: round(metrics[f"time/{stage}"], 2)
                for stage in ("rollout", "reward", "advantage", "update", "weight_sync")
                if f"time/{stage}" in metrics
            },
            "retries": int(metrics["retries"]),
        }
        for step, metrics in history[-TABLE_STEPS:]
    ]
    # NaN is no JSON, and the server keeps tables as JSON.
    table = [{k: v for k, v in row.items() if v == v} for row in rows]
    create_table_artifact(
        key=key(run.name, "steps"),
        table=table,
        description=f"Steps of {run.name}: mean reward, seconds by stage, retries.",
    )


def reward_code(commit: Commit) -> list[str]:
    """Markdown lines: which reward functions, to the digest of their lines."""
    if not commit.reward_code:
        return []
    lines = ["", "| reward code | function | lines | file | packages |", "|---|---|---|---|---|"]
    for digest, functions in commit.reward_code.items():
        for one in functions:
            packages = one.get("packages")
            versions = packages.items() if isinstance(packages, dict) else ()
            lines.append(
                f"| {cell(digest)} | {escaped(one.get('name'))} "
                f"| {cell(str(one.get('source'))[:17])} | {cell(str(one.get('module'))[:17])} "
                f"| {escaped(', '.join(f'{name} {version}' for name, version in versions))} |"
            )
    return lines


def show_picture(run: RunFacts, name: str, what: str, image: bytes) -> None:
    """A picture inside a markdown artifact; `what` it shows, for people."""
    picture = base64.b64encode(image).decode()
    create_markdown_artifact(
        key=key(run.name, name),
        markdown=f"![{what}](data:image/png;base64,{picture})",
        description=f"{what[0].upper()}{what[1:]} of {run.name}.",
    )
