"""Ray's side of `benchmarks.data_plane`: two nodes on this machine, each with its own object store.

The nodes have loopback addresses of their own, so that an object that is put on one and read on the
other is pulled over a socket, as between machines; what arrives there is counted by its store. Not
among Refrain's dependencies.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.data_plane_sides import (
    FETCH,
    Columns,
    Done,
    Job,
    Share,
    carry_out,
    make_batch,
    same_for_all,
    select,
)

HOW_TO_GET = "Ray is not installed, so its side is left out; get it by: pip install ray"
PRODUCING, READING = "127.0.0.2", "127.0.0.3"  # 127.0.0.1 is replaced by the machine's address


def installed() -> bool:
    return importlib.util.find_spec("ray") is not None


@contextlib.contextmanager
def cluster(folder: Path, store_bytes: int) -> Iterator[None]:
    """Two nodes, this process connected to the producing one; all their processes end with it."""
    repository = str(Path(__file__).parent.parent)
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [repository, os.environ.get("PYTHONPATH")])),
    }
    (folder / "ray").mkdir()
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    settings = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": store_bytes}
    try:
        for address in (PRODUCING, READING):
            nodes.add_node(node_ip_address=address, **settings)
        ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
        assert ray.util.get_node_ip_address() == PRODUCING
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


def created_bytes(address: str) -> int:
    """Bytes of all objects that were made in, or pulled to, a node's store."""
    import ray
    from ray._private.internal_api import node_stats

    node = next(node for node in ray.nodes() if node["NodeManagerAddress"] == address)
    stats = node_stats(address, node["NodeManagerPort"], include_memory_info=False)
    return int(stats.store_stats.cumulative_created_bytes)


def _put(batch: Columns, shares: Sequence[Share], cut: bool) -> list[Any]:
    """Refs, each in a list that Ray hands on as it is."""
    import ray

    if not cut or same_for_all(shares):
        ref = ray.put(batch)
        return [[ref] for _ in shares]
    return [[ray.put(select(batch, share))] for share in shares]


def _from_ray(address: tuple[list[Any], bool], share: Share) -> tuple[Columns, int]:
    import ray

    refs, cut = address
    found: Columns = ray.get(refs[0])
    return (found if cut else select(found, share)), 0


FETCH["ray"] = _from_ray


class Producer:
    """An actor on the reading node, for objects that readers map where they were put."""

    def prepare(self, shape: tuple[int, int], number: int) -> None:
        self.batch = make_batch(*shape, number)

    def put(self, shares: Sequence[Share]) -> list[Any]:
        return _put(self.batch, shares, cut=False)


class Reader:
    """An actor that reads as the benchmark's own processes do."""

    def read(self, job: Job) -> Done:
        return carry_out(job)


def on_reading_node(cls: type) -> Any:
    """A new actor of the class, on the reading node."""
    import ray

    return ray.remote(num_cpus=0, resources={f"node:{READING}": 0.001})(cls).remote()


class RayReaders:
    """Actors, all on the reading node."""

    def __init__(self, count: int) -> None:
        self.actors = [on_reading_node(Reader) for _ in range(count)]

    def read(self, jobs: Sequence[Job]) -> list[Done]:
        import ray

        calls = [actor.read.remote(job) for actor, job in zip(self.actors, jobs, strict=False)]
        found: list[Done] = ray.get(calls, timeout=600)
        return found

    def close(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)


class RaySide:
    """ray.put and ray.get.

    near: the batch is put on the readers' node; else on the other. cut: an object for each reader,
    of just what it uses, by a producer that knows its readers; else one object, which Ray moves as
    a whole, and of which the readers take their share.
    """

    kind = "ray"

    def __init__(self, shape: tuple[int, int], near: bool, cut: bool) -> None:
        self.shape, self.near, self.cut = shape, near, cut
        self._producer = on_reading_node(Producer) if near else None
        self._node = READING if near else PRODUCING
        self.measured = (
            "bytes put in the store that the readers map"
            if near
            else "bytes that arrived in the reading node's store, once for all readers of the node"
        )

    def prepare(self, batch: Columns, number: int) -> None:
        import ray

        self._batch = batch
        if self._producer is not None:
            ray.get(self._producer.prepare.remote(self.shape, number))
        self._before = created_bytes(self._node), created_bytes(READING)

    def publish(self, shares: Sequence[Share]) -> list[Any]:
        import ray

        if self._producer is None:
            refs = _put(self._batch, shares, self.cut)
        else:
            refs = ray.get(self._producer.put.remote(shares))
        return [(ref, self.cut) for ref in refs]

    def counted(self) -> tuple[int, int]:
        stored, moved = self._before
        return created_bytes(self._node) - stored, created_bytes(READING) - moved

    def clear(self) -> None:
        """Objects go when the last ref to them does."""
