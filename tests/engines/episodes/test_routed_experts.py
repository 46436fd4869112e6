"""What an environment says has no experts until an engine reads it."""

from pathlib import Path
from typing import Any, cast

import numpy as np

from engines.episodes.episode_rows import episode_columns, read_episodes
from engines.models.routed_experts import as_ids
from storage.batches.columns import UNFINISHED, Author, SampleStatus
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.prompts.source import PromptSource


class _Rows:
    def rows(self, numbers: list[int]) -> list[dict[str, Any]]:
        return [{"number": number} for number in numbers]


def test_an_answer_has_no_experts_yet(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    columns: dict[str, object] = {
        "sample_id": np.arange(2),
        "prompt_row": np.arange(2),
        "env_seed": np.arange(2),
        "opening": ["", ""],
        "prompt_ids": [[5, 6], [7, 8, 9]],
        "response_ids": [[10, 11], [12]],
        "rollout_logprobs": [np.zeros(2, np.float32), np.zeros(1, np.float32)],
        "finish_reason": [UNFINISHED, UNFINISHED],
        "status": np.full(2, SampleStatus.UNFINISHED, np.int64),
        "routed_experts": [np.full((2, 1, 2), 3, np.uint8), np.full((1, 1, 2), 4, np.uint8)],
    }
    samples = write_batch(store, "samples.safetensors", columns)
    first, second = read_episodes(store, samples, cast("PromptSource", _Rows()), "train")
    first.tokens += [20, 21]
    first.logprobs += [0.0, 0.0]
    first.authors += bytes([Author.ENVIRONMENT] * 2)

    written = cast("list[np.ndarray]", episode_columns([first, second])["routed_experts"])

    assert [as_ids(one)[:, 0, 0].tolist() for one in written] == [[3, 3, -1, -1], [4]]
