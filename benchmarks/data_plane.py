"""One batch from the process that made it to 1 to 64 readers: our store beside what others use.

    python -m benchmarks.data_plane [--shapes 1024x1024,32x32768] [--readers 1,4,16,64]
        [--patterns everything,ids,update,scattered] [--sides ...] [--repeats 5] [--objects 1]
        [--json FILE]

This process is the producer; each reader is a process of its own. A shape is samples x tokens of a
sample. What readers use of the batch is a pattern (see `--help`); needed are the values' own bytes
of the rows and columns that each uses, summed over readers. Seconds are from before the batch is
published to the last reader's having read every byte (a digest, compared with the producer's; all
sides alike); published and read are shown apart as well. Sides take turns within each repeat, in an
order that rotates; shown are medians. Bytes are counted, never computed: what is counted is said for
each side. HTTP headers count for nobody, and refs to our batches do.

file, s3    write_batch, a ref to each reader, fetch. Files are mapped: their bytes are those that a
            reader looked at, head and ref included. s3 is moto's server, in Python, with few
            connections a reader: its bytes are S3's, its seconds are not. Both end in a TensorDict,
            the other sides in arrays.
gzip        pickle + gzip over HTTP, as AReaL's first RPC had it: a body for each reader.
json        base64 in JSON over HTTP, as AReaL's RTensor has it: a body for each reader.
rpc         torch.distributed.rpc, TensorPipe over TCP: the producer cuts what a reader asks for.
ray-near    one ray.put, on the node of the readers, who map it and take their share.
ray         one ray.put on another node (of this machine), from where it is pulled as a whole, once
            for all readers of their node: more nodes of readers would pull as often.
ray-cut     the same with a ray.put for each reader, of just what it uses.

gzip, json, rpc and ray-cut are given what is kind to them: the producer knows what each reader will
use. Only ours and ray let a reader decide later. Only ours keeps the batch when the producer dies,
syncs it to disk, and checks what is read.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from benchmarks import data_plane_ray
from benchmarks.data_plane_sides import (
    PATTERNS,
    Columns,
    Done,
    HttpSide,
    Job,
    RpcSide,
    Share,
    Side,
    StoreSide,
    carry_out,
    digest_of,
    make_batch,
    select,
    shares,
    value_bytes,
)
from benchmarks.stores import place
from engines.workers.placement import find_free_port
from storage.objects.store import Store

SIDES = ("file", "s3", "gzip", "json", "rpc", "ray-near", "ray", "ray-cut")


class Readers(Protocol):
    """Readers, each a process; the first so many carry out jobs."""

    def read(self, jobs: Sequence[Job]) -> list[Done]: ...


def serve(connection: Connection, rpc_at: str | None, rank: int, world: int) -> None:
    """A reader's process: carries out jobs until its pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    quiet()
    if rpc_at:
        join_rpc(rpc_at, f"reader-{rank}", rank, world)
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send("ready")
        while True:
            connection.send(carry_out(connection.recv()))
    os._exit(0)  # RPC threads wait for answers that nobody will give


def quiet() -> None:
    """No warnings of torch about its own parts between the lines of the table."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def join_rpc(address: str, name: str, rank: int, world: int) -> None:
    from torch.distributed import rpc

    # TCP, as between machines; its shared memory refuses some of 64 that connect at once.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=address, rpc_timeout=300, _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)


def rpc_available() -> bool:
    from torch.distributed import rpc

    return rpc.is_available()


class Processes:
    """Readers that this benchmark starts: forked from a server that has imported torch, so that 64
    fit a small machine."""

    def __init__(self, count: int, with_rpc: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "tensordict", "benchmarks.store_scale", "benchmarks.data_plane_ray"]
        )
        address = f"tcp://127.0.0.1:{find_free_port('127.0.0.1')}" if with_rpc else None
        self.processes, self.pipes = [], []
        self.with_rpc = with_rpc
        try:
            for rank in range(1, count + 1):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=serve, args=(theirs, address, rank, count + 1), daemon=True
                )
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)
            if address:
                join_rpc(address, "producer", 0, count + 1)
            self.answers(count)
        except BaseException:
            self.close()
            raise

    def answers(self, count: int) -> list[Any]:
        found = []
        for number, pipe in enumerate(self.pipes[:count]):
            if not pipe.poll(600):
                raise RuntimeError(f"Reader {number} has not answered for 600 s.")
            found.append(pipe.recv())
        return found

    def read(self, jobs: Sequence[Job]) -> list[Done]:
        for pipe, job in zip(self.pipes, jobs, strict=False):
            pipe.send(job)
        return self.answers(len(jobs))

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        if self.with_rpc:
            from torch.distributed import rpc

            with contextlib.suppress(RuntimeError):  # it never began
                rpc.shutdown(graceful=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What one batch took to come to its readers."""

    publish: float  # seconds
    read: float  # seconds, of the slowest reader from the common start
    stored: int  # bytes written, put or encoded by the producer
    moved: int  # bytes to readers, counted as the side's `measured` says

    @property
    def total(self) -> float:
        return self.publish + self.read


def carry(side: Side, readers: Readers, batch: Columns, number: int, wanted: list[Share]) -> Taken:
    """Publish and read once. Raises RuntimeError where a reader got something else."""
    expected = [digest_of(select(batch, share)) for share in wanted]
    side.prepare(batch, number)
    try:
        start = time.perf_counter()
        addresses = side.publish(wanted)
        published = time.perf_counter() - start
        at = time.perf_counter() + 0.2 + 0.005 * len(wanted)  # when all have their job
        done = readers.read(
            [
                Job(kind=side.kind, address=address, share=share, at=at)
                for address, share in zip(addresses, wanted, strict=True)
            ]
        )
        if [one.digest for one in done] != expected:
            raise RuntimeError(f"A reader by {side.kind} got other values than were written.")
        stored, moved = side.counted()
        return Taken(
            publish=published,
            read=max(one.ended for one in done) - at,
            stored=stored,
            moved=moved + sum(one.moved for one in done),
        )
    finally:
        side.clear()


def measure(
    sides: dict[str, Side],
    readers: dict[str, Readers],
    shape: tuple[int, int],
    wanted: list[Share],
    repeats: int,
) -> tuple[float, dict[str, list[Taken]]]:
    """Median bytes needed, and what each side took in each repeat; a round before warms up."""
    taken: dict[str, list[Taken]] = {name: [] for name in sides}
    needed = []
    names = list(sides)
    for repeat in range(repeats + 1):
        number = time.time_ns() % 2**40
        batch = make_batch(*shape, number)
        needed.append(sum(value_bytes(select(batch, share)) for share in wanted))
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            group = readers["ray" if name.startswith("ray") else "processes"]
            taken[name].append(carry(sides[name], group, batch, number, wanted))
    return statistics.median(needed[1:]), {name: found[1:] for name, found in taken.items()}


def report(needed: float, taken: dict[str, list[Taken]]) -> None:
    """A line a side; ratios are its seconds over those of ours."""
    middle = {name: median(found) for name, found in taken.items()}
    ours = [name for name in ("file", "s3") if name in middle]
    ratios = "".join(f"{'/ ' + name:>8}" for name in ours)
    print(f"{'':10}{'publish s':>10}{'read s':>9}{'total s':>9}{ratios}{'stored MB':>11}"
          f"{'moved MB':>10}{'/ needed':>10}")  # fmt: skip
    for name, one in middle.items():
        against = "".join(f"{one.total / middle[other].total:8.2f}" for other in ours)
        print(
            f"{name:10}{one.publish:10.3f}{one.read:9.3f}{one.total:9.3f}{against}"
            f"{one.stored / 1e6:11.2f}{one.moved / 1e6:10.2f}{one.moved / needed:10.3f}",
            flush=True,
        )


def median(found: list[Taken]) -> Taken:
    """Of each field; total is then that of the medians."""
    return Taken(
        publish=statistics.median(one.publish for one in found),
        read=statistics.median(one.read for one in found),
        stored=int(statistics.median(one.stored for one in found)),
        moved=int(statistics.median(one.moved for one in found)),
    )


@contextlib.contextmanager
def opened(options: argparse.Namespace) -> Iterator[dict[str, Store]]:
    """What sides need for the whole run: stores, and Ray's nodes; gone at the end."""
    largest = max(samples * tokens for samples, tokens in options.shapes) * 12
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="data-plane-")))
        stores = {}
        if "file" in options.sides:
            stores["file"] = Store(f"file://{folder}/store")
        if "s3" in options.sides:
            stores["s3"] = Store(*stack.enter_context(place(s3=True)))
        if any(name.startswith("ray") for name in options.sides):
            stack.enter_context(data_plane_ray.cluster(folder, max(8 * largest, 200 * 2**20)))
        yield stores


def sides_of(
    options: argparse.Namespace, stores: dict[str, Store], shape: tuple[int, int]
) -> dict[str, Side]:
    """The sides that were asked for, in their order."""
    http = {codec: HttpSide(codec) for codec in ("gzip", "json") if codec in options.sides}
    made: dict[str, Side] = {}
    for name in options.sides:
        if name in stores:
            told = "bytes mapped" if name == "file" else "body bytes of S3's answers"
            made[name] = StoreSide(stores[name], options.objects, f"{told}, and the refs")
        elif name in http:
            made[name] = http[name]
        elif name == "rpc":
            made[name] = RpcSide()
        else:
            near, cut = name == "ray-near", name == "ray-cut"
            made[name] = data_plane_ray.RaySide(shape, near=near, cut=cut)
    return made


@contextlib.contextmanager
def started(count: int, sides: Sequence[str]) -> Iterator[dict[str, Readers]]:
    """The readers' processes, once for the run: of fewer readers the first ones read."""
    with contextlib.ExitStack() as stack:
        readers: dict[str, Readers] = {}
        if any(not name.startswith("ray") for name in sides):
            own = Processes(count, with_rpc="rpc" in sides)
            stack.callback(own.close)
            readers["processes"] = own
        if any(name.startswith("ray") for name in sides):
            actors = data_plane_ray.RayReaders(count)
            stack.callback(actors.close)
            readers["ray"] = actors
        yield readers


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="patterns: " + "; ".join(f"{name}: {what}" for name, what in PATTERNS.items()),
    )

    def names(of: Sequence[str]) -> Any:
        return lambda text: [of[of.index(name)] for name in text.split(",")]

    def sizes(text: str) -> list[tuple[int, int]]:
        pairs = [shape.split("x") for shape in text.split(",")]
        return [(int(samples), int(tokens)) for samples, tokens in pairs]

    parser.add_argument(
        "--shapes", type=sizes, default="1024x1024,32x32768", help="samples x tokens"
    )
    parser.add_argument(
        "--readers", type=lambda text: [int(n) for n in text.split(",")], default="1,4,16,64"
    )
    parser.add_argument("--patterns", type=names(tuple(PATTERNS)), default=",".join(PATTERNS))
    parser.add_argument("--sides", type=names(SIDES), default=",".join(SIDES))
    parser.add_argument("--repeats", type=int, default=5, help="that are measured")
    parser.add_argument("--objects", type=int, default=1, help="that ours stores the batch in")
    parser.add_argument("--json", type=Path, help="every repeat's figures go here")
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: exit(143))  # so that what was started is ended
    options = parse()
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if not data_plane_ray.installed():
        print(data_plane_ray.HOW_TO_GET)
        options.sides = [name for name in options.sides if not name.startswith("ray")]
    if "rpc" in options.sides and not rpc_available():
        print("This build of torch has no RPC, so its side is left out.")
        options.sides.remove("rpc")
    records = []
    print(f"load {os.getloadavg()}, {os.cpu_count()} cores")
    with opened(options) as stores:
        sides = {shape: sides_of(options, stores, shape) for shape in options.shapes}
        for name, side in sides[options.shapes[0]].items():
            print(f"moved by {name}: {side.measured}")
        most = max(options.readers)
        with started(most, options.sides) as readers:
            every = itertools.product(options.readers, options.shapes, options.patterns)
            for count, shape, pattern in every:
                wanted = shares(pattern, shape[0], count)
                needed, taken = measure(sides[shape], readers, shape, wanted, options.repeats)
                print(f"\n{count} readers, {shape[0]} samples of {shape[1]} tokens, {pattern}: "
                      f"{needed / 1e6:.2f} MB needed")  # fmt: skip
                report(needed, taken)
                records += [
                    {"readers": count, "samples": shape[0], "tokens": shape[1], "side": name,
                     "pattern": pattern, "needed": needed, "repeats": list(map(asdict, found))}
                    for name, found in taken.items()
                ]  # fmt: skip
    print(f"load {os.getloadavg()}")
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    # By its own name: what readers' processes unpickle says where it is from.
    from benchmarks import data_plane

    data_plane.main()
