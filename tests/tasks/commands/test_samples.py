"""Which samples are shown, searched and compared, and what reward functions logged of them, as text."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from flows import samples as command
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.commands.command import paged
from tasks.commands.samples import (
    StoredSamples,
    as_lines,
    bounds,
    changes_of,
    pairs_of,
    rows_of_episode,
    samples_of_step,
)
from tests.tasks.board.conftest import evaluated

ARCHIVE = Path(__file__).parents[2] / "stored_runs/f941b39.tar.xz"


def test_of_a_list_each_entry_has_its_line() -> None:
    assert as_lines(["Good.", None, 0.5, {"a": "é"}]) == 'Good.\nnull\n0.5\n{"a": "é"}'
    assert as_lines("whole") == "whole"


def test_an_episode_is_found_by_the_sample_of_any_player() -> None:
    of_players = np.array([[20, 21, 22, 23], [20, 21, 20, 21]])  # sample_id, episode_id
    assert rows_of_episode(of_players, 23) == [1, 3]
    assert rows_of_episode(of_players, 20) == [0, 2]
    assert rows_of_episode(of_players, 24) == []
    assert rows_of_episode(of_players[:1], 22) == [2], "one player: the sample alone"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """A run that an older Refrain stored, with its batches."""
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    store = Store(f"file://{folder}/grpo-killed")
    return RunStore(store, store.children()[0])


@pytest.fixture
def ask(stored: RunStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def ask(run: str, *words: str) -> tuple[int, str]:
        arguments = ["refrain", run, f"store.uri={stored.store.uri}", *words]
        monkeypatch.setattr(sys, "argv", arguments)
        code = command.main()
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return ask


def test_a_search_counts_what_it_finds(ask, stored: RunStore) -> None:
    found = samples_of_step(stored, 2)
    said = found.transcripts(range(len(found.ref)))
    with_x = [one for one in said if "7" in one.response or "7" in one.prompt]
    responses, prompts = (
        sum(getattr(one, name).count("7") for one in said) for name in ("response", "prompt")
    )
    assert responses and prompts and len(with_x) < len(said)
    code, out = ask(f"{stored.run}@2", "--grep", "7", "--limit", "1")
    assert code == 0
    numbers = f"{len(with_x)} have 7, {responses} times in answers and {prompts} in prompts"
    assert numbers in " ".join(out.split())


def test_samples_are_narrowed_by_reward_status_and_fields_of_the_data(
    ask, stored: RunStore
) -> None:
    found = samples_of_step(stored, 2)
    half = float(np.median(found.rewards))
    few = found.with_reward(half, np.inf)
    assert few.sum() == (found.rewards >= half).sum() < len(few)
    assert found.with_status("failed").sum() == 0
    assert (found.with_status("ok") | found.with_status("truncated")).all()
    prompts = found.commit.refs["prompts"]
    first = prompts.fetch_list(stored.store, "row")[0]["answer"]
    group = prompts.fetch_numpy(stored.store, "group_id")[0][0]
    assert found.with_field("answer", first)[found.groups == group].all()
    with pytest.raises(
        ValueError, match=r"have no field 'task'; they have answer, metadata, quest"
    ):
        found.with_field("task", "sums")
    run = f"{stored.run}@2"
    for words, said in (
        (("--reward", "2:"), "Step 2 has no sample with a reward of 2:."),
        (("--status", "failed"), "Step 2 has no sample of status failed."),
        (("--reward", "much"), "--reward much names no rewards. Write LOW:HIGH"),
        (("--where", "answer"), "--where answer names no value. Write FIELD=VALUE."),
        (("--grep", "["), "'[' is no regular expression"),
        (("--row", "1"), "--row goes with --diff."),
        (("--diff", "3"), "No row of the data has samples in step 2 and in step 3."),
        (("--diff", "3", "--row", "999"), "Row 999 of the data has no sample in step 2."),
    ):
        code, out = ask(run, *words)
        assert (code, said in out) == (2, True), out
    assert ask(run, "--where", f"answer={first}", "--reward", "0:", "--limit", "1")[0] == 0


def test_rewards_are_written_as_bounds() -> None:
    assert bounds("0.5:") == (0.5, np.inf)
    assert bounds(":1") == (-np.inf, 1)
    assert bounds("1") == (1, 1)


def of(store: Store, name: str, rows: list[int], rewards: list[float]) -> StoredSamples:
    ref = write_batch(store, f"run/{name}.safetensors", {"prompt_row": np.array(rows)})
    return StoredSamples(
        files=RunStore(store, "run"), name=name, step=1, ref=ref, rewards=np.array(rewards),
        failed=np.isnan(rewards), groups=np.array(rows),
    )  # fmt: skip


def test_the_row_that_changed_most_is_compared_first(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    first = of(store, "a", [3, 3, 5, 5, 7], [0.0, np.nan, 1.0, 0.5, 0.0])
    second = of(store, "b", [5, 3, 5, 3, 8], [0.5, 1.0, 0.5, 1.0, 1.0])
    pairs = pairs_of(first, second, None)
    assert [(one.row, one.before, one.after) for one in pairs] == [(3, 0, 1)] * 2 + [
        (5, 0.75, 0.5)
    ] * 2
    assert [(one.first, one.second) for one in pairs] == [(0, 1), (1, 3), (2, 0), (3, 2)]
    assert {one.row for one in pairs_of(first, second, 5)} == {5}


def test_texts_are_compared_word_by_word() -> None:
    changes = list(changes_of("the sum is 7.", "the sum was 7. Done"))
    assert changes == [
        ("same", "the sum "),
        ("removed", "is"),
        ("added", "was"),
        ("same", " 7."),
        ("added", " Done"),
    ]
    long = "word " * 3000 + "\n"
    assert list(changes_of(long + "a\n", long + "b\n")) == [
        ("same", long),
        ("removed", "a\n"),
        ("added", "b\n"),
    ], "long ones line by line"


def test_two_steps_are_compared_on_the_command_line(ask, stored: RunStore) -> None:
    code, out = ask(f"{stored.run}@2", "--diff", "2", "--limit", "2")
    assert code == 0
    assert "2 pairs of samples of step 2 and step 2" in out and "[-" not in out


def test_two_versions_are_compared_on_the_questions_of_a_suite(ask, stored: RunStore) -> None:
    evaluated(stored, 2, 1)
    evaluated(stored, 3, 1)
    words = ("--evaluation", "sums@2", "--diff", "3", "--limit", "1", "--json")
    code, out = ask(stored.run, *words)
    (pair,) = json.loads(out)
    assert code == 0
    assert pair["first"]["response"] == pair["second"]["response"]
    assert pair["changes"] == [["same", pair["first"]["response"]]]
    assert ask(stored.run, "--evaluation", "sums@2", "--diff", "9")[0] == 2


def test_a_long_answer_on_a_terminal_goes_through_the_pager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = tmp_path / "read"
    monkeypatch.setenv("PAGER", f'{sys.executable} -c \'open("{read}", "w").write(input())\'')
    printed = io.StringIO()
    for terminal, in_pager in ((False, False), (True, True)):
        out = Console(file=printed, force_terminal=terminal)
        with paged(out):
            out.print("a line")
        assert read.exists() == in_pager
    assert "a line" in read.read_text() and printed.getvalue() == "a line\n"
    monkeypatch.setenv("PAGER", "cat")
    out = Console(file=printed, force_terminal=True)
    with paged(out):
        out.print("as it is")
    assert printed.getvalue() == "a line\nas it is\n"
