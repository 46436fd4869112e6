"""What Slurm's commands say: jobs in the queue, and errors as sentences."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

TIMEOUT = 30.0  # seconds for one of Slurm's commands
BUSY = re.compile(r"timed out|Unable to contact|Connection refused|Resource temporarily", re.I)
LIVE = "PENDING,CONFIGURING,RUNNING,SUSPENDED,REQUEUED,RESIZING"  # states
ENDING = "COMPLETING,STAGE_OUT,SIGNALING"


class BusySlurm(RuntimeError):
    """Slurm's controller did not answer; it may later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task of a job array, or a job, in the queue."""

    id: str  # as scancel takes it: JOB or JOB_NUMBER
    job_name: str
    number: int | None  # in its array; none for a plain job
    state: str  # PENDING, RUNNING, …
    left: float | None  # seconds until its time limit; none while it does not run, or without one
    reason: str  # why it does not run, or where it does


def slurm_says(*words: str, stdin: str = "") -> str:
    """Run one of Slurm's commands. BusySlurm, or ValueError with what it complained of."""
    process = subprocess.run(
        words, input=stdin, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if process.returncode == 0:
        return process.stdout
    complaint = " ".join(process.stderr.split()) or f"exit status {process.returncode}"
    if BUSY.search(complaint):
        raise BusySlurm(f"{words[0]}: {complaint}")
    raise ValueError(f"{words[0]} refused: {complaint} Check cluster.slurm.")


def listed(names: Sequence[str], ending: bool = False) -> list[Task]:
    """Jobs and array tasks of these names that are pending or running; or, too, that are ending."""
    states = f"{LIVE},{ENDING}" if ending else LIVE
    shown = ["-h", "-r", "-n", ",".join(names), "-t", states, "-o", "%i|%j|%K|%T|%L|%R"]
    out = slurm_says("squeue", *shown)
    tasks = []
    for line in out.splitlines():
        number, name, index, state, remaining, reason = line.strip().split("|", 5)
        tasks.append(
            Task(
                id=number,
                job_name=name,
                number=int(index) if index.isdigit() else None,
                state=state,
                left=seconds(remaining) if state == "RUNNING" else None,
                reason=reason,
            )
        )
    return tasks


def seconds(text: str) -> float | None:
    """Slurm's [DAYS-][[HOURS:]MINUTES:]SECONDS; none for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, last = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + last)
