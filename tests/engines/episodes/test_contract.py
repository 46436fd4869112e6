"""What environments answer, as the mark of a finished call has it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from engines.data.contract import SampleFailure
from engines.episodes.contract import AnswerResult
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store


def batch(folder: Path, name: str) -> BatchRef:
    return write_batch(Store(str(folder)), f"run/{name}.safetensors", {"turn": np.arange(2)})


def test_answers_come_back_from_their_mark(tmp_path: Path) -> None:
    samples, requests = batch(tmp_path, "samples"), batch(tmp_path, "requests")
    result = AnswerResult(
        ref=samples,
        unfinished=2,
        turns=3,
        failures=(SampleFailure(sample=7, function="environment", error="it is gone"),),
        seconds=0.5,
        opponents=1,
        pending=requests,
        frames=None,
    )
    mark = json.loads(json.dumps(result.record()))
    assert mark == {
        "ref": samples.to_json(),
        "unfinished": 2,
        "turns": 3,
        "failures": [{"sample": 7, "function": "environment", "error": "it is gone"}],
        "seconds": 0.5,
        "opponents": 1,
        "pending": requests.to_json(),
        "frames": None,
    }
    assert AnswerResult.of_record(mark) == result


def test_a_mark_of_an_older_run_has_fewer_fields(tmp_path: Path) -> None:
    samples = batch(tmp_path, "samples")
    mark = {"ref": samples.to_json(), "unfinished": 0, "turns": 1, "failures": [], "seconds": 0.0}
    read = AnswerResult.of_record(mark)
    assert (read.ref, read.opponents, read.pending, read.frames) == (samples, 0, None, None)
