"""What a run does now, or did: workers, engines, versions, calls, retries and bytes moved."""

from __future__ import annotations

import collections
import os
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import httpx

from configs.cluster import TemporaryTls
from configs.flows import resume_command
from configs.grpo import GRPOConfig
from configs.terminal_text import bytes_text
from engines.processes.dask_settings import Certificates, certificates_for
from engines.workers.inspection import NotReached, WorkerView, look
from storage.evaluations.run_cost import RunCost, cost_of_run
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import Commit, head, read_commit
from storage.runs.live import Live, is_done, read_end, read_live, state_of
from storage.runs.run_lease import holder_of
from storage.runs.run_store import RunStore, origin_of, start_of
from storage.runs.size import RunSize, size_of
from tasks.commands.command import Answer, Request, heading, table, text
from tasks.launch.server import headers_for
from tasks.run.run_record import flow_of, settings_of

if TYPE_CHECKING:
    from rich.console import RenderableType

# What Prefect gives a task run without a name of its own.
SUFFIX = re.compile(r"-[0-9a-f]{3}(?=$| \()")
HTTP_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskView:
    """A task run of the step under way, as Prefect has it."""

    name: str
    state: str
    attempts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedStep:
    """A committed step in numbers."""

    step: int
    version: int
    seconds: float | None
    samples: int
    tokens: float | None
    workers: dict[str, int]  # attempts by worker
    retries: int  # attempts after the first
    failures: list[str]  # stage and cause of each failed attempt
    weight_bytes: int  # of the version that it made
    bytes_read: float | None  # from the store, by the flow and every worker; None: not recorded
    bytes_written: float | None
    batch_bytes: int | None  # of the objects that its commit names; None once they are removed


def answer(request: Request) -> Answer:
    """Look at the run that was named."""
    files = request.files
    config, flow = settings_of(files), flow_of(files)
    holder, live, origin = holder_of(files), read_live(files), origin_of(files)
    done, start = head(files) or start_of(files), start_of(files)
    finished, end = is_done(files, done), read_end(files)
    back = None if end is None or not finished else end.rolled_back
    steps = [
        step_view(files, read_commit(files, step))
        for step in range(max(start, done - request.arguments.steps) + 1, done + 1)
    ]
    record: dict[str, Any] = {
        "run": files.run,
        "state": state_of(bool(holder), finished, back),
        "steps_committed": done,
        "steps": config.steps,
        "origin": None if origin is None else str(origin),
        "rollback": None if origin is None or origin.rollback is None else origin.rollback.why,
        "rolled_back": None if back is None else back.model_dump(mode="json"),
        "holder": None if holder is None else f"process {holder.pid} on {holder.host}",
        "resume": None if holder or finished else resume_command(flow, request.store, files.run),
        "cost": None if (cost := cost_of_run(files)) is None else asdict(cost),
        "committed": [asdict(step) for step in steps],
    }
    lines = [*_headline(record), *_cost(cost, config.cluster.currency)]
    if request.arguments.size:
        size = size_of(files, done)
        at_end = size.at_end(config.store, done, max(config.steps, done))
        record["size"] = {**asdict(size), "at_end": at_end}
        lines += _size(size, at_end, max(config.steps, done))
    good = True
    if holder is not None and live is not None and live.epoch == holder.epoch:
        tasks = task_views(live)
        record["tasks"] = [asdict(task) for task in tasks]
        record["workers"] = []
        try:
            workers = _workers_of(files, live, config)
            record["workers"] = [asdict(worker) for worker in workers or []]
            lines += [text("Its workers have ended.")] if workers is None else _workers(workers)
        except NotReached as error:
            good = False
            lines.append(text(str(error), "bold red"))
        lines += _tasks(tasks)
    elif holder is not None:
        lines.append(text("Its workers are being started."))
    return Answer(record=record, shown=[*lines, *_committed(steps)], good=good)


def _workers_of(files: RunStore, live: Live, config: GRPOConfig) -> list[WorkerView] | None:
    """What a run's workers say; None: it has ended them in order. Raises NotReached."""
    if live.ended:
        return None
    holder = holder_of(files)
    try:
        return look(live.scheduler, _certificates(config, live, holder.host if holder else ""))
    except NotReached:
        now, holder = read_live(files), holder_of(files)
        if holder is None or now is None or now.ended or now.epoch != live.epoch:
            return None  # while they were looked at
        raise


def _certificates(config: GRPOConfig, live: Live, host: str) -> Certificates | None:
    """What a process needs to speak to the run's cluster. Raises NotReached where it cannot."""
    encryption = config.cluster.encryption
    if not isinstance(encryption, TemporaryTls):
        return certificates_for(encryption)
    files = live.certificates or {}
    if not files or not all(os.access(path, os.R_OK) for path in files.values()):
        where = f" in {os.path.dirname(files['ca'])}" if files else ""
        raise NotReached(
            f"The workers cannot be asked from here: the cluster's certificates are{where} on "
            f"{host}, readable only by the user who started the run. Ask there and as that user, "
            "or set cluster.tls.kind = files."
        )
    return Certificates(**files)


def step_view(files: RunStore, commit: Commit) -> InspectedStep:
    """What a commit says of its step."""
    retried = [attempt for attempt in commit.attempts if int(str(attempt.get("number", 1))) > 1]
    failed = [
        f"{attempt.get('stage')}: {attempt['error']}"
        for attempt in commit.attempts
        if attempt.get("error")
    ]
    workers = [str(attempt["worker"]) for attempt in commit.attempts if attempt.get("worker")]
    try:
        batch_bytes: int | None = sum(files.store.sizes(commit.objects).values())
    except ObjectMissing:
        batch_bytes = None
    samples = commit.refs.get("samples")
    return InspectedStep(
        step=commit.step,
        version=commit.version_out.version,
        seconds=commit.metrics.get("time/step"),
        samples=0 if samples is None else len(samples),
        tokens=commit.metrics.get("rollout/tokens"),
        workers=dict(collections.Counter(workers)),
        retries=len(retried),
        failures=failed,
        weight_bytes=commit.version_out.nbytes,
        bytes_read=commit.metrics.get("store/bytes_read"),
        bytes_written=commit.metrics.get("store/bytes_written"),
        batch_bytes=batch_bytes,
    )


def task_views(live: Live) -> list[TaskView]:
    """The tasks of the newest step of a flow run; none where its Prefect server does not answer."""
    if live.prefect is None or live.flow_run is None:
        return []
    newest = {
        "flow_runs": {"parent_flow_run_id": {"any_": [live.flow_run]}},
        "sort": "START_TIME_DESC",
        "limit": 1,
    }
    try:
        flows = _ask(live, "flow_runs", newest)
        runs = [flow["id"] for flow in flows] or [live.flow_run]
        tasks = _ask(live, "task_runs", {"flow_runs": {"id": {"any_": runs}}, "limit": 200})
    except httpx.HTTPError:
        return []
    tasks.sort(key=lambda task: (task["start_time"] or "9", task["name"]))
    return [
        TaskView(
            name=SUFFIX.sub("", task["name"]), state=task["state_name"], attempts=task["run_count"]
        )
        for task in tasks
    ]


def _ask(live: Live, what: str, question: dict[str, Any]) -> list[dict[str, Any]]:
    api = str(live.prefect)
    headers = headers_for(api, live.logs)
    url = f"{api}/{what}/filter"
    answered = httpx.post(url, json=question, headers=headers, timeout=HTTP_TIMEOUT)
    answered.raise_for_status()
    return list(answered.json())


def _headline(record: dict[str, Any]) -> list[RenderableType]:
    done = f"{record['steps_committed']} of {record['steps']} steps are committed"
    lines = [heading(f"{record['run']} is {record['state']}: {done}.")]
    if record["origin"]:
        lines.append(text(f"It goes on from {record['origin']}."))
    if record["holder"]:
        lines.append(text(f"It is written by {record['holder']}."))
    if record["resume"]:
        all_steps = record["steps_committed"] >= record["steps"]
        note = "What follows the last step is not done. " if all_steps else ""
        lines.append(text(f"{note}To go on: {record['resume']}"))
    return lines


def _cost(cost: RunCost | None, currency: str) -> list[RenderableType]:
    if cost is None:
        return []
    parts = [("in its steps", cost.steps), ("after them", cost.after)]
    parts += [("in evaluations since", cost.back_fills)]
    hours = ", ".join(f"{part.device_hours:.4g} {where}" for where, part in parts)
    money = "" if cost.money is None else f" {currency} {cost.money:.4g}."
    return [text(f"Device-hours: {cost.device_hours:.4g}, {hours}.{money}")]


def _size(size: RunSize, at_end: int, steps: int) -> list[RenderableType]:
    parts = (
        (size.weights, f"{size.versions} policy versions"),
        (size.state, f"{size.snapshots} snapshots"),
        (size.batches, f"batches of {size.steps} steps"),
        (size.records, "commits"),
        (size.others, "others"),
    )
    sizes = ", ".join(f"{bytes_text(nbytes)} {what}" for nbytes, what in parts)
    return [
        text(f"Size in the store: {bytes_text(size.total)}: {sizes}."),
        text(
            f"Each step adds {bytes_text(size.batches_per_step)} of batches and "
            f"{bytes_text(size.records_per_step)} of commits. By store.keep_* it has about "
            f"{bytes_text(at_end)} after step {steps}."
        ),
    ]


def _workers(workers: list[WorkerView]) -> list[RenderableType]:
    if not workers:
        return [text("No worker is there now.")]
    rows = table(
        "worker", "pool", "pid", "engines (version)", "runs now", "queued", "read", "written",
        right=("pid", "queued", "read", "written"),
    )  # fmt: skip
    for worker in workers:
        status = worker.status
        if status is None:
            rows.add_row(worker.name, ", ".join(worker.pools), "", "does not answer")
            continue
        engines = [
            role + ("" if engine.version is None else f" (v{engine.version})")
            for role, engine in status.engines.items()
        ]
        running = [f"{call.role}.{call.method} for {call.age:.1f} s" for call in status.running]
        rows.add_row(
            worker.name, ", ".join(worker.pools), str(status.pid), ", ".join(engines),
            ", ".join(running) or "-", str(max(0, worker.processing - len(running))),
            bytes_text(status.traffic.bytes_read), bytes_text(status.traffic.bytes_written),
        )  # fmt: skip
    return [rows]


def _tasks(tasks: list[TaskView]) -> list[RenderableType]:
    if not tasks:
        return []
    rows = table("task of the step under way", "state", "attempts", right=("attempts",))
    for task in tasks:
        rows.add_row(task.name, task.state, str(task.attempts))
    return [rows]


def _committed(steps: list[InspectedStep]) -> list[RenderableType]:
    if not steps:
        return []
    rows = table(
        "step", "version", "seconds", "samples", "tokens", "calls by worker", "retries",
        "failures", "read", "written", "batches", "weights",
        right=(
            "step", "version", "seconds", "samples", "tokens", "retries", "read", "written",
            "batches", "weights",
        ),
    )  # fmt: skip
    for step in steps:
        seconds = "" if step.seconds is None else f"{step.seconds:.1f}"
        batches = "removed" if step.batch_bytes is None else bytes_text(step.batch_bytes)
        moved = ["" if n is None else bytes_text(n) for n in (step.bytes_read, step.bytes_written)]
        calls = ", ".join(f"{name} {count}" for name, count in sorted(step.workers.items()))
        rows.add_row(
            str(step.step), str(step.version), seconds, str(step.samples), f"{step.tokens or 0:.0f}",
            calls, str(step.retries), text("; ".join(step.failures)[:200]), *moved, batches,
            bytes_text(step.weight_bytes),
        )  # fmt: skip
    return [rows]
