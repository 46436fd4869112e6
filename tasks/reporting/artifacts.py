"""What a person finds on the Prefect dashboard: shards, lineage, samples, curves, costs, evaluations.

And the events on the server on which infra/automations.yaml acts: their resource is the run,
refrain.run.NAME; they are sent in the background and never waited for.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import json
import math
import os
import re
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx
import numpy as np
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger
from prefect.states import Completed, State
from prefect.utilities.urls import url_for

from configs.flows import command, resume_command
from configs.grpo import GRPOConfig
from configs.storage import StoreConfig
from storage.audit.samples import (
    WROTE,
    NoTokenizer,
    Transcript,
    ending,
    few,
    judged,
    origins_of,
    printable,
    tokenizer_of,
    transcribed,
)
from storage.evaluations.results import EvaluationFiles, EvaluationResult
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import Commit
from storage.runs.live import read_end
from storage.runs.run_store import RunStore
from storage.tracking.cost import (
    BUSY,
    CPU_SECONDS,
    DEVICE_HOURS,
    DEVICE_HOURS_SO_FAR,
    HELD,
    IDLE,
    IDLE_SHARE,
    JOULES,
    LOST,
    MONEY,
    MONEY_PER_SAMPLE,
    MONEY_SO_FAR,
    SECONDS,
    SECONDS_PER_SAMPLE,
    STARTING,
)
from tasks.markdown import cell, code, escaped
from tasks.reporting.progress import untrained
from tasks.run.beginning import NothingNew
from tasks.run.events import (
    AttemptFailed,
    Listeners,
    RunBegan,
    RunEnded,
    RunRolledBack,
    RunStopped,
    StepCommitted,
    StepsEnded,
    VersionEvaluated,
)
from tasks.run.facts import RunFacts
from tasks.run.features import features_of
from tasks.run.life_cycle import TIMELINE_STEPS

if TYPE_CHECKING:
    from storage.runs.commit_log import Ledger
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
    transcripts = shown_samples(run.files, commit, run.config.tracking.shown_samples)
    if not transcripts:
        return
    lines = [f"### Samples of step {commit.step} of {escaped(run.name)}", ""]
    for transcript in transcripts:
        lines += sample_lines(transcript)
    more = command("flows.samples", run.config.store, f"{run.name}@{commit.step}", "--worst")
    create_markdown_artifact(
        key=key(run.name, "samples"),
        markdown="\n".join([*lines, f"More of them: {code(more)}."]),
        description=f"What the model was asked and wrote in step {commit.step}.",
    )


def sample_lines(transcript: Transcript) -> list[str]:
    """Markdown of a sample: its texts as code blocks, in which nothing is interpreted."""
    origin = transcript.origin
    reward = "scoring failed" if origin.reward is None else f"reward {origin.reward:.4g}"
    by = "" if origin.player is None else f", player {origin.player}"
    by += f", played by the opponent {escaped(origin.opponent)}" if origin.opponent else ""
    lines = [
        f"**Sample {origin.sample}**, group {origin.group}, {reward}, {origin.tokens} tokens{by}; "
        f"{escaped(ending(origin))}",
        "",
    ]
    parts = transcript.parts or (("policy", transcript.response),)
    wrote = [(WROTE[who], text) for who, text in parts if who in WROTE]
    for what, body in (("asked", transcript.prompt), *wrote):
        block = printable(body, SHOWN_CHARACTERS).splitlines() or [""]
        lines += [f"{what}:", "", *(f"    {line}" for line in block), ""]
    return lines


def shard_rows(scored: list[Scored]) -> list[dict[str, str | int | float]]:
    """The table of shards: a line for each or, of many, for those of a rollout task."""
    rows, first = [], 1
    for part in scored:
        stats = [shard.stats for shard in part.sampled]
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
                "scoring failed": part.failures,
                "policy version": listed(each.version for each in stats),
                "weights held": listed(each.digest for each in stats),
            }
        )
        first = last + 1
    return rows


def listed(values: Iterable[str | int]) -> str | int:
    """One value as it is; of several the first ones, and how many there are."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) == 1:
        return distinct[0]
    more = f", … {len(distinct)} in all" if len(distinct) > 4 else ""
    return ", ".join(map(str, distinct[:4])) + more


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
        *(["", f"**{idle[0].upper()}{idle[1:]}.**"] if (idle := untrained(commit.metrics)) else []),
        *left_out(ledger),
        *sampled_in_rounds(commit),
        *(line for feature in features_of(run.config) for line in feature.page(commit)),
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
    counts = ", ".join(f"{escaped(reason)} {count}" for reason, count in reasons.items())
    return ["", f"Filtered or dropped so far: {counts}."] if counts else []


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
        tries = [attempt for attempt in attempts if attempt.stage == stage]
        seconds = max(attempt.ended for attempt in tries) - min(
            attempt.started for attempt in tries
        )
        workers = sorted({attempt.assignment.worker for attempt in tries} - {""}) or [
            "train workers"
        ]
        lines.append(
            f"| {stage} | {seconds:.2f} | {seconds / max(whole, 1e-9):.0%} | {len(tries)} "
            f"| {sum(attempt.number > 1 for attempt in tries)} | {escaped(', '.join(workers))} |"
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
        for function in functions:
            packages = function.get("packages")
            versions = packages.items() if isinstance(packages, dict) else ()
            lines.append(
                f"| {cell(digest)} | {escaped(function.get('name'))} "
                f"| {cell(str(function.get('source'))[:17])} "
                f"| {cell(str(function.get('module'))[:17])} "
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


def shown_samples(files: RunStore, commit: Commit, count: int) -> list[Transcript]:
    """So many samples of a step. None where they are gone, or no tokenizer says what they are."""
    all_of_them = commit.refs.get("samples")
    if not count or not all_of_them:
        return []
    # The first objects alone are read, however many samples the step has.
    first = all_of_them.take(np.arange(min(len(all_of_them), LOOKED_AT)))
    try:
        rewards, failed, _ = judged(files, first)
        by_reward = [row for row in np.argsort(-rewards, kind="stable").tolist() if not failed[row]]
        selected = first.take(few(by_reward, np.flatnonzero(failed).tolist(), count))
        words = tokenizer_of(files, (commit.version_out, commit.version_in))
        # Their advantages are not shown, and would have the whole batch read.
        origins = origins_of(files, selected, commit.step, {})
        return transcribed(files, selected, origins, words)
    except (NoTokenizer, ObjectMissing):
        return []


CommitMetrics = Mapping[str, float | None]


def cost_lines(metrics: CommitMetrics, currency: str) -> list[str]:
    """Markdown: each pool's device-seconds by stage, and what they come to. [] of an old commit.

    What has no room in the table, which the dashboard cuts off, is said below it.
    """
    pools = [name.split("/")[-1] for name in metrics if name.startswith(f"{IDLE_SHARE}/")]
    if not pools:
        return []
    lines = [
        "| pool | device-seconds | at work | lost | starting | idle |",
        "|---|---|---|---|---|---|",
    ]
    for pool in pools:
        start = f"{SECONDS}/{pool}/"  # then a stage, HELD, IDLE, LOST or STARTING
        seconds_of_stage = {
            name.removeprefix(start): value or 0.0
            for name, value in metrics.items()
            if name.startswith(start)
        }
        work = {k: v for k, v in seconds_of_stage.items() if k not in (HELD, IDLE, LOST, STARTING)}
        by_stage = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in work.items())
        lines.append(
            f"| {escaped(pool)} | {seconds_of_stage[HELD]:.1f} | {by_stage or '-'} "
            f"| {seconds_of_stage[LOST]:.1f} "
            f"| {seconds_of_stage[STARTING]:.1f} "
            f"| {seconds_of_stage[IDLE]:.1f} ({number(metrics, f'{IDLE_SHARE}/{pool}'):.0%}) |"
        )
    processor = (
        f"{escaped(pool)} {number(metrics, f'{CPU_SECONDS}/{pool}'):.1f}" for pool in pools
    )
    energy = {pool: metrics.get(f"{JOULES}/{pool}") for pool in pools}
    energy_text = ", ".join(
        f"{escaped(pool)} {joules:.0f}" for pool, joules in energy.items() if joules is not None
    )
    shares = {pool: metrics.get(f"{BUSY}/{pool}") for pool in pools}
    told = ", ".join(
        f"{escaped(pool)} {share:.0%}" for pool, share in shares.items() if share is not None
    )
    busy_text = f" GPUs with a kernel to run: {told} of the time." if told else ""
    lines += [
        "",
        f"Processor-seconds: {', '.join(processor)}. "
        f"Joules of GPUs: {energy_text or 'no driver told'}.{busy_text}",
        "",
        f"Device-hours: {number(metrics, DEVICE_HOURS):.4g} of the step, "
        f"{number(metrics, DEVICE_HOURS_SO_FAR):.4g} of the version that it made; "
        f"{number(metrics, SECONDS_PER_SAMPLE):.3g} device-seconds for each sample; "
        f"{number(metrics, 'rollout/tokens'):.0f} tokens sampled.",
    ]
    if metrics.get(MONEY) is not None:
        lines[-1] += (
            f" {escaped(currency)} {number(metrics, MONEY):.4g} of the step, "
            f"{number(metrics, MONEY_SO_FAR):.4g} of the version, "
            f"{number(metrics, MONEY_PER_SAMPLE):.3g} for each sample."
        )
    return lines


def number(metrics: CommitMetrics, name: str) -> float:
    """A metric; 0 where there is none."""
    return metrics.get(name) or 0.0


BOUNDS = ("reward_low", "reward_high")  # beside the reward


class EvaluationPages:
    """Notes of a run's evaluations on the pages of their flow runs."""

    def __init__(self, files: RunStore, config: GRPOConfig) -> None:
        self._files, self._config = files, config

    def listen(self, listeners: Listeners) -> None:
        """Hear what a run, or who evaluates its versions later, says."""
        listeners.on(VersionEvaluated, self.version_evaluated)

    def version_evaluated(self, event: VersionEvaluated) -> None:
        """Put a result on the page."""
        result, version = event.result, event.version
        create_markdown_artifact(
            key=key(self._files.run, f"evaluation-{result.suite}"),
            markdown=evaluation_note(self._files, self._config, result, version),
            description=f"{result.suite} on version {version}",
        )


def evaluation_note(
    files: RunStore, config: GRPOConfig, result: EvaluationResult, version: int
) -> str:
    """Markdown: weights, metrics with their intervals, what it cost, and how its answers are read.

    version: the run's number of it.
    """
    run = files.run
    maker = "" if result.asked_by == run else f", made for {escaped(result.asked_by)}"
    lines = [
        f"### {escaped(result.suite)} on version {version} of {escaped(run)}",
        "",
        f"- {result.asked} prompts, {result.metrics['samples']:.0f} samples by "
        f"{result.engine}{maker}",
        f"- Weights {code(result.weights.digest)}, which every engine attested",
        f"- Stored in {code(files.store.url(EvaluationFiles(files.store, result.key).folder))}",
        "",
        "| metric | value | 95 % interval |",
        "|---|---|---|",
    ]
    for name, value in result.metrics.items():
        interval = result.interval(name)
        bounds = "" if interval is None else f"{interval.low:.4f} to {interval.high:.4f}"
        bounds += "" if interval is None else f" ({interval.kind})"
        if name not in BOUNDS:
            lines.append(f"| {escaped(name)} | {value:.6g} | {bounds} |")
    lines += ["", *evaluation_cost(result, config.cluster.currency)]
    read = command(
        "flows.samples", config.store, run, "--evaluation", f"{result.suite}@{version}", "--worst"
    )
    return "\n".join([*lines, "", f"Its answers, the worst first: {code(read)}."])


def evaluation_cost(result: EvaluationResult, currency: str) -> list[str]:
    """Markdown: devices that its calls had. [] of an older Refrain's."""
    if not result.cost:
        return []
    seconds = {
        name.rpartition("/")[2]: value
        for name, value in result.cost.items()
        if name.startswith("device_seconds/")
    }
    parts = ", ".join(f"{escaped(pool)} {value:.1f}" for pool, value in seconds.items())
    money = result.cost.get("money")
    paid = "" if money is None else f", {escaped(currency)} {money:.4g}"
    return [
        f"Device-seconds of its calls: {parts}; {result.cost['device_hours']:.4g} device-hours{paid}."
    ]


DEPLOYMENT = "resume/resume"  # of infra/prefect.yaml
PATIENCE = 1.0  # seconds for the page of a run that ends, perhaps by a signal


def ways_on(facts: RunFacts) -> list[str]:
    """Markdown lines: Retry where a worker can press on, the form of the deployment, the command."""
    again = resume_command(facts.flow, facts.config.store, facts.name)
    context, form = FlowRunContext.get(), form_link(facts.config.store, facts.name)
    deployed = (
        context is not None and context.flow_run is not None and context.flow_run.deployment_id
    )
    return [
        *(["- **Retry** on this page goes on from its last committed step."] if deployed else []),
        *([f"- [The form of the deployment resume]({form}), with changes too."] if form else []),
        f"- In a shell: {code(again)}",
    ]


def form_link(store: StoreConfig, run: str) -> str | None:
    """Address of the form that asks for the run, filled in; None where it is not deployed."""
    with get_client(sync_client=True) as client, contextlib.suppress(PrefectException):
        deployment = client.read_deployment_by_name(DEPLOYMENT)
        where = store.model_dump(mode="json", include={"uri", "options"})
        parameters = {"config": {"run": run, "store": where}}
        page = url_for("deployment", obj_id=deployment.id)
        # Twice: Prefect 3.7's form decodes what its router has decoded.
        return page and f"{page}/run?parameters={quote(quote(json.dumps(parameters)))}"
    return None


def show_ways_on(facts: RunFacts, key: str, step: int, ways: list[str]) -> None:
    """Say on the page, and in its log, that the run has stopped and how to go on with it.

    ways: as `ways_on` has them. A server that does not answer is not waited for.
    """

    def show() -> None:
        stopped = f"{facts.name} has stopped after step {step} of {facts.config.steps}"
        with contextlib.suppress(PrefectException, httpx.HTTPError):
            get_run_logger().warning("%s. To go on:\n%s", stopped, "\n".join(ways))
            create_markdown_artifact(
                key=key,
                markdown="\n".join([f"### {escaped(stopped)}", "", "To go on:", "", *ways]),
                description=f"{stopped}: how to go on.",
            )

    run = contextvars.copy_context().run  # which flow run's page it is
    thread = threading.Thread(target=run, args=(show,), name="ways-on", daemon=True)
    thread.start()
    thread.join(PATIENCE)


def skipped(nothing: NothingNew) -> State[None]:
    """The final state of the flow run; also leaves the note on its page."""
    create_markdown_artifact(
        key="skipped", markdown=escaped(nothing), description="Why the run was skipped."
    )
    return Completed(name="Skipped", message=str(nothing))


RUN_STARTED = "refrain.run.started"
RUN_ENDED = "refrain.run.ended"
STEP_COMMITTED = "refrain.step.committed"
ATTEMPT_FAILED = "refrain.attempt.failed"
NOT_FINITE = "refrain.guard.not-finite"  # an update was left out
SCORING_FAILED = "refrain.guard.scoring-failed"  # samples without a reward
ROLLED_BACK = "refrain.run.rolled-back"  # the run goes on from an earlier step, as another


def emit(event: str, run: str, **facts: str | int | float) -> None:
    """Send an event about a run."""
    emit_event(
        event=event,
        resource={"prefect.resource.id": f"refrain.run.{run}", "prefect.resource.name": run},
        payload=dict(facts),
    )


class PrefectEvents:
    """Sends what automations act on."""

    def __init__(self, run: str) -> None:
        self._run = run

    def listen(self, listeners: Listeners) -> None:
        """Hear what the run says."""
        listeners.on(RunBegan, lambda event: self._emit(RUN_STARTED, steps=event.steps))
        listeners.on(AttemptFailed, self.attempt_failed)
        listeners.later(StepCommitted, self.step_committed)
        listeners.on(RunRolledBack, self.rolled_back)
        listeners.on(RunEnded, lambda event: self._emit(RUN_ENDED, step=event.step))

    def _emit(self, event: str, **facts: str | int | float) -> None:
        emit(event, self._run, **facts)

    def attempt_failed(self, event: AttemptFailed) -> None:
        """A call that may be tried again."""
        tried = event.attempt
        self._emit(ATTEMPT_FAILED, step=tried.step, stage=tried.stage, cause=tried.error[:500])

    def step_committed(self, event: StepCommitted) -> None:
        """A step, and what of it went wrong."""
        step, metrics = event.record.step, event.record.metrics
        self._emit(
            STEP_COMMITTED,
            step=step,
            seconds=round(event.metrics["time/step"], 2),
            retries=int(event.metrics["retries"]),
        )
        if left_out := int(metrics.get("train/skipped_steps") or 0):
            self._emit(NOT_FINITE, step=step, optimizer_steps=left_out)
        if failed := sum(shard.failures for shard in event.scored):
            self._emit(SCORING_FAILED, step=step, samples=failed)

    def rolled_back(self, event: RunRolledBack) -> None:
        """Where the run goes on."""
        self._emit(
            ROLLED_BACK,
            step=event.step,
            back_to=event.back_to,
            guard=event.guard,
            child=event.child,
            number=event.number,
        )
