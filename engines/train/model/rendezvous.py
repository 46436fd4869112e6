"""How the ranks of a gang meet: bounded phases with names, one process group for each process.

Roles that share a pool are several engines in each of its processes, and take turns; they use one
group, torch's default one. It stays when an engine leaves, because DTensor's caches name groups
that were destroyed (torch 2.13; seen by others at https://github.com/NVIDIA/Megatron-LM/pull/7029),
and is made anew when some rank does not know it, because its worker was restarted.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from engines.failures import InfrastructureError
from engines.processes.bounded import Overdue, bounded
from engines.processes.loopback import listen_at, pin_to_loopback

T = TypeVar("T")

_identity: str | None = None  # of the group that this process is in


class RendezvousFailed(InfrastructureError):
    """A phase of the rendezvous did not end in time, or ended with an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """The ranks have met."""

    group: dist.ProcessGroup
    rank: int
    world: int
    device: torch.device
    seconds: dict[str, float]  # by phase


def meet(
    rank: int,
    world: int,
    host: str,
    port: int,
    device: torch.device,
    timeout: float,
    call_timeout: float,
) -> Meeting:
    """A process group of all ranks; rank 0 listens at host:port.

    Args:
        rank: Of this process, from 0.
        world: Number of ranks.
        host: Address of rank 0.
        port: Of rank 0.
        device: Of this rank; NCCL on CUDA, Gloo on a CPU.
        timeout: Seconds that each phase (store, then gloo or nccl) may take.
        call_timeout: Seconds that a collective may take later on.

    Raises:
        RendezvousFailed: Naming the phase.
    """
    seconds: dict[str, float] = {}
    where = f"rank {rank} of {world} at {host}:{port}"
    if world > 1:
        pin_to_loopback(host)
    store = _phase(
        "store", where, timeout, seconds, lambda: _store(rank, world, host, port, timeout)
    )
    layer = "nccl" if device.type == "cuda" else "gloo"
    group = _phase(
        layer, where, timeout, seconds, lambda: _group(store, rank, world, device, call_timeout)
    )
    return Meeting(group=group, rank=rank, world=world, device=device, seconds=seconds)


def _phase(
    phase: str, where: str, timeout: float, seconds: dict[str, float], run: Callable[[], T]
) -> T:
    """Run a phase in a thread of its own, because no library call can be trusted to end."""
    began = time.monotonic()
    try:
        return bounded(run, timeout, f"rendezvous-{phase}")
    except Overdue:
        raise RendezvousFailed(
            f"rendezvous is stuck in phase {phase} ({where}): not done after {timeout:g} s. "
            "Check that every rank was started and can reach that address."
        ) from None
    except Exception as error:
        raise RendezvousFailed(f"rendezvous failed in phase {phase} ({where}): {error}") from error
    finally:
        seconds[phase] = time.monotonic() - began


def _store(rank: int, world: int, host: str, port: int, timeout: float) -> dist.Store:
    if world == 1:
        return dist.HashStore()
    # torch 2.13 would listen on every interface (not reported): give it a socket at `host` alone.
    server = listen_at(host, port).detach() if rank == 0 else None
    return dist.TCPStore(
        host,
        port,
        world,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=server,
    )


def _group(
    store: dist.Store, rank: int, world: int, device: torch.device, call_timeout: float
) -> dist.ProcessGroup:
    global _identity
    identity = None
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (rank, world):
        identity = _identity
    store.set(f"known/{rank}", identity or "none")
    agreed = {store.get(f"known/{other}").decode() for other in range(world)}
    if identity is None or agreed != {identity}:
        if dist.is_initialized():
            dist.destroy_process_group()
        if rank == 0:
            store.set("identity", uuid.uuid4().hex)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=call_timeout),
        )
        _identity = store.get("identity").decode()
    group = dist.group.WORLD
    assert group is not None
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # connects every pair
    return group
