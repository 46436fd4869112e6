"""Whole runs of a policy that looks at images: what it saw is on record, and it can be made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engines.episodes.frames import FRAME
from storage.audit.audit import audit
from storage.batches.columns import Author
from storage.objects.store import Store
from storage.runs.commit_log import Commit
from tests.faults.ledger import committed, story
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import ROOT, Launch

pytestmark = pytest.mark.cluster

FILES = {
    name: (ROOT / "examples" / name).read_text() for name in ("seen_lake.py", "seen_lake.yaml")
}
WORDS = (
    *("seen_lake.yaml", "steps=3", "prompts_per_step=4", "group_size=4", "store.snapshot_every=2"),
    *("algorithm.kl.coefficient=0.01", "train.mini_batches=2"),
)

COLOURS = """
import random

class Colours:
    \"\"\"Three pictures, each of one of four colours; a third for each whose number is written.\"\"\"

    def reset(self, seed, **row):
        self._random, self._right, self._colours = random.Random(seed), 0, []
        self._next()
        return ""

    def _next(self):
        self._colours.append(self._random.randrange(4))

    def step(self, text):
        self._right += text == f"<{self._colours[-1]}>"
        self._next()
        return "", None, len(self._colours) > 3

    def get_reward(self):
        return self._right / 3

    def frame(self):
        import numpy as np

        shown = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)][self._colours[-1]]
        return np.full((16, 16, 3), shown, np.uint8)

def rows(size=512):
    return [{"question": "name it"} for _ in range(size)]
"""


def check(commit: Commit, store: Store) -> None:
    """Each turn has the frame that the turn before was answered with, where that was stored."""
    samples, frames = commit.refs["samples"], commit.refs["frames"]
    turns = samples.lengths(store, "turn_rewards")
    seen = samples.fetch_list(store, FRAME)
    assert [len(one) for one in seen] == turns.tolist()  # type: ignore[arg-type]
    first = samples.fetch_numpy(store, "opening_frame")[0]
    given = {
        (sample, turn): frame
        for sample, turn, frame in zip(
            frames.fetch_numpy(store, "sample_id")[0].tolist(),
            frames.fetch_numpy(store, "turn")[0].tolist(),
            frames.fetch_numpy(store, FRAME)[0],
            strict=True,
        )
    }
    for row, sample in enumerate(samples.fetch_numpy(store, "sample_id")[0].tolist()):
        wanted = [first[row], *(given[sample, turn] for turn in range(turns[row] - 1))]
        np.testing.assert_array_equal(seen[row], wanted)  # type: ignore[arg-type]
    assert commit.refs["batch"][[FRAME]].objects <= frames.objects | commit.refs["prompts"].objects
    tokens = np.asarray(samples.fetch_numpy(store, "response_ids")[0])
    authors = samples.fetch_numpy(store, "author")[0]
    assert set(tokens[authors == Author.POLICY].tolist()) <= {101, 102, 103, 104}


IN_ROUNDS = (
    *("algorithm.selection=[{kind: informative}]", "dynamic_sampling.max_rounds=2"),
    *("dynamic_sampling.on_shortage=train", "train.compile=true"),
)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        pytest.param(
            "flows.grpo", (), marks=pytest.mark.slow
        ),  # tests/engines/train/test_images.py
        pytest.param("flows.srpo", (), marks=pytest.mark.slow),
        pytest.param("flows.dapo", IN_ROUNDS, marks=pytest.mark.slow),
    ],
)
def test_what_it_saw_is_on_record(launch: Launch, module: str, words: tuple[str, ...]) -> None:
    run = launch(*WORDS, *words, files=FILES, module=module).whole()
    for commit in run.commits():
        check(commit, run.files.store)
        assert commit.metrics["train/rollout_mismatch_max"] < 1e-4
    assert audit(run.files).problems == [] and audit(run.files).orphans == []
    code, out = launch(run.files.run, "2", module="flows.replay").end()
    assert (code, "Equal, to the bit." in out) == (0, True), out


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Fault(
            id="environment",
            target="engines.episodes.environment_engine:EnvironmentEngine.answer",
            action="kill",
            nth=9,
        ),
        Fault(
            id="rollout",
            target="engines.rollout.engine:RolloutEngine.generate",
            action="kill",
            nth=15,
        ),
        Fault(
            id="train",
            target="engines.train.fsdp_engine:FSDPEngine.update",
            action="kill",
            nth=2,
        ),
        Fault(id="flow", target="tasks.episodes:answer", action="kill", nth=20, when="before"),
    ],
    ids=lambda fault: fault.id,
)
def test_a_run_that_a_fault_strikes_ends_alike(
    launch: Launch, tmp_path: Path, fault: Fault
) -> None:
    whole = launch(*WORDS, f"store.uri=file://{tmp_path}/whole", files=FILES).whole()
    whole.store_uri = f"file://{tmp_path}/whole"
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [fault])
    run = launch(*WORDS, environment=faults.environment, files=FILES)
    code, out = run.end()
    if code:
        assert fault.target.startswith("tasks."), out
        code, out = launch("--resume", run.files.run).end()
    assert code == 0, out
    assert faults.missed == []
    assert story(committed(run.files)) == story(whole.commits())
    assert audit(run.files).problems == []
    for commit in run.commits():
        check(commit, run.files.store)


@pytest.mark.slow
def test_it_learns_what_only_pictures_tell(launch: Launch) -> None:
    run = launch(
        *("seen_lake.yaml", "steps=14", "group_size=8", "train.learning_rate=3e-3"),
        *("episodes.environment={kind: class, path: 'colours.py:Colours'}", "episodes.max_turns=4"),
        *("data.source.path=colours.py:rows", "model.vision.image=16"),
        files={**FILES, "colours.py": COLOURS},
    ).whole()
    rewards = [commit.metrics["reward/mean"] for commit in run.commits()]
    assert rewards[0] < 0.5, "a quarter by chance"
    assert np.mean(rewards[-3:]) > 0.7, rewards
