"""Rows of prompts by number, from whatever source the settings name.

The order in which rows are drawn is in cursor.py; how a row becomes tokens, in
engines/data/chat_template.py.
Importing this module loads no data library: each is imported by the source that needs it.
"""

from __future__ import annotations

from functools import lru_cache

from pydantic import TypeAdapter

from configs.data import FileSource, HubSource, ReasoningGymSource, Source
from storage.prompts.datasets import HubRows, ReasoningGymRows
from storage.prompts.files import JsonLines, ParquetRows, locate
from storage.prompts.source import PromptSource


def open_source(config: Source) -> PromptSource:
    """The source that the settings describe; ValueError, in one sentence, when there is none.

    A process opens an unchanged source once: later calls return the same object.
    """
    if isinstance(config, FileSource):
        filesystem, path = locate(config.path)
        stamp = filesystem.ukey(path)
    else:
        stamp = ""
    return _open(config.model_dump_json(), stamp)


@lru_cache(maxsize=8)
def _open(config_json: str, stamp: str) -> PromptSource:
    config: Source = TypeAdapter(Source).validate_json(config_json)
    if isinstance(config, ReasoningGymSource):
        return ReasoningGymRows(config)
    if isinstance(config, HubSource):
        return HubRows(config)
    if config.path.endswith(".parquet"):
        return ParquetRows(config.path)
    if config.path.endswith((".jsonl", ".ndjson")):
        return JsonLines(config.path)
    raise ValueError(
        f"data.source.path is {config.path}: only .jsonl, .ndjson and .parquet files can be read. "
        "Convert the file, and let its name end so."
    )
