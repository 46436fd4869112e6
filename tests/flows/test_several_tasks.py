"""Two tasks in one run: shares by step, rewards of each, killed and resumed, replayed, gone on with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from configs.grpo import GRPOConfig
from storage.audit.audit import audit
from storage.prompts.cursor import Cursor, TasksCursor
from storage.prompts.datasets import first_place, open_source
from storage.prompts.tasks import shared_out
from storage.runs.commit_log import Commit
from storage.runs.run_store import RunStore
from tasks.run.run_record import settings_of
from tasks.several_tasks.drawing import weights
from tests.faults.ledger import committed
from tests.faults.planted import Fault
from tests.flows.conftest import AFTER_STEP_3, ROOT, Launch, Launched, ends_alike, starting

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

FAULTS = {
    "between two steps": AFTER_STEP_3,
    "in a draw": Fault(id="draw", target="tasks.draw:tokenized", action="kill", nth=3),
    "while shards are scored": Fault(
        id="reward", target="tasks.reward:scored", action="kill", nth=5
    ),
}
# Some questions of either task are too long, and are replaced by others of it.
LONG = """
def questions(rows):
    return [{"question": f"{n} " * (40 if n % 6 == 0 else 1)} for n in range(rows)]
"""
WORDS = (
    "two_tasks.yaml", "steps=5", "prompts_per_step=4", "group_size=4", "data.max_prompt_tokens=16", "data.quarantine.no_variance=2",
    "data.source.tasks.digits.source.path=long.py:questions",
    "data.source.tasks.digits.from_step={4: 0.5}",
    "algorithm.advantage.normalize=task", "data.source.tasks.letters.max_new_tokens=6",
    "data.source.tasks.letters.group_size=3",
)  # fmt: skip


def example() -> dict[str, str]:
    """The files of the example, and those that the words above name."""
    names = ("two_tasks.py", "two_tasks.yaml")
    return {name: (ROOT / "examples" / name).read_text() for name in names} | {"long.py": LONG}


@pytest.fixture(scope="module")
def whole(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A run of two tasks to which nothing happened."""
    with starting(tmp_path_factory.mktemp("whole"), prefect_api) as start:
        return start(*WORDS, files=example()).whole()


def tasks_of(run: Launched, commit: Commit, ref: str = "prompts") -> Counter[str]:
    names = commit.refs[ref].fetch_list(run.files.store, "task")
    return Counter(str(name) for name in names)


def test_each_step_has_the_tasks_shares(whole: Launched) -> None:
    commits = committed(whole.files)
    counts = [tasks_of(whole, one) for one in commits]
    assert [(one["digits"], one["letters"]) for one in counts] == [
        *((3, 1), (2, 2), (3, 1)),
        *((1, 3), (2, 2)),  # from step 4 on by 1 : 2
    ]
    assert sum(len(rows) for one in commits for rows in one.dropped_rows.values()) > 0
    assert audit(whole.files).problems == []
    place = Cursor.from_json(commits[-1].cursor)
    assert isinstance(place, TasksCursor)
    drawn = sum(counts, Counter[str]())
    assert place.tasks["letters"].place == drawn["letters"]
    assert place.tasks["digits"].place > drawn["digits"], "rows that were dropped are drawn too"


def test_groups_have_their_tasks_sizes(whole: Launched) -> None:
    store = whole.files.store
    for commit in committed(whole.files):
        samples = commit.refs["samples"]
        groups, ids = (samples.fetch_numpy(store, name)[0] for name in ("group_id", "sample_id"))
        names = samples.fetch_list(store, "task")
        found = Counter(zip(groups.tolist(), map(str, names), strict=True))
        assert {(task, size) for (_, task), size in found.items()} == {
            ("digits", 4),
            ("letters", 3),
        }
        assert commit.group_size == 4 and np.array_equal(ids // 4, groups)
        assert len(np.unique(ids)) == len(ids)
        prompts = commit.refs["prompts"]
        sizes = prompts.fetch_numpy(store, "group_size")[0].tolist()
        assert sum(sizes) == len(ids) and len(found) == len(prompts)


def test_rewards_and_metrics_are_of_their_task(whole: Launched) -> None:
    store = whole.files.store
    for commit in committed(whole.files):
        samples = commit.refs["samples"]
        names = np.array(samples.fetch_list(store, "task"))
        rewards = samples.fetch_numpy(store, "reward")[0]
        for task, other in (("digits", "letters"), ("letters", "digits")):
            own = names == task
            score = samples.fetch_numpy(store, f"score/{task}")[0]
            assert np.array_equal(rewards[own], score[own])
            assert np.isnan(samples.fetch_numpy(store, f"score/{other}")[0][own]).all()
            mean = commit.metrics[f"task/{task}/reward/mean"]
            assert mean == pytest.approx(float(rewards[own].mean()))
            assert commit.metrics[f"task/{task}/samples/total"] == own.sum()
            assert f"task/{task}/reward/{other}" not in commit.metrics
        lengths = samples.lengths(store, "response_ids")
        assert lengths[names == "letters"].max() == 6 < lengths[names == "digits"].max() <= 16


def test_deviations_are_the_tasks_own(whole: Launched) -> None:
    store = whole.files.store
    batch = committed(whole.files)[0].refs["batch"]
    names = np.array(batch.fetch_list(store, "task"))
    groups, rewards = (batch.fetch_numpy(store, name)[0] for name in ("group_id", "reward"))
    values, offsets = batch.fetch_numpy(store, "advantages")
    assert offsets is not None
    for row in range(len(batch)):
        group, task = groups == groups[row], names == names[row]
        centred = rewards[row].astype(float) - rewards[group].astype(float).mean()
        expected = centred / (rewards[task].astype(float).std(ddof=1) + 1e-6)
        assert values[offsets[row]] == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("when", FAULTS)
def test_a_run_whose_flow_dies_ends_as_one_to_which_nothing_happened(
    launch: Launch, whole: Launched, tmp_path: Path, when: str
) -> None:
    for name, text in example().items():
        (tmp_path / name).write_text(text)
    ends_alike(whole, launch, tmp_path, WORDS, FAULTS[when])


def test_a_step_is_replayed_to_the_bit(whole: Launched) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.replay", whole.files.run, "4", "--json"],
        cwd=whole.folder, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["equal"] is True


def test_lineage_finds_the_step_that_drew_a_row(whole: Launched) -> None:
    prompts = committed(whole.files)[1].refs["prompts"]
    rows = prompts.fetch_numpy(whole.files.store, "prompt_row")[0].tolist()
    for row in rows:
        done = subprocess.run(
            [sys.executable, "-m", "flows.lineage", whole.files.run, "--prompt", str(row), "--json"],
            cwd=whole.folder, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert {one["step"] for one in json.loads(done.stdout)["samples"]} == {2}


def test_shares_are_the_same_with_overlapping_steps_and_other_shards(launch: Launch) -> None:
    words = (
        *WORDS,
        "max_staleness=1",
        "rollout.shards=3",
        "algorithm.correction=[{kind: truncate}]",
    )
    run = launch(*words, files=example()).whole()
    counts = [tasks_of(run, one) for one in committed(run.files, max_staleness=1)]
    assert [one["digits"] for one in counts] == [3, 2, 3, 1, 2]


def test_groups_that_are_handed_on_keep_their_sizes(launch: Launch) -> None:
    words = (
        *WORDS, "max_staleness=1", "rollout.over_sampling=1.5", "rollout.partial_rollout=carry",
        "algorithm.correction=[{kind: truncate}]", "data.quarantine=null",
    )  # fmt: skip
    run = launch(*words, files=example()).whole()
    assert audit(run.files).problems == []
    sizes = {"digits": 4, "letters": 3}
    commits = committed(run.files, max_staleness=1)
    handed_on = 0
    for commit in commits:
        samples = commit.refs["samples"]
        groups = samples.fetch_numpy(run.files.store, "group_id")[0].tolist()
        names = map(str, samples.fetch_list(run.files.store, "task"))
        found = Counter(zip(groups, names, strict=True))
        assert all(size == sizes[task] for (_, task), size in found.items())
        begun = [group.samples for group in commit.carried if group.begun]
        assert sum(size or 0 for size in begun) == len(commit.refs.get("begun", ()))
        handed_on += len(commit.carried)
    assert handed_on > 0


def test_the_how_to_shows_the_example() -> None:
    text = (ROOT / "docs/several-tasks.md").read_text()
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    example = yaml.safe_load((ROOT / "examples/two_tasks.yaml").read_text())
    data = yaml.safe_load(shown)["data"]
    data["source"]["tasks"]["letters"]["weight"] = 1
    assert {**data, "max_prompt_tokens": 32} == example["data"]


def test_tasks_that_pull_in_different_directions_are_both_learned(launch: Launch) -> None:
    run = launch("two_tasks.yaml", files=example()).whole()
    commits = committed(run.files)
    for task, first in (("digits", 0.3), ("letters", 0.7)):
        curve = [one.metrics[f"task/{task}/reward/mean"] or 0.0 for one in commits]
        assert max(curve[:2]) < first < 0.8 < min(curve[-2:]), (task, curve)
    name = run.files.run
    code, out = launch(
        name, "--where", "task=letters", "--limit", "2", module="flows.samples"
    ).end()
    assert code == 0 and "task letters" in out and "LLLL" in out and "DDDD" not in out


def test_weights_by_success_are_the_same_after_the_flow_died(
    prefect_api: str, launch: Launch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = (
        *("two_tasks.yaml", "steps=5", "data.source.right_from=0.5"),
        "data.source.curriculum={steps: 2, floor: 0.05}",
    )
    with starting(tmp_path_factory.mktemp("success"), prefect_api) as start:
        undisturbed = start(*words, files=example()).whole()
    commits = committed(undisturbed.files)
    assert len({tasks_of(undisturbed, one)["digits"] for one in commits}) > 1
    known = RunOf(files=undisturbed.files, config=settings_of(undisturbed.files))
    data = known.config.data
    place = first_place(data, open_source(data.source))
    for commit in commits:  # what commits tell is enough to draw again
        assert isinstance(place, TasksCursor)
        counts, place = shared_out(place, 6, weights(known, commit.step))  # type: ignore[arg-type]
        assert Counter(counts) == tasks_of(undisturbed, commit)
    for name, text in example().items():
        (tmp_path / name).write_text(text)
    ends_alike(undisturbed, launch, tmp_path, words, AFTER_STEP_3)


def test_episodes_of_two_tasks_have_prompts_of_their_own(launch: Launch) -> None:
    rows = '{kind: function, path: "guessing.py:rows", params: {size: 12}}'
    names = ("guessing.py", "guessing.yaml")
    run = launch(
        *("guessing.yaml", "steps=2", "prompts_per_step=4", "group_size=4", "rollout.shards=2"),
        f"data.source={{kind: tasks, tasks: {{loud: {{source: {rows}, prompt_suffix: '!!'}}, "
        f"calm: {{source: {rows}, weight: 3}}}}}}",
        files={name: (ROOT / "examples" / name).read_text() for name in names},
    ).whole()
    commits = committed(run.files)
    assert [tasks_of(run, one)["loud"] for one in commits] == [1, 1]
    assert audit(run.files).problems == []
    told = {
        (str(task), len(ids))
        for one in commits
        for task, ids in zip(
            one.refs["samples"].fetch_list(run.files.store, "task"),
            np.split(*prompt_ids(run, one)),
            strict=True,
        )
    }
    assert {task for task, _ in told} == {"loud", "calm"} and len(told) == 2, told
    done = subprocess.run(
        [sys.executable, "-m", "flows.replay", run.files.run, "2", "--episodes"],
        cwd=run.folder, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def prompt_ids(run: Launched, commit: Commit) -> tuple[np.ndarray, np.ndarray]:
    """The samples' prompts, and where each but the first begins."""
    values, offsets = commit.refs["samples"].fetch_numpy(run.files.store, "prompt_ids")
    assert offsets is not None
    return values, offsets[1:-1]


@dataclass(frozen=True)
class RunOf:
    """What weights are made of."""

    files: RunStore
    config: GRPOConfig
