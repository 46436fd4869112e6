"""The process group in which a trainer's rank 0 broadcasts to all receivers: NCCL, or Gloo.

It stays from version to version, and is made anew when one of its members is. torch's own group is
used, not vLLM's communicator: its collectives can be given up, and it has Gloo for a CPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from engines.processes.bounded import Overdue, bounded
from engines.processes.loopback import listen_at, pin_to_loopback
from engines.weight_transfer.offer import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Backend

SENDER = 0  # rank of the trainer
LOOK = 0.02  # seconds between looks for whether all others are still there
PAUSES = (0.0002, 0.005)  # seconds between looks whether a broadcast is done: at first, and at most
# What NCCL's watchdog does when a peer dies: by default it ends the process, which may be a trainer.
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where a process sits in a group."""

    group: str  # name
    rank: int
    size: int
    host: str  # of the meeting point
    port: int


class BroadcastGroup:
    """One member's view of a group."""

    def __init__(
        self, seat: Seat, device: torch.device, timeout: float, store: dist.Store | None = None
    ) -> None:
        """Meet the others; `store`: of the sender, who opened the meeting point.

        Raises TransferFailed where they do not come within `timeout` seconds.
        """
        self.name, self.size = seat.group, seat.size
        self._device = device
        pin_to_loopback(seat.host)

        def meet() -> Backend:
            shared = store or dist.TCPStore(
                seat.host, seat.port, None, False, timeout=timedelta(seconds=timeout)
            )
            backend = _backend(shared, seat, device, timeout)
            work = _broadcast(backend, torch.zeros(1, device=device))  # connects all
            self._wait(work, device, time.monotonic() + timeout, lambda: None)
            return backend

        try:
            self._backend = bounded(meet, timeout, "weight-transfer-group")
        except Overdue:
            raise TransferFailed(f"a group of {seat.size} was not formed in time") from None
        except (RuntimeError, OSError) as error:
            raise TransferFailed(f"a group of {seat.size} was not formed: {error}") from error

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Begin to send a tensor to all, or to receive it."""
        try:
            return _broadcast(self._backend, tensor)
        except RuntimeError as error:
            raise TransferFailed(f"the broadcast failed: {error}") from error

    def wait(self, work: dist.Work, until: float, check: Callable[[], None]) -> None:
        """Return once a broadcast is done here; on a GPU, what follows on the stream comes after it.

        check: raises TransferFailed where another member has given up; asked while nothing comes.
        """
        try:
            self._wait(work, self._device, until, check)
        except TransferFailed:
            raise
        except RuntimeError as error:
            raise TransferFailed(f"the broadcast failed: {error}") from error

    def abandon(self) -> None:
        """Give it up; what is under way ends on the other side as it may.

        Gloo ends a broadcast that hangs after the group's timeout, so nobody waits for that here.
        """
        backend, name = self._backend, f"abandon-{self.name}"
        threading.Thread(target=_abort, args=(backend,), name=name, daemon=True).start()

    @staticmethod
    def _wait(
        work: dist.Work, device: torch.device, until: float, check: Callable[[], None]
    ) -> None:
        pause, longest = PAUSES
        looked = time.monotonic()
        while not work.is_completed():
            now = time.monotonic()
            if now > until:
                raise TransferFailed("the broadcast was not done in time")
            if now > looked + LOOK:
                check()
                looked = now
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
        if device.type == "cuda" and (error := work.exception()) is not None:
            raise RuntimeError(str(error))  # which NCCL's `wait` does not do
        work.wait()  # raises what went wrong by Gloo


def open_meeting_point(host: str, timeout: float) -> tuple[dist.Store, int]:
    """Where the members of a new group meet, and its port."""
    listener = listen_at(host)
    port: int = listener.getsockname()[1]
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(
        host,
        port,
        None,
        True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def _broadcast(backend: Backend, tensor: Tensor) -> dist.Work:
    work: dist.Work = backend.broadcast(tensor, SENDER)  # type: ignore[attr-defined]  # torch's stub
    return work


def _abort(backend: Backend) -> None:
    backend.abort()


def _backend(store: dist.Store, seat: Seat, device: torch.device, timeout: float) -> Backend:
    named = dist.PrefixStore(seat.group, store)
    limit = timedelta(seconds=timeout)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(named, seat.rank, seat.size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 10 * limit  # longer than anybody waits, so that the watchdog never ends it
    with _no_watchdog(), torch.cuda.device(device):
        return dist.ProcessGroupNCCL(named, seat.rank, seat.size, options)


@contextmanager
def _no_watchdog() -> Iterator[None]:
    """Errors of the group made in here are looked for by who waits."""
    before = os.environ.get(WATCHDOG)
    os.environ[WATCHDOG] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[WATCHDOG]
        else:
            os.environ[WATCHDOG] = before
