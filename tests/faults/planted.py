"""Faults for a run, what happened to them, and the run's processes by name.

How they strike is in plant/sitecustomize.py, which runs in the processes of the run.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

ROOT = Path(__file__).parents[2]
PLANT = Path(__file__).parent / "plant"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Something that happens once, when a function of the product is called for the nth time.

    A delay happens at each call, for so many `seconds`. A drift happens at each call from the nth on:
    the function is an optimizer's step, and moves a weight more than it should.
    """

    id: str
    target: str  # package.module:function, or :Class.method
    action: Literal["kill", "stop", "hang", "raise", "delay", "drift"]
    nth: int = 1  # call in all processes that match, counted from 1
    when: Literal["before", "after"] = "before"
    seconds: float = 0.02
    only: str = ""  # strike only in processes whose name begins so
    victim: str = "self"  # name of the process that is killed or stopped
    error: Literal["RuntimeError", "OSError", "ValueError", "OutOfMemoryError"] = "RuntimeError"


class Faults:
    """The faults of one run, and the folder in which its processes leave their notes."""

    def __init__(self, folder: Path, faults: Sequence[Fault] = ()) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.plan(faults)
        (folder / "processes").touch()

    def plan(self, faults: Sequence[Fault]) -> None:
        """Set the faults; a process sees those that were set before it began."""
        self.faults = list(faults)
        plan = json.dumps([dataclasses.asdict(fault) for fault in faults])
        (self.folder / "plan.json").write_text(plan)

    @property
    def environment(self) -> Mapping[str, str]:
        """What the run's processes must find in their environment."""
        return {
            "PYTHONPATH": f"{PLANT}{os.pathsep}{ROOT}",
            "REFRAIN_TEST_FAULTS": str(self.folder),
        }

    @property
    def missed(self) -> list[str]:
        """Faults that did not happen: then a test has proved nothing."""
        return [
            fault.id for fault in self.faults if not (self.folder / f"{fault.id}.fired").exists()
        ]

    def calls(self, id: str) -> int:
        """How often a fault's function was called, in all processes together."""
        return (self.folder / f"{id}.calls").stat().st_size

    def processes(self, name: str = "") -> dict[str, psutil.Process]:
        """Living processes by name, the newest of each; those whose name begins with `name`."""
        found = {}
        for line in (self.folder / "processes").read_text().splitlines():
            known, pid = line.rsplit(" ", 1)
            if known.startswith(name) and psutil.pid_exists(int(pid)):
                process = psutil.Process(int(pid))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[known] = process
        return found
