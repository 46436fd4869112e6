"""The run that benchmarks/chaos.py kills: how it is started, resumed, and what is left of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.sleeping_engine import VARIABLE
from benchmarks.stores import Outages
from storage.objects.errors import StoreError
from storage.objects.store import Store
from storage.runs.commit_log import head
from storage.runs.run_store import RunStore
from tests.faults.planted import Faults

SLEEPING = "benchmarks.sleeping_engine"


class Subject:
    """The run that suffers."""

    def __init__(
        self,
        folder: Path,
        flow: str,
        words: Sequence[str],
        steps: int,
        sleep: float | None,
        outages: Outages | None,
    ) -> None:
        """sleep: seconds for which rollout engines sleep instead of decoding, if they do.

        outages: of its store, if that may be out of reach.
        """
        self.folder, self.outages = folder, outages
        self.store = Store(f"file://{folder}/.refrain/store")
        self.place: tuple[str, ...] = ()  # settings of where the store is
        if outages is not None:
            self.place = outages.settings(folder.name)
            self.store = Store(f"{outages.uri}/{folder.name}", outages.options)
        self.sleep = sleep
        self.program = [f"flows.{flow}"] if sleep is None else [SLEEPING, f"flows.{flow}"]
        self.faults = Faults(folder / "faults")
        self.words = (*words, f"steps={steps}", *self.place)
        self.steps = steps
        self.starts = 0
        self.log = (folder / "out").open("ab")
        self.start()

    def start(self) -> None:
        """Start the flow, or resume it."""
        files = self.files
        words = self.words if files is None else ("--resume", files.run, *self.place)
        environment = {**os.environ, **self.faults.environment, "OMP_NUM_THREADS": "1"}
        if self.sleep is not None:
            environment[VARIABLE] = f"equal:{self.sleep}"
        environment.pop("PREFECT_API_URL", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", *self.program, *words],
            cwd=self.folder,
            env=environment,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.starts += 1

    @property
    def files(self) -> RunStore | None:
        """The run in the store, once it is there."""
        names = [one for one in self.store.children() if self.store.exists(f"{one}/run.json")]
        return RunStore(self.store, names[0]) if names else None

    @property
    def head(self) -> int:
        """The last committed step."""
        with contextlib.suppress(StoreError):
            return 0 if self.files is None else head(self.files) or 0
        return 0

    @property
    def finished(self) -> bool:
        """Whether the flow has ended well; it is resumed when it has ended otherwise."""
        code = self.process.poll()
        if code is not None and code != 0:
            self.start()
        return code == 0

    def left(self) -> list[psutil.Process]:
        """Its processes, whoever their parent is by now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(self.folder) and process.pid != self.process.pid:
                    found.append(process)
        return found


def many(workers: int) -> tuple[str, ...]:
    """Settings for so many rollout workers, each of which has one shard of a prompt in a step."""
    return (
        f"cluster.pools.rollout={{workers: {workers}, threads: 1, slots: 1}}",
        f"prompts_per_step={workers}",
        f"rollout.shards={workers}",
        "group_size=2",
        "data.source.size=4096",
    )
