"""Small engines for tests of the cluster, the host and the gang."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from engines.failures import InfrastructureError
from engines.start_progress import report
from engines.workers.engine import (
    Call,
    CallId,
    Engine,
    EngineSpec,
    Memory,
    Moved,
    Ranked,
    joined_by,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """Argument of the dummy engines."""

    tag: str = ""  # to tell specs apart
    build_seconds: float = 0.0  # how long the engine takes to build


class NotYet(InfrastructureError):
    """An engine's own retryable error."""

    def __init__(self, *, left: int) -> None:  # does not survive pickling
        super().__init__(f"{left} left")


class Dummy(Engine):
    """Sleeps, fails, counts, starts children."""

    def __init__(self, payload: Payload) -> None:
        time.sleep(payload.build_seconds)
        self.counter = 0
        self.closed = False
        self.lock = threading.Lock()

    def count(self) -> int:
        """How often this has been called."""
        with self.lock:
            self.counter += 1
            return self.counter

    def nap(self, seconds: float) -> int:
        """Sleep; the number of naps so far."""
        time.sleep(seconds)
        return self.count()

    def close(self) -> None:
        """Remember it."""
        self.closed = True

    def note(self, path: str) -> None:
        """Leave a line in a file."""
        with open(path, "a") as file:
            file.write("called\n")

    def say(self, text: str) -> None:
        """A line of an engine's log."""
        print(text, flush=True)

    def fail(self, text: str, seconds: float = 0.0) -> None:
        """The user's mistake."""
        time.sleep(seconds)
        raise ValueError(text)

    def fail_softly(self) -> None:
        """The machinery's."""
        raise NotYet(left=3)

    def threads(self) -> int:
        """Threads that torch would use."""
        import torch

        return int(torch.get_num_threads())

    def environ(self, name: str) -> str | None:
        """An environment variable of the worker."""
        return os.environ.get(name)

    def spawn(self) -> int:
        """Pid of a child that outlives this process unless somebody ends it."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def loaded(self, module: str) -> bool:
        """Whether a module has been imported on the worker."""
        return module in sys.modules


def flat(parts: Sequence[list[T]]) -> list[T]:
    """What all ranks have, in rank order."""
    return [one for part in parts for one in part]


class Deviceless(Ranked):
    """Has nothing to put away."""

    def offload(self) -> Moved:
        return Moved()

    def onload(self) -> Moved:
        return Moved()


class Summing(Deviceless):
    """Ranks that really meet, by Gloo."""

    def __init__(self, payload: Payload) -> None:
        self.rank = 0

    def join(
        self, rank: int, world: int, host: str, port: int, generation: int, timeout: float
    ) -> str:
        """Make a Gloo process group."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self.rank = rank
        self.met = f"rank {rank} of {world}, generation {generation}"
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{host}:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        return self.met

    @joined_by(flat)
    def joined(self) -> list[str]:
        """How this rank joined."""
        return [self.met]

    @joined_by(flat)
    def total(self, value: float) -> list[float]:
        """Sum over the ranks of `value` times the rank's number, counted from 1."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value * (self.rank + 1)])
        dist.all_reduce(tensor)
        return [float(tensor.item())]

    def nap_on(self, rank: int, seconds: float) -> list[float]:
        """One rank comes late to a collective."""
        if rank == self.rank:
            time.sleep(seconds)
        return self.total(1.0)

    @joined_by(flat)
    def pid(self) -> list[int]:
        """Process id of the rank."""
        return [os.getpid()]


class Lone(Deviceless):
    """Ranks that only pretend to meet; quick, since they need no torch."""

    def __init__(self, payload: Payload) -> None:
        self.rank = -1
        self.counter = 0
        self.built_in = threading.get_ident()
        self.go = threading.Event()

    def join(
        self, rank: int, world: int, host: str, port: int, generation: int, timeout: float
    ) -> tuple[str, int]:
        """Remember the rank."""
        self.rank = rank
        return host, port

    def lead(self) -> int:
        """The rank, of which rank 0's counts."""
        return self.rank

    @joined_by(flat)
    def each(self) -> list[tuple[int, int]]:
        """Rank, and how often this was called."""
        self.counter += 1
        return [(self.rank, self.counter)]

    def fail_on(self, rank: int, text: str, machinery: bool = False) -> None:
        """One rank fails, the others wait for it."""
        if rank == self.rank:
            raise NotYet(left=1) if machinery else ValueError(text)
        time.sleep(60)

    def run_out_on(self, rank: int) -> None:
        """One rank is short of memory, the others meet a broken collective."""
        import torch

        if rank == self.rank:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        raise RuntimeError("Connection closed by peer")

    def memory_held(self, memory: Memory) -> dict[str, int]:
        """As if."""
        return {"weights": 3 * 2**30, "activations": 70 * 2**30}

    def nap(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def thread(self) -> tuple[int, int]:
        """The threads in which it was built and works, once it has said so and may go on."""
        report("in its thread")
        self.go.wait()
        return self.built_in, threading.get_ident()


def dummy(tag: str = "", build_seconds: float = 0.0) -> EngineSpec[Dummy]:
    """A spec of Dummy."""
    payload = Payload(tag=tag, build_seconds=build_seconds)
    return EngineSpec.of("tests.engines.workers.dummies:Dummy", payload, Dummy)


def summing() -> EngineSpec[Summing]:
    """A spec of Summing."""
    return EngineSpec.of("tests.engines.workers.dummies:Summing", Payload(), Summing)


def lone() -> EngineSpec[Lone]:
    """A spec of Lone."""
    return EngineSpec.of("tests.engines.workers.dummies:Lone", Payload(), Lone)


def request(method: str, call_id: CallId | None = None, **arguments: object) -> Call[Any]:
    """A call of a Dummy."""
    return Call.of("role", getattr(Dummy, method), call_id, **arguments)


class Slow(Engine):
    """Takes its time to start, and says how it gets on."""

    def __init__(self, payload: Payload) -> None:
        """`tag`: of its ten parts, so many are done before it stops for `build_seconds`."""
        for part in range(10):
            report(f"loading weights: {part} of 10 tensors")
            time.sleep(payload.build_seconds if part == int(payload.tag) else 0.3)


def slow(stops_at: int, seconds: float) -> EngineSpec[Slow]:
    """A spec of Slow."""
    payload = Payload(tag=str(stops_at), build_seconds=seconds)
    return EngineSpec.of("tests.engines.workers.dummies:Slow", payload, Slow)
