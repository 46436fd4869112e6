"""Prompt datasets: the source that the settings name, whether file, hub dataset or reasoning-gym.

The order in which rows are drawn is in cursor.py; how a row becomes tokens, in
engines/data/chat_template.py. Importing this module loads no data library: each is imported by the
source that needs it.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Sequence
from copy import copy
from difflib import get_close_matches
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from pydantic import TypeAdapter

from configs.coding import CodingSource
from configs.data import (
    DataConfig,
    DataSource,
    FileSource,
    FunctionSource,
    HubSource,
    ReasoningGymSource,
    Source,
    TasksSource,
)
from configs.environment import pip_install
from storage.objects.documents import Row, pack, plain
from storage.prompts.chosen import ChosenRows
from storage.prompts.cursor import Cursor
from storage.prompts.files import Shards, locate, open_file
from storage.prompts.functions import FunctionRows
from storage.prompts.source import (
    DIGEST_ROWS,
    PromptSource,
    empty_value,
    first_null,
    missing_column,
    plain_row,
    row_name,
)

if TYPE_CHECKING:
    from pyarrow import Table


ARROW = "arrow-sha256:"  # kind of the digests of hub datasets


def open_source(config: DataSource) -> PromptSource:
    """The source that the settings describe; ValueError, in one sentence, when there is none.

    A process opens an unchanged source once: later calls return the same object.
    """
    if isinstance(config, TasksSource):
        from storage.prompts.tasks import TaskRows

        return TaskRows({name: open_source(config.rows_of(name)) for name in config.tasks})
    if isinstance(config, FileSource):
        filesystem, paths = locate(config.path)
        stamp = ",".join(f"{path} {filesystem.ukey(path)}" for path in paths)
    else:
        stamp = ""
    return _open(config.model_dump_json(), stamp)


def first_place(data: DataConfig, source: PromptSource, fresh: Sequence[int] = ()) -> Cursor:
    """The place before the first row of a source. fresh: numbers of unseen rows, which come first."""
    if isinstance(data.source, TasksSource):
        from storage.prompts.tasks import TaskRows, begin

        assert isinstance(source, TaskRows), "opened by open_source"
        return begin(data, source, fresh)
    return Cursor.start(data, source, len(fresh))


@lru_cache(maxsize=64)
def _open(config_json: str, stamp: str) -> PromptSource:
    config: Source = TypeAdapter(Source).validate_json(config_json)
    if isinstance(config, ReasoningGymSource):
        return ReasoningGymRows(config)
    if isinstance(config, FunctionSource):
        return FunctionRows(config)
    if isinstance(config, CodingSource):
        from storage.prompts.coding.rows import CodingRows, is_of_folders

        of_folders = is_of_folders(config.path)
        return CodingRows(config, None if of_folders else _open_file(config))
    stored = HubRows(config) if isinstance(config, HubSource) else _open_file(config)
    return ChosenRows(stored, config) if config.where or config.choices else stored


def _open_file(config: FileSource | CodingSource) -> PromptSource:
    filesystem, paths = locate(config.path)
    if len(paths) == 1:
        return open_file(filesystem, paths[0], config.path)
    return Shards(
        config.path,
        [open_file(filesystem, path, filesystem.unstrip_protocol(path)) for path in paths],
    )


def arrow_digest(tables: Iterable[Table]) -> str:
    """sha256 over the bytes of Arrow tables, which are cut at the same rows each time.

    It depends on the columns' names, types and values, not on how the data are chunked in memory, nor
    on the version of the library: Arrow's format says how values lie in the body of a message.
    """
    import pyarrow

    hasher = hashlib.sha256()
    for number, table in enumerate(tables):
        if number == 0:
            named = [[field.name, str(field.type)] for field in table.schema]
            hasher.update(json.dumps(named).encode())
        # Taken one by one, values lie from the beginning of buffers of their own.
        taken = table.take(pyarrow.array(range(len(table)), pyarrow.int64()))
        for batch in taken.combine_chunks().to_batches():
            hasher.update(batch.num_rows.to_bytes(8, "little"))
            hasher.update(pyarrow.ipc.read_message(batch.serialize()).body)
    return f"{ARROW}{hasher.hexdigest()}"


class HubRows(PromptSource):
    """A dataset of the Hugging Face hub, memory-mapped by the datasets library."""

    def __init__(self, config: HubSource) -> None:
        try:
            from datasets import load_dataset
            from datasets.exceptions import DatasetNotFoundError
        except ImportError:
            raise ValueError(
                f"data.source is the hub dataset {config.name}, and the datasets library is not "
                f"installed. Install it: {pip_install('datasets')}, or give a file with "
                "data.source.kind = file."
            ) from None
        self.name = config.name
        try:
            self._data = load_dataset(config.name, config.subset, split=config.split)
            if config.columns is not None:
                self._data = self._data.select_columns(list(config.columns))
        except (DatasetNotFoundError, ValueError, OSError) as error:
            raise ValueError(
                f"data.source is the hub dataset {config.name} (subset {config.subset}, split "
                f"{config.split}), which cannot be loaded: {error}"
            ) from error
        self.columns = tuple(self._data.column_names)
        if not len(self):
            raise ValueError(f"The split {config.split} of {config.name} has no rows.")

    @cached_property
    def digest(self) -> str:  # type: ignore[override]
        """sha256 over the columns' bytes, DIGEST_ROWS rows in memory at once.

        The library's own fingerprint depends on the files' times.
        """
        return arrow_digest(self._data.with_format("arrow").iter(DIGEST_ROWS))

    def as_recorded(self, digest: str) -> PromptSource:
        """Runs of version 0.1 recorded a sha256 over each row as JSON."""
        return self if digest.startswith(ARROW) else self._by_json

    @cached_property
    def _by_json(self) -> PromptSource:
        """These rows with the digest of version 0.1, which serialises them all."""
        hasher = hashlib.sha256(json.dumps(self.columns).encode())
        for row in self._data:
            hasher.update(json.dumps(row, default=str, sort_keys=True).encode())
        old = copy(self)
        old.__dict__["digest"] = f"sha256:{hasher.hexdigest()}"
        return old

    def __len__(self) -> int:
        return self._data.num_rows

    def rows(self, indices: Sequence[int]) -> list[Row]:
        self._in_range(indices)
        columns = self._data[list(indices)]  # one by one they take some six times as long
        return [
            plain_row(dict(zip(columns, row, strict=True)), f"{row_name(index)} of {self.name}")
            for index, row in zip(indices, zip(*columns.values(), strict=True), strict=True)
        ]

    def check_columns(self, needed: Iterable[str]) -> None:
        filled = tuple(needed)
        for column in filled:
            if column not in self.columns:
                raise missing_column("Row 0", self.name, column, self.columns)
        for column in filled:
            row = first_null(self._data.with_format("arrow")[:], column)
            if row is not None:
                raise empty_value(row_name(row), self.name, column)


class ReasoningGymRows(PromptSource):
    """Problems of a reasoning-gym task: question, answer, and metadata as packed JSON text.

    The library is imported at the first row, not before: that takes seconds and 100 MB. So an unknown
    task shows then, or in engines/rewards.check_rewards, which looks in another process. A handful of
    tasks (word_ladder, ransom_note and others) depend on Python's hash seed, so that another
    process may make another problem of the same number; the row stored with a batch is the one
    that counts.
    """

    columns = ("question", "answer", "metadata")

    def __init__(self, config: ReasoningGymSource) -> None:
        self.name = f"reasoning_gym/{config.task}"
        self._config = config
        made_by = [config.model_dump_json(), version("reasoning-gym")]
        self.digest = f"sha256:{hashlib.sha256(json.dumps(made_by).encode()).hexdigest()}"

    @cached_property
    def problems(self) -> Any:
        """The task's dataset object, which makes problem i as `problems[i]` and scores answers."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of its dependency cellpylib 2.4
            import reasoning_gym
            from reasoning_gym.factory import DATASETS

        config = self._config
        if config.task not in DATASETS:
            raise ValueError(
                f"data.source.task is {config.task!r}, which reasoning-gym does not have"
                f"{_similar(config.task, DATASETS)}."
            )
        try:
            return reasoning_gym.create_dataset(
                config.task, seed=config.seed, size=config.size, **config.params
            )
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(
                f"data.source.params is {config.params}, which the reasoning-gym task "
                f"{config.task} refuses: {error}."
            ) from None

    def __len__(self) -> int:
        return self._config.size

    def rows(self, indices: Sequence[int]) -> list[Row]:
        self._in_range(indices)
        made = [self.problems[index] for index in indices]
        return [
            {
                "question": problem["question"],
                "answer": plain(problem["answer"]),
                "metadata": pack(problem["metadata"]),
            }
            for problem in made
        ]

    def _row_digests(self, rows: range) -> np.ndarray:
        """By what makes a problem, so that none has to be made: settings but for size, and number."""
        made_by = self._config.model_dump(exclude={"size"}) | {"library": version("reasoning-gym")}
        seed = xxhash.xxh3_64_intdigest(json.dumps(made_by, sort_keys=True).encode())
        digests = (xxhash.xxh3_64_intdigest(str(i).encode(), seed=seed) for i in rows)
        return np.fromiter(digests, np.uint64, len(rows))

    def check_columns(self, needed: Iterable[str]) -> None:
        for column in needed:
            if column not in self.columns:
                raise missing_column("Row 0", self.name, column, self.columns)


def _similar(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=3)
    return f"; close to it are {', '.join(close)}" if close else ""
