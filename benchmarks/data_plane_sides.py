"""What `benchmarks.data_plane` compares: a batch, what each reader uses of it, and ways to bring it.

A side publishes the batch in the producer's process and gives each reader an address; `FETCH` has
what a reader does with one. Processes, clocks and tables are in `benchmarks.data_plane`, Ray's side
in `benchmarks.data_plane_ray`.
"""

from __future__ import annotations

import base64
import gzip
import http.client
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from storage.batches import reading
from storage.batches.refs import BatchRef
from storage.batches.writing import Jagged, write_batch
from storage.objects.store import Store
from storage.objects.usage import COUNTER

# Of each column its values and, where rows differ in length, the offsets [N + 1].
Columns = dict[str, tuple[NDArray[Any], NDArray[np.int64] | None]]

CONNECTIONS = 96  # of all readers to moto's server, whose queue of new ones holds 128

IDS = ("prompt_ids", "response_ids")
TRAIN = (*IDS, "rollout_logprobs", "response_mask")
ALL = (*TRAIN, "reward", "group_id")
PATTERNS = {
    "everything": "every reader needs all rows and columns",
    "ids": "every reader needs token ids of a contiguous share of rows, as rewards do",
    "update": "every reader needs ids, log-probs and mask of a contiguous share, as an update does",
    "scattered": "as update, but rows of the share lie anywhere, as balanced shares of ranks do",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one reader uses."""

    reader: int
    names: tuple[str, ...]
    rows: NDArray[np.int64]  # ascending


def shares(pattern: str, rows: int, readers: int) -> list[Share]:
    """What each reader uses: equal numbers of rows, give or take one; of more readers than rows
    several use the same row, as ranks of one tensor-parallel group do.
    """
    names = {"everything": ALL, "ids": IDS, "update": TRAIN, "scattered": TRAIN}[pattern]
    order = np.arange(rows)
    if pattern == "scattered":
        order = np.random.default_rng(1).permutation(rows)
    parts = 1 if pattern == "everything" else min(rows, readers)
    cuts = [np.sort(part) for part in np.array_split(order, parts)]
    return [Share(reader=n, names=names, rows=cuts[n % parts]) for n in range(readers)]


def make_batch(samples: int, tokens: int, number: int) -> Columns:
    """Samples of about so many tokens, an eighth of them the prompt's; no two numbers give the same.

    Ids are spread as words are (Zipf over 150,000), log-probs as a policy's: both as real data
    compress.
    """
    random = np.random.default_rng(number)
    prompts = random.integers(tokens // 16, tokens * 3 // 16 + 1, samples)
    responses = random.integers(tokens * 7 // 16, tokens * 21 // 16 + 1, samples)

    def ids(lengths: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        found = np.exp(random.random(int(lengths.sum()), np.float32) * np.log(150_000))
        return found.astype(np.int32), offsets_of(lengths)

    count, edges = int(responses.sum()), offsets_of(responses)
    mask = (random.random(count, np.float32) > 0.02).astype(np.uint8)
    return {
        "prompt_ids": ids(prompts),
        "response_ids": ids(responses),
        "rollout_logprobs": (-random.exponential(0.4, count).astype(np.float32), edges),
        "response_mask": (mask, edges),
        "reward": (random.random(samples, np.float32), None),
        "group_id": (np.arange(samples) // 8 + samples * number, None),
    }


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])


def select(batch: Columns, share: Share) -> Columns:
    """The rows and columns of a share; contiguous rows without a copy of the values."""
    found: Columns = {}
    rows = share.rows
    first, last = int(rows[0]), int(rows[-1]) + 1
    for name in share.names:
        values, offsets = batch[name]
        if offsets is None:
            found[name] = (values[rows], None)
        elif last - first == len(rows):
            cut = values[offsets[first] : offsets[last]]
            found[name] = (cut, offsets[first : last + 1] - offsets[first])
        else:
            cut = np.concatenate([values[offsets[row] : offsets[row + 1]] for row in rows])
            found[name] = (cut, offsets_of(np.diff(offsets)[rows]))
    return found


def value_bytes(columns: Columns) -> int:
    """Bytes of the values, without offsets: what a reader needs."""
    return sum(values.nbytes for values, _ in columns.values())


def digest_of(columns: Columns) -> int:
    """Of names, values and row lengths; reads every byte."""
    state = xxhash.xxh3_64()
    for name in sorted(columns):
        values, offsets = columns[name]
        state.update(name.encode())
        state.update(np.ascontiguousarray(values).view(np.uint8).data)
        if offsets is not None:
            state.update(np.diff(offsets).data)
    return state.intdigest()


class Side(Protocol):
    """One way to bring a batch to readers."""

    kind: str  # which of FETCH its readers use
    measured: str  # what its bytes moved are

    def prepare(self, batch: Columns, number: int) -> None:
        """Before the clock starts: the batch lies in the producer's memory."""

    def publish(self, shares: Sequence[Share]) -> list[Any]:
        """Make it readable; the address for each reader."""

    def counted(self) -> tuple[int, int]:
        """Of the batch published last: bytes stored or encoded by the producer, and bytes moved to
        readers that they could not count themselves."""

    def clear(self) -> None:
        """Forget the batch."""


class StoreSide:
    """Ours: write_batch, a ref to each reader, and what it names read by `fetch`."""

    kind = "store"

    def __init__(self, store: Store, objects: int, measured: str) -> None:
        self.store, self.objects, self.measured = store, objects, measured
        self._keys: list[str] = []

    def prepare(self, batch: Columns, number: int) -> None:
        size = len(batch["reward"][0])
        parts = np.array_split(np.arange(size), self.objects)
        cuts = [select(batch, Share(reader=0, names=ALL, rows=part)) for part in parts]
        self._parts = [
            {
                n: values if edges is None else Jagged(values, edges)
                for n, (values, edges) in c.items()
            }
            for c in cuts
        ]
        self._before = COUNTER.total()

    def publish(self, shares: Sequence[Share]) -> list[Any]:
        name = uuid.uuid4().hex
        refs = [
            write_batch(self.store, f"bench/{name}-{number}.safetensors", part)
            for number, part in enumerate(self._parts)
        ]
        whole = BatchRef.concat(refs)
        self._keys = sorted(whole.objects)
        limit = {"config_kwargs": {"max_pool_connections": max(1, CONNECTIONS // len(shares))}}
        store = Store(self.store.uri, self.store.options | limit)
        return [(store, pickle.dumps(_narrowed(whole, share))) for share in shares]

    def counted(self) -> tuple[int, int]:
        return (COUNTER.total() - self._before).bytes_written, 0

    def clear(self) -> None:
        self.store.delete(self._keys)


def _narrowed(ref: BatchRef, share: Share) -> BatchRef:
    first, last = int(share.rows[0]), int(share.rows[-1]) + 1
    picked = ref[list(share.names)]
    return picked.rows(first, last) if last - first == len(share.rows) else picked.take(share.rows)


def _from_store(address: tuple[Store, bytes], share: Share) -> tuple[Columns, int]:
    store, pickled = address
    reading._heads.clear()  # each batch is new to its readers, whatever side brought it before
    before = COUNTER.total()
    ref: BatchRef = pickle.loads(pickled)
    found = ref.fetch(store)
    columns: Columns = {}
    for name in share.names:
        tensor = found[name]
        if tensor.is_nested:
            columns[name] = (tensor.values().numpy(), tensor.offsets().numpy())
        else:
            columns[name] = (tensor.numpy(), None)
    return columns, (COUNTER.total() - before).bytes_read + len(pickled)


def encode_gzip(columns: Columns) -> bytes:
    """At gzip.compress's own level, which is what callers that name none get."""
    return gzip.compress(pickle.dumps(columns, pickle.HIGHEST_PROTOCOL))


def decode_gzip(body: bytes) -> Columns:
    found: Columns = pickle.loads(gzip.decompress(body))
    return found


def encode_json(columns: Columns) -> bytes:
    import orjson

    def text(array: NDArray[Any] | None) -> object:
        return array if array is None else [base64.b64encode(array.data).decode(), array.dtype.str]

    return orjson.dumps({n: [text(values), text(edges)] for n, (values, edges) in columns.items()})


def decode_json(body: bytes) -> Columns:
    import orjson

    def array(part: Any) -> Any:
        return part if part is None else np.frombuffer(base64.b64decode(part[0]), part[1]).copy()

    return {n: (array(values), array(edges)) for n, (values, edges) in orjson.loads(body).items()}


CODECS: dict[str, tuple[Callable[[Columns], bytes], Callable[[bytes], Columns]]] = {
    "gzip": (encode_gzip, decode_gzip),
    "json": (encode_json, decode_json),
}


class HttpSide:
    """A body for each reader's share, encoded when the batch is published, got over HTTP."""

    kind, measured = "http", "body bytes that readers got"

    def __init__(self, codec: str) -> None:
        self.codec = codec
        self._bodies: dict[int, bytes] = {}
        bodies = self._bodies

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = bodies[int(self.path[1:])]
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def prepare(self, batch: Columns, number: int) -> None:
        self._batch = batch

    def publish(self, shares: Sequence[Share]) -> list[Any]:
        encode = CODECS[self.codec][0]
        whole = encode(self._batch) if same_for_all(shares) else None
        for share in shares:
            self._bodies[share.reader] = whole or encode(select(self._batch, share))
        return [(self.server.server_port, self.codec) for _ in shares]

    def counted(self) -> tuple[int, int]:
        return sum({id(body): len(body) for body in self._bodies.values()}.values()), 0

    def clear(self) -> None:
        self._bodies.clear()


def same_for_all(shares: Sequence[Share]) -> bool:
    """Whether all want the same, so that it is encoded or put once."""
    return shares[0].names == ALL


def _from_http(address: tuple[int, str], share: Share) -> tuple[Columns, int]:
    port, codec = address
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", f"/{share.reader}")
    body = connection.getresponse().read()
    connection.close()
    return CODECS[codec][1](body), len(body)


class RpcSide:
    """The producer cuts a share when it is asked, and TensorPipe carries the tensors."""

    kind = "rpc"
    measured = "bytes of pickle and tensors, counted by the sender"
    batch: Columns = {}  # noqa: RUF012 - what calls from readers find in this process
    sent: list[int] = []  # noqa: RUF012

    def prepare(self, batch: Columns, number: int) -> None:
        RpcSide.batch, RpcSide.sent = batch, []

    def publish(self, shares: Sequence[Share]) -> list[Any]:
        return [None] * len(shares)

    def counted(self) -> tuple[int, int]:
        return 0, sum(RpcSide.sent)

    def clear(self) -> None:
        RpcSide.batch = {}


def rpc_share(share: Share) -> Any:
    """Called in the producer: the share as tensors."""
    import torch
    from torch.distributed.rpc.internal import _internal_rpc_pickler

    cut = {
        name: tuple(None if array is None else torch.from_numpy(array) for array in pair)
        for name, pair in select(RpcSide.batch, share).items()
    }
    text, tensors = _internal_rpc_pickler.serialize(cut)
    RpcSide.sent.append(len(text) + sum(tensor.nbytes for tensor in tensors))
    return cut


def _from_rpc(_: None, share: Share) -> tuple[Columns, int]:
    from torch.distributed import rpc

    found = rpc.rpc_sync("producer", rpc_share, args=(share,), timeout=300)
    columns: Columns = {}
    for name, (values, edges) in found.items():
        columns[name] = (values.numpy(), None if edges is None else edges.numpy())
    return columns, 0


FETCH: dict[str, Callable[[Any, Share], tuple[Columns, int]]] = {
    "store": _from_store,
    "http": _from_http,
    "rpc": _from_rpc,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One reading by one reader."""

    kind: str  # of the side
    address: Any
    share: Share
    at: float  # when to begin, by the machine's monotonic clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What became of it."""

    ended: float  # by the same clock
    digest: int  # of what was read
    moved: int  # bytes, where the reader can count them


def carry_out(job: Job) -> Done:
    """Read, and look at every byte: a mapped page costs nothing until then."""
    time.sleep(max(0.0, job.at - time.perf_counter()))
    columns, moved = FETCH[job.kind](job.address, job.share)
    digest = digest_of(columns)
    return Done(ended=time.perf_counter(), digest=digest, moved=moved)
