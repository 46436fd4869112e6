"""What the board shows of a run, against what its store says in another way."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from storage.audit.all_curves import points_of
from storage.audit.lineage import of_sample
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.commit_log import head, read_commit
from storage.runs.run_store import RunStore
from tasks.board.run_view import (
    RunView,
    Wanted,
    form_of,
    frames_of,
    is_picture,
    png,
    token_numbers,
    token_texts,
)
from tasks.commands.samples import samples_of_step
from tests.stored_runs.test_stored_runs import NAMES
from tests.tasks.board.conftest import HOSTILE, evaluated, only_run


def test_a_run_its_curves_and_a_page_of_samples(stored: RunStore) -> None:
    view = RunView(stored)
    run = view.run()
    assert (run["first"], run["last"], run["steps"], run["state"]) == (1, 3, 6, "stopped")
    curves = view.curves(["reward/mean", "no/such"])
    means = [one.metrics["reward/mean"] for one in points_of(stored)]
    assert curves["values"] == {"reward/mean": means, "no/such": [None] * 3}
    found = view.samples(Wanted(of="2"))
    rewards = read_commit(stored, 2).refs["samples"].fetch_numpy(stored.store, "reward")[0]
    assert [one["reward"] for one in found["samples"]] == sorted(rewards.tolist(), reverse=True)
    assert (found["count"], found["pages"], found["committed"]) == (16, 1, True)
    worst = view.samples(Wanted(of="2", order="worst", reward="0.01:", search="[0-9]"))
    assert worst["chosen"] == (rewards >= 0.01).sum() == len(worst["samples"])
    assert worst["samples"][0]["reward"] == rewards[rewards >= 0.01].min()
    assert worst["matches"]["responses"] > 0
    assert view.samples(Wanted(of="2", page=1))["samples"] == []


def test_groups_have_the_rewards_of_their_samples(stored: RunStore) -> None:
    found = RunView(stored).groups("2", 0)
    samples = samples_of_step(stored, 2)
    assert [one["group"] for one in found["groups"]] == list(dict.fromkeys(samples.groups.tolist()))
    for one in found["groups"]:
        assert one["rewards"] == samples.rewards[one["rows"]].tolist()
        assert one["mean"] == pytest.approx(np.mean(one["rewards"]))
        assert "=" in one["prompt"]


def test_a_sample_is_told_token_by_token(hostile: RunStore) -> None:
    view = RunView(hostile)
    found = view.sample("4", 0)
    assert "".join(found["tokens"]) == HOSTILE
    assert set(found["authors"]) == {"policy"} and len(found["authors"]) == len(HOSTILE)
    ratios = found["numbers"]["log-prob ratio trainer / engine"]
    assert ratios == [0.5] * len(HOSTILE)
    assert found["numbers"]["advantage"][0] == -1
    assert [one["version"] for one in found["origin"]["spans"]] == [2, 3]
    assert (found["pictures"], found["frames"]) == (1, "uint8 [4, 4, 3]")
    assert view.picture("4", 0, 0).startswith(b"\x89PNG")
    assert view.sample("4", 1)["authors"][1:6] == ["policy", *["environment"] * 3, "policy"]
    first = of_sample(hostile, found["origin"]["sample"])[0]
    assert found["origin"]["worker"] == first.worker
    assert {one["row"] for one in found["siblings"]} >= {0, 1}
    assert found["data"]["answer"].isdigit()
    assert view.find("4", found["origin"]["sample"]) == {"row": 0}
    draws = view.data_row(found["origin"]["prompt_row"])
    assert draws["samples"]
    for ask in (
        lambda: view.sample("4", 16),
        lambda: view.find("4", -1),
        lambda: view.sample("x", 0),
    ):
        with pytest.raises(ValueError, match=r"has samples 0 to 15|has no sample -1|'x' names no"):
            ask()


def test_a_run_that_goes_on_is_seen_again(stored: RunStore, request: pytest.FixtureRequest) -> None:
    view = RunView(stored)
    assert view.curves(["reward/mean"])["steps"] == [1, 2, 3]
    under_way = view.samples(Wanted(of="4"))
    assert not under_way["committed"] and under_way["count"] == 16
    hostile = request.getfixturevalue("hostile")
    assert view.run()["last"] == 4 == head(hostile)
    assert view.curves(["reward/mean"])["steps"] == [1, 2, 3, 4]
    assert view.samples(Wanted(of="4"))["committed"]


def test_an_evaluation_that_comes_late_is_seen(stored: RunStore) -> None:
    view = RunView(stored)
    assert view.curves(["eval/sums/reward"])["values"] == {"eval/sums/reward": [None] * 3}
    evaluated(stored, 2, 1)
    found = view.curves(["eval/sums/reward"])
    assert found["values"] == {"eval/sums/reward": [None, 0.25, None]}
    assert "eval/sums/reward" in found["names"]
    assert view.run()["evaluations"] == ["sums@2"]
    listed = view.samples(Wanted(of="sums@2"))
    assert (listed["name"], listed["count"], listed["committed"]) == ("sums on version 2", 16, True)
    one = view.sample("sums@2", 0)
    assert one["data"]["answer"].isdigit() and one["tokens"]
    assert one["origin"]["advantage"] is None and one["version_in"] is None


def test_of_a_damaged_batch_the_rest_is_shown(stored: RunStore) -> None:
    samples = read_commit(stored, 2).refs["samples"]
    ids = samples.fetch_list(stored.store, "response_ids")
    (bad,) = [row for row in range(16) if len(ids[row]) == 16][:1]
    folder = stored.store.local_folder
    assert folder is not None
    written = False
    for key in samples.objects:
        data = (folder / key).read_bytes()
        at = data.find(np.asarray(ids[bad]).tobytes())
        if at >= 0:
            (folder / key).write_bytes(data[:at] + b"\x01\x01" + data[at + 2 :])
            written = True
    assert written
    view = RunView(stored)
    found = view.samples(Wanted(of="2", order="stored"))
    wrong = [one for one in found["samples"] if "error" in one]
    assert [one["row"] for one in wrong] == [bad]
    assert "is damaged" in wrong[0]["error"] and "'response_ids'" in wrong[0]["error"]
    assert sum("response" in one for one in found["samples"]) == 15
    assert view.curves(["reward/mean"])["steps"] == [1, 2, 3]


@pytest.mark.parametrize("name", NAMES)
def test_old_runs_of_every_flow_open(unpacked: Path, name: str) -> None:
    folder = unpacked / name
    for run in Store(f"file://{folder}").children():
        view = RunView(RunStore(Store(f"file://{folder}"), run))
        last = view.run()["last"]
        assert view.curves(["reward/mean"])["steps"][-1] == last
        if name in ("grpo-killed", "lora"):
            assert view.sample(str(last), 0)["tokens"]
        else:  # the archive has no batches of the others
            with pytest.raises(
                ValueError, match=r"are no longer in the store .* Name a later step"
            ):
                view.samples(Wanted(of=str(last)))


def test_a_run_on_s3_opens(unpacked: Path, s3_store: Store) -> None:
    local = only_run(unpacked / "grpo-killed")
    for key in local.store.list(local.run):
        s3_store.write(key, local.store.read(key))
    there, here = RunView(replace(local, store=s3_store)), RunView(local)
    assert there.run() | {"store": ""} == here.run() | {"store": ""}
    assert there.curves(["reward/mean"]) == here.curves(["reward/mean"])
    assert there.sample("2", 3) == here.sample("2", 3)


def test_only_the_store_is_asked(unpacked: Path) -> None:
    code = (
        "import sys\n"
        "import tasks.board.server\n"
        "from storage.objects.store import Store\n"
        "from storage.runs.run_store import RunStore\n"
        "from tasks.board.run_view import RunView, Wanted\n"
        f"store = Store('file://{unpacked / 'grpo-killed'}')\n"
        "view = RunView(RunStore(store, store.children()[0]))\n"
        "view.run(), view.curves([]), view.samples(Wanted(of='2')), view.sample('2', 0)\n"
        "heavy = {'torch', 'prefect', 'mlflow', 'distributed', 'transformers', 'vllm'}\n"
        "print(heavy & set(sys.modules))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"


def test_a_character_of_several_tokens_is_the_last_ones() -> None:
    words = Tokenizer(
        models.BPE(
            {one: n for n, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []
        )
    )
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    ids = words.encode("a é€.").ids
    texts = token_texts(words, ids)
    assert "".join(texts) == "a é€." and len(texts) == len(ids)
    assert texts == ["a", " ", "", "é", "", "", "€", "."]


def test_frames_come_in_the_order_of_the_turns(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    frame = np.zeros((2, 4, 4, 3), np.uint8)
    sample = write_batch(
        store, "a.safetensors", {"sample_id": np.array([7, 8]), "opening_frame": frame}
    )
    turns = write_batch(
        store,
        "b.safetensors",
        {
            "sample_id": np.array([8, 7, 7]),
            "turn": np.array([0, 1, 0]),
            "frame": np.stack([np.full((4, 4, 3), n, np.uint8) for n in (9, 1, 2)]),
        },
    )
    found = frames_of(store, sample.take([0]), turns)
    assert len(found) == 3
    shades = [ref.fetch_numpy(store, ref.names[0])[0][place].max() for ref, place in found]
    assert shades == [0, 2, 1]
    assert form_of(found[0]) == ("uint8", [4, 4, 3])
    assert png(store, found[1]).startswith(b"\x89PNG")
    policy_sees = write_batch(
        store, "c.safetensors", {"sample_id": np.array([7]), "frame": [frame]}
    )
    assert len(frames_of(store, policy_sees, None)) == 2
    assert not is_picture(np.dtype(np.float32), (16,))
    vector = write_batch(
        store, "d.safetensors", {"sample_id": np.array([7]), "opening_frame": np.ones((1, 3))}
    )
    with pytest.raises(ValueError, match="which is no picture"):
        png(store, frames_of(store, vector, None)[0])


def test_numbers_that_are_none_have_no_colour(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    batch = write_batch(
        store,
        "a.safetensors",
        {
            "rollout_logprobs": [np.array([-1, -2], np.float32)],
            "old_logprobs": [np.array([-1.5, np.nan], np.float32)],
        },
    )
    found = token_numbers(store, [batch])
    assert found["log-prob ratio trainer / engine"] == [-0.5, None]
    assert next(iter(found)).startswith("log-prob ratio")
