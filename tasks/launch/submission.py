"""A whole run as Slurm jobs: the flow is submitted as a job, which then submits its pools' jobs.

A submission has a name, with which the names of all its jobs begin, and a folder of scripts and
logs. The run's own name is found in the store, by the settings that it was begun with. When the
flow's job nears its time limit the flow stops, and a job that goes on with the run is submitted.
"""

from __future__ import annotations

import datetime
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pydantic import BaseModel, ConfigDict

from configs.cluster import SlurmConfig
from configs.flows import command
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.storage import StoreConfig
from configs.terminal_text import print_text
from engines.clusters.slurm_jobs import BusySlurm as BusySlurm
from engines.clusters.slurm_jobs import Task, listed, slurm_says
from engines.processes.node import python_path
from storage.objects.store import Store
from storage.runs.commit_log import head
from storage.runs.live import goes_on_as, is_done
from storage.runs.run_store import RunStore

RECORD = "submission.json"
FLOW_LOG = "flow.log"
STOP_TIMEOUT = 60.0  # seconds for the flow to end its pools by itself
GONE_TIMEOUT = 45.0  # seconds for cancelled jobs to leave the queue
INTERRUPTED = 130  # exit code of a flow that was told to stop


class SubmissionRecord(BaseModel):
    """What a submission's folder says about it."""

    model_config = ConfigDict(frozen=True)

    name: str
    module: str  # of the flow
    words: list[str]  # of its command line
    family: str  # what the run's name begins with
    steps: int
    pools: list[str]
    store: str
    store_options: dict[str, str | int | float | bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmissionStatus:
    """Where a submission stands."""

    name: str
    run: str | None  # none before the flow has begun
    step: int  # last one committed
    done: bool  # nothing is left to do
    steps: int
    flow: Task | None  # none when no job of the flow is in the queue
    pools: dict[str, list[Task]]


class Submission:
    """A run that was submitted, by its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        try:
            self.record = SubmissionRecord.model_validate_json((self.folder / RECORD).read_text())
        except FileNotFoundError:
            names = ", ".join(sorted(path.name for path in submitted(folder.parent))) or "none"
            raise ConfigError(
                f"There is no submission {folder.name} in {folder.parent}. There are: {names}."
            ) from None

    @property
    def name(self) -> str:
        """What the jobs' names begin with."""
        return self.record.name

    @property
    def flow_job(self) -> str:
        """Name of the flow's job."""
        return f"{self.name}-flow"

    @property
    def _store(self) -> Store:
        return Store(self.record.store, self.record.store_options)

    def run(self) -> str | None:
        """Name of the run that the flow began; None before it did.

        Not of one that goes on with it after a rollback: that has other settings, and is found by it.
        """
        store = self._store
        for name in reversed(store.children()):
            if not name.startswith(f"{self.record.family}-"):
                continue
            record = RunStore(store, name).read_run() or {}
            match record:
                case {"origin": {"rollback": dict()}}:
                    continue
                case {"config": {"cluster": {"slurm": {"name": self.name}}}}:
                    return name
        return None

    def resume_command(self) -> str:
        """The command that goes on with the run on this machine; empty before there is a run."""
        run = self.run()
        store = StoreConfig(uri=self.record.store, options=self.record.store_options)
        return "" if run is None else command(self.record.module, store, "--resume", run)

    def status(self) -> SubmissionStatus:
        """Jobs from the queue, progress from the store."""
        run = self.run()
        jobs = self._jobs()
        files = None if run is None else goes_on_as(RunStore(self._store, run))
        step = 0 if files is None else head(files) or 0
        flow = jobs.pop(self.flow_job, [])
        return SubmissionStatus(
            name=self.name,
            run=run,
            step=step,
            done=files is not None and is_done(files, step),
            steps=self.record.steps,
            flow=flow[0] if flow else None,
            pools={name.removeprefix(f"{self.name}-"): tasks for name, tasks in jobs.items()},
        )

    def _jobs(self, ending: bool = False) -> dict[str, list[Task]]:
        names = [self.flow_job, *(f"{self.name}-{pool}" for pool in self.record.pools)]
        jobs: dict[str, list[Task]] = {}
        for task in listed(names, ending):
            jobs.setdefault(task.job_name, []).append(task)
        return jobs

    def log(self, worker: str | None = None) -> Path:
        """The log file of the flow or of a worker."""
        path = self.folder / (FLOW_LOG if worker is None else f"{worker}.log")
        if not path.exists():
            names = ", ".join(sorted(file.stem for file in self.folder.glob("*.log"))) or "none yet"
            raise ConfigError(f"There is no log {path.name} in {self.folder}. There are: {names}.")
        return path

    def submit(self) -> None:
        """Put the flow's job into the queue."""
        slurm_says("sbatch", "--parsable", str(self.folder / "flow.sh"))

    def stop(self) -> list[str]:
        """End flow and pools; returns the ids of jobs that are still in the queue then."""
        flow = self._jobs().get(self.flow_job, [])
        if flow and flow[0].state == "RUNNING":
            slurm_says("scancel", "--batch", "--signal=TERM", flow[0].id)
            until = time.monotonic() + STOP_TIMEOUT
            while self._jobs() and time.monotonic() < until:
                time.sleep(1.0)
        until = time.monotonic() + GONE_TIMEOUT
        while (jobs := self._jobs(ending=True)) and time.monotonic() < until:
            for name in jobs:
                slurm_says("scancel", "--quiet", "--name", name)
            time.sleep(1.0)
        return [task.id for tasks in jobs.values() for task in tasks]

    def work(self) -> int:
        """In the flow's job: run the flow, from where it stands; returns the exit code.

        A SIGTERM (a person's scancel) ends it. Before the time limit Slurm sends SIGUSR1: then the
        flow is ended too, and the job is submitted anew.
        """
        run = self.run()
        words = [*self.record.words, *(["--resume", run] if run is not None else [])]
        flow = subprocess.Popen(
            [sys.executable, "-P", "-m", self.record.module, *words],
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        signals: set[int] = set()

        def stop(number: int, frame: FrameType | None) -> None:
            signals.add(number)
            flow.send_signal(signal.SIGTERM)

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGUSR1, stop)
        code = flow.wait()
        if signals == {signal.SIGUSR1} and code == INTERRUPTED:
            print_text(
                "The job's time is nearly over: a job that goes on with the run is submitted."
            )
            self.submit()
        return code


def submitted(folder: Path) -> list[Path]:
    """Folders of every submission below a folder."""
    return sorted(path.parent for path in folder.glob(f"*/{RECORD}"))


def new_submission(config: GRPOConfig, module: str, words: Sequence[str]) -> Submission:
    """Write the folder of a new submission: its record and the script of the flow's job.

    `words`: of the flow's command line, from which `config` was made.
    """
    slurm = config.cluster.slurm
    now = datetime.datetime.now(datetime.UTC).strftime("%m%d-%H%M%S")
    name = slurm.name or f"{config.name}-{now}-{secrets.token_hex(2)}"
    folder = Path(slurm.folder).absolute() / name
    folder.mkdir(parents=True, exist_ok=False)
    record = SubmissionRecord(
        name=name,
        module=module,
        words=[*words, f"cluster.slurm.name={name}", f"cluster.slurm.folder={folder.parent}"],
        family=config.name,
        steps=config.steps,
        pools=list(config.cluster.pools),
        store=Store(config.store.uri).uri,
        store_options=dict(config.store.options),
    )
    (folder / RECORD).write_text(record.model_dump_json(indent=2))
    (folder / "flow.sh").write_text(flow_script(slurm, name, folder))
    return Submission(folder)


def flow_script(slurm: SlurmConfig, name: str, folder: Path) -> str:
    """The batch script of the flow's job."""
    flow = slurm.flow
    limit, partition = flow.time_limit, flow.partition or slurm.partition
    options = [
        f"--job-name={name}-flow",
        f"--output={folder / FLOW_LOG}",
        "--open-mode=append",
        "--ntasks=1",
        f"--cpus-per-task={flow.threads}",
        f"--signal=B:USR1@{flow.handover}",
        *([f"--mem={round(flow.memory_gib * 1024)}M"] if flow.memory_gib else []),
        *([f"--partition={partition}"] if partition else []),
        *([f"--account={slurm.account}"] if slurm.account else []),
        *([f"--time={-(-limit // 60)}"] if limit else []),
        *slurm.directives,
        *flow.directives,
    ]
    python = slurm.python or sys.executable
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options), *slurm.prologue]
    if slurm.python is None:
        lines.append(f"export PYTHONPATH={shlex.quote(python_path())}")
    lines.append(f"cd {shlex.quote(os.getcwd())}")
    lines.append(
        f"exec {shlex.quote(python)} -u -P -m flows.cluster work {shlex.quote(str(folder))}"
    )
    return "\n".join(lines) + "\n"
