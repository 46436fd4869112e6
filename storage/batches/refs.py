"""BatchRef: a handle to rows and columns of stored objects, of a few kilobytes whatever they hold.

Operations here touch metadata only. Reading is in `storage.batches.reading`, writing in
`storage.batches.writing`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray
from pydantic_core import CoreSchema, core_schema

from storage.batches import reading, ref_columns
from storage.batches.columns import GROUP_SIZE, Kind
from storage.batches.format import DTYPES
from storage.batches.ref_columns import ColumnRef, Source
from storage.batches.rows import MOST, PACKED, RowIndex
from storage.objects.backends import clean_key

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tensordict import TensorDict

    from storage.objects.store import Store

FORMAT = "refrain.batch/1"
KINDS = ("dense", "jagged", "str", "json")


@dataclass(frozen=True, slots=True, repr=False)
class BatchRef:
    """Rows and columns kept in a store. Frozen; JSON and pickle hold metadata only.

    Operations return new refs and read nothing; `fetch` and its kin read from the store.

    Example: three samples of two prompts; the samples of the first, as arrays
        ref = write_batch(store, "run/samples.safetensors", {
            "response_ids": [[7, 8], [9], [4, 5, 6]],  # jagged, 6 tokens
            "reward": np.array([1.0, 0.0, 1.0], np.float32),  # dense, [3]
            "group_id": np.array([0, 0, 1]),
        })
        repr(ref)  # BatchRef(3 rows: response_ids, reward, group_id)
        first = ref[["response_ids", "reward"]].rows(0, 2)
        first.fetch_numpy(store, "reward")  # ([1.0, 0.0], None)
        first.fetch_numpy(store, "response_ids")  # ([7, 8, 9], offsets [0, 2, 3])
    """

    count: int  # rows, N
    columns: Mapping[str, ColumnRef]  # by name; all of N rows

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"BatchRef({self.count} rows: {', '.join(self.names)})"

    def __reduce__(self) -> tuple[object, ...]:
        return BatchRef.from_json, (self.to_json(),)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)

    @property
    def objects(self) -> frozenset[str]:
        """Keys of the objects that hold the ref's rows: what must be kept for it."""
        return frozenset(s.key for column in self.columns.values() for s in column.sources)

    def column(self, name: str) -> ColumnRef:
        """Raises ValueError naming the columns that there are."""
        if name not in self.columns:
            raise ValueError(f"The batch has no column {name!r}; it has {', '.join(self.names)}.")
        return self.columns[name]

    def __getitem__(self, names: Sequence[str]) -> BatchRef:
        """The columns `names` only."""
        if isinstance(names, str):
            raise ValueError(f"Select columns with a list: ref[[{names!r}]].")
        return BatchRef(self.count, {name: self.column(name) for name in names})

    def drop(self, names: Sequence[str]) -> BatchRef:
        """All columns but `names`."""
        for name in names:
            self.column(name)
        return self[[name for name in self.names if name not in names]]

    def rows(self, start: int, stop: int) -> BatchRef:
        """Rows start to stop (not included), as slices count them."""
        start, stop, _ = slice(start, stop).indices(self.count)
        stop = max(start, stop)
        return self._pick(lambda index: index.slice(start, stop), stop - start)

    def take(self, index: Sequence[int] | NDArray[np.integer]) -> BatchRef:
        """The rows numbered by `index`, in its order; a row may come twice. [M] numbers in
        [0, N). Runs of rows cost nothing; a random order costs about 2 bytes per row in the ref.
        """
        picked = np.asarray(index)
        if picked.dtype == np.bool_:
            raise ValueError("take() wants row numbers; turn a mask into them by np.flatnonzero.")
        if picked.ndim != 1 or (picked.size and not np.issubdtype(picked.dtype, np.integer)):
            raise ValueError(f"take() wants a list of row numbers, not {picked.dtype} numbers.")
        picked = picked.astype(np.int64)
        if picked.size and not (picked.min() >= 0 and picked.max() < self.count):
            worst = picked.min() if picked.min() < 0 else picked.max()
            raise ValueError(f"Row {worst} is outside the batch's {self.count} rows.")
        return self._pick(lambda index: index.take(picked), len(picked))

    def _pick(self, pick: reading.Pick, rows: int) -> BatchRef:
        """Apply `pick` to each distinct row index once; columns that shared one still do."""
        done: dict[tuple[int, int], tuple[RowIndex, list[int]]] = {}
        columns = {}
        for name, column in self.columns.items():
            view = (id(column.sources), id(column.index))
            if column.sizes is not None:
                column = column.picked(pick(RowIndex(range(self.count))))
                index, used = ref_columns.prune(column.sources, column.index)
            elif view in done:
                index, used = done[view]
            else:
                index, used = done[view] = ref_columns.prune(column.sources, pick(column.index))
            sources = tuple(column.sources[number] for number in used)
            columns[name] = replace(column, sources=sources, index=index)
        return BatchRef(rows, ref_columns.shared(columns))

    def with_columns(self, other: BatchRef) -> BatchRef:
        """This batch and the columns of `other`, row by row; a column of both is other's."""
        if self.count != other.count:
            raise ValueError(
                f"Columns {', '.join(other.names)} have {other.count} rows, the batch {self.count}."
            )
        return BatchRef(self.count, ref_columns.shared({**self.columns, **other.columns}))

    @staticmethod
    def concat(refs: Sequence[BatchRef]) -> BatchRef:
        """The rows of each in turn. All must have the same columns, of the same kinds.

        Token ids that an older Refrain stored as I64 are joined with newer ones as I32.
        """
        if not refs:
            raise ValueError("concat() needs at least one batch.")
        first = refs[0]
        for number, ref in enumerate(refs):
            if set(ref.names) != set(first.names):
                odd = ", ".join(sorted(set(ref.names) ^ set(first.names)))
                raise ValueError(f"Batch {number} and batch 0 do not both have column {odd}.")
        done: dict[tuple[tuple[int, int], ...], tuple[tuple[Source, ...], RowIndex]] = {}
        columns = {}
        for name in first.names:
            parts = [ref.columns[name] for ref in refs]
            dtype = ref_columns.joined_dtype(name, parts)
            view = tuple((id(part.sources), id(part.index)) for part in parts)
            if view not in done:
                done[view] = ref_columns.concat(parts)
            sources, index = done[view]
            sizes = [part.sizes for part in parts if part.sizes is not None]
            columns[name] = ColumnRef(
                kind=parts[0].kind,
                dtype=dtype,
                shape=parts[0].shape,
                sources=sources,
                index=index,
                sizes=RowIndex.concat(sizes) if sizes else None,
            )
        return BatchRef(sum(ref.count for ref in refs), ref_columns.shared(columns))

    def grouped(self, rows: Sequence[Sequence[int]]) -> BatchRef:
        """A batch whose row i is made of the rows `rows[i]` of this one, each of them by reference.

        Its columns must be dense, and are jagged there: [3, 2] of rows with a frame each are two
        rows with 3 and 2 frames. A row may come several times.
        """
        for name, column in self.columns.items():
            if column.kind != "dense":
                raise ValueError(
                    f"Column {name!r} is {column.kind}; rows of dense ones are grouped."
                )
        flat = self.take([row for one in rows for row in one])
        sizes = RowIndex([len(one) for one in rows])
        columns = {
            name: replace(column, kind="jagged", sizes=sizes)
            for name, column in flat.columns.items()
        }
        return BatchRef(len(rows), columns)

    def chunk(self, n: int) -> list[BatchRef]:
        """`n` contiguous batches of equal numbers of rows; the first ones have one more.

        To balance tokens instead: engines/train/batching/packing.py.
        """
        if n < 1:
            raise ValueError(f"chunk() makes at least 1 batch, not {n}.")
        return [self.part(k, n) for k in range(n)]

    def part(self, k: int, n: int) -> BatchRef:
        """`chunk(n)[k]`, without making the others."""
        size, longer = divmod(self.count, n)
        first = k * size + min(k, longer)
        return self.rows(first, first + size + (k < longer))

    def lengths(self, store: Store, name: str) -> NDArray[np.int64]:
        """[N]: elements of each row of a jagged column. Reads row indices, no values."""
        return reading.lengths(store, name, self.column(name))

    def fetch(self, store: Store, names: Sequence[str] | None = None) -> TensorDict:
        """The columns `names` (default: all) as a TensorDict of batch size [N].

        Dense columns are tensors, jagged ones nested tensors of layout `torch.jagged` (equal
        lengths share their offsets, so arithmetic between them works), str and json ones
        NonTensorStack. Tensors of local files map the file's pages privately. Every row read is
        checked. Raises ObjectMissing, ObjectDamaged.
        """
        from storage.batches.tensors import to_tensordict

        picked = self if names is None else self[names]
        return to_tensordict(self.count, reading.read_columns(store, picked.columns))

    def fetch_numpy(
        self, store: Store, name: str
    ) -> tuple[NDArray[np.generic], NDArray[np.int64] | None]:
        """One column without torch: (values, offsets [N + 1]), offsets None for a dense one.

        BF16 comes as float32. For str and json columns see `fetch_list`.
        """
        return reading.read_columns(store, {name: self.column(name)})[name].numpy()

    def fetch_list(self, store: Store, name: str) -> list[object]:
        """One column without torch, a Python value per row: str, JSON, or an array."""
        return reading.read_columns(store, {name: self.column(name)})[name].rows()

    def own_groups(self, store: Store) -> NDArray[np.int64]:
        """[N]: numbers that are equal for samples with one baseline: of one prompt and player."""
        groups = self.fetch_numpy(store, "group_id")[0].astype(np.int64)
        if "player" not in self.columns:
            return groups
        players = self.fetch_numpy(store, "player")[0].astype(np.int64)
        return groups * (int(players.max(initial=0)) + 1) + players

    def group_sizes(self, store: Store, n: int) -> list[int]:
        """[N] completions of each prompt where n are asked: fewer where its column says so."""
        if GROUP_SIZE not in self.columns:
            return [n] * self.count
        own = self.fetch_numpy(store, GROUP_SIZE)[0]
        return [int(size) for size in np.minimum(own, n)]

    def prompts_in(self, store: Store, prompts: BatchRef) -> NDArray[np.int64]:
        """[N]: the row of `prompts`, one for each group, that is the prompt of each sample."""
        own, known = (ref.fetch_numpy(store, "group_id")[0] for ref in (self, prompts))
        order = np.argsort(known, kind="stable")
        return order[np.searchsorted(known, own, sorter=order)]

    def of_policy(self, store: Store) -> BatchRef:
        """Without the samples of opponents: a frozen version's never train, and count nowhere."""
        if "frozen" not in self.columns:
            return self
        frozen = self.fetch_numpy(store, "frozen")[0].astype(bool)
        return self.take(np.flatnonzero(~frozen))

    def prefetch(self, store: Store, names: Sequence[str] | None = None) -> Future[None]:
        """Start reading in the background, into the store's cache (see `Store.with_cache`), or
        for local files into the system's. Errors are for the later `fetch` to raise.
        """
        picked = self if names is None else self[names]
        return reading.prefetch(store, picked.columns)

    def verify(self, store: Store) -> None:
        """Read every row of every column and check it. Raises ObjectMissing, ObjectDamaged."""
        sources = {source for column in self.columns.values() for source in column.sources}
        reading.heads(store, sources, anew=True)
        for name, column in self.columns.items():
            reading.read_columns(store, {name: column})

    def to_json(self) -> dict[str, object]:
        """A plain dict for JSON; `from_json` is its inverse."""
        sources: dict[Source, int] = {}
        views: list[tuple[tuple[Source, ...], RowIndex]] = []
        numbers: dict[tuple[int, int], int] = {}
        columns: dict[str, object] = {}
        for name, column in self.columns.items():
            at = (id(column.sources), id(column.index))
            if at not in numbers:
                view = (column.sources, column.index)
                if view not in views:
                    views.append(view)
                numbers[at] = views.index(view)
            columns[name] = [column.kind, column.dtype, list(column.shape), numbers[at]]
            if column.sizes is not None:
                columns[name] = [*columns[name], column.sizes.to_json()]  # type: ignore[misc]
        encoded = [
            [[sources.setdefault(source, len(sources)) for source in origin], index.to_json()]
            for origin, index in views
        ]
        return {
            "format": FORMAT,
            "rows": self.count,
            "sources": [[s.key, s.rows, s.head, s.digest] for s in sources],
            "views": encoded,
            "columns": columns,
        }

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> CoreSchema:
        """As a field of a pydantic model: `to_json` out; a ref or its JSON in."""
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, BatchRef) else BatchRef.from_json(value),
            serialization=core_schema.plain_serializer_function_ser_schema(
                BatchRef.to_json, when_used="always"
            ),
        )

    @staticmethod
    def from_json(value: object, most: int = MOST) -> BatchRef:
        """The ref that `to_json` described. Raises ValueError saying what is wrong with it.

        most: rows of a view, and (2^24 at most) of all views that are no spans. Nothing is made of
        a number before it is compared with that, so that a short text takes no large memory.
        """
        try:
            return _parse(value, most)
        except (
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
            AttributeError,
            MemoryError,
        ) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            shown = json.dumps(value, default=str)[:80]
            raise ValueError(f"Malformed batch reference: {reason} (in {shown}).") from error


def _parse(value: object, most: int) -> BatchRef:
    if not isinstance(value, dict) or value["format"] != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    rows = int(value["rows"])
    if not 0 <= rows <= most:
        raise ValueError(f"it has {rows} rows of at most {most}")
    sources = []
    for key, count, head, digest in value["sources"]:
        if not isinstance(key, str) or not isinstance(digest, str):
            raise ValueError(f"source {key!r:.80} is malformed")
        clean_key(key)
        source = Source(key=key, rows=int(count), head=int(head), digest=digest)
        if source.rows < 0 or source.head < 0:
            raise ValueError(f"source {key!r} has {count} rows and a head of {head} bytes")
        sources.append(source)
    left = min(most, PACKED)
    views = []
    for numbers, encoded in value["views"]:
        index, left = _index(encoded, most, left)
        origin = tuple(sources[number] for number in numbers)
        held = sum(source.rows for source in origin)
        if len(index):
            least, greatest = index.bounds
            if not (least >= 0 and greatest < held):
                raise ValueError(f"a view of {len(index)} rows does not fit {rows} of {held}")
        views.append((origin, index))
    columns = {}
    for name, (kind, dtype, shape, number, *rest) in value["columns"].items():
        origin, index = views[number]
        sizes = None
        wanted = rows
        if rest:
            (runs,) = rest
            sizes, left = _index(runs, most, left)
            wanted = _elements(name, sizes, len(index))
        if len(index) != wanted or (sizes is not None and len(sizes) != rows):
            raise ValueError(f"a view of {len(index)} rows does not fit {rows} of column {name!r}")
        if kind not in KINDS or dtype not in DTYPES:
            raise ValueError(f"column {name!r} is malformed")
        columns[name] = ColumnRef(
            kind=cast("Kind", kind),
            dtype=dtype,
            shape=tuple(int(size) for size in shape),
            sources=origin,
            index=index,
            sizes=sizes,
        )
    return BatchRef(rows, columns)


def _index(encoded: object, most: int, left: int) -> tuple[RowIndex, int]:
    """An index, and how many numbers of others may still be written out."""
    span = isinstance(encoded, list) and len(encoded) == 2
    index = RowIndex.from_json(encoded, most if span else left)
    return index, left if span else left - len(index)


def _elements(name: str, sizes: RowIndex, most: int) -> int:
    """How many elements rows of these sizes have."""
    if not len(sizes):
        return 0
    least, greatest = sizes.bounds
    if least < 0 or greatest > most:
        raise ValueError(f"column {name!r} has rows of {least} to {greatest} of {most} elements")
    return sizes.total
