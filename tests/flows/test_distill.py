"""Distillation as whole runs: what is stored, what a death costs, and that the student gets nearer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from storage.audit.audit import audit
from storage.audit.lineage import of_sample
from storage.objects.store import Store
from storage.runs.commit_log import read_commit
from storage.runs.run_store import RunStore
from tests.faults.ledger import committed, story
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import AFTER_STEP_3, ROOT, Launch, Launched

pytestmark = pytest.mark.cluster

FLOW = "flows.distill"
TEACHER = ("teachers.tutor.model.kind=random", "teachers.tutor.model.seed=7")
WORDS = ("algorithm.distillation.loss.kind=forward_kl_topk", "algorithm.distillation.loss.top_k=8")
IN_VLLM = ("teachers.tutor.engine={kind: vllm, kv_cache_gib: 0.1, max_sequences: 16}",)
GIVEN = (
    *("algorithm.distillation.loss.kind=jsd_topk", "algorithm.distillation.loss.top_k=8"),
    *("off_policy.column=answer", "data.source={kind: function, path: 'sums.py:sums'}"),
    *("rollout.shards=4", "group_size=1", "prompts_per_step=8", "rewards.functions=[]"),
)
SUMS = """
def sums():
    return [{"question": f"{n} + {n} = ", "answer": str(2 * n)} for n in range(64)]
"""
ALONE = ("group_size=1", "prompts_per_step=8", "rewards.functions=[]")
COLUMNS = {"teacher", "teacher_digest", "teacher_logprobs"}
OF_WORDS = {"teacher_topk_ids", "teacher_topk_logprobs", "teacher_tail_logprobs"}


def replayed(run: Launched, step: int) -> str:
    """What `refrain replay` says of a step, which has to be equal to the bit."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "flows.replay",
            run.files.run,
            str(step),
            f"store.uri={run.store_uri}",
        ],
        cwd=run.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout
    assert "Equal, to the bit." in done.stdout
    return done.stdout


@pytest.mark.slow
def test_a_student_without_rewards_or_groups_learns_from_stored_scores(launch: Launch) -> None:
    run = launch("tiny", "steps=2", *TEACHER, *ALONE, module=FLOW)
    code, out = run.end()
    assert code == 0, out
    store = run.files.store
    for commit in run.commits():
        batch = commit.refs["batch"]
        assert set(batch.names) >= COLUMNS | {"old_logprobs"}
        own, theirs, advantages = (
            batch.fetch_numpy(store, name)[0]
            for name in ("old_logprobs", "teacher_logprobs", "advantages")
        )
        np.testing.assert_allclose(advantages, theirs - own, atol=1e-6)
        assert commit.metrics["distillation/reverse_kl"] == pytest.approx(
            float(np.mean(own - theirs)), abs=1e-5
        )
        assert commit.ledger.trained == 8 * commit.step
    sample, _ = of_sample(run.files, 3)
    assert (sample.teacher, sample.reward) == ("tutor", 0.0)  # type: ignore[union-attr]
    assert sample.teacher_digest == batch.fetch_list(store, "teacher_digest")[3]  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param((), id="reverse_kl"),
        pytest.param(WORDS, id="words"),
        pytest.param(GIVEN, id="given"),
        # In float32 it gives the same numbers whatever samples are scored together.
        pytest.param((*WORDS, *IN_VLLM), id="vllm", marks=pytest.mark.vllm),
    ],
)
def test_a_killed_teacher_and_a_killed_flow_change_nothing(
    loss: tuple[str, ...], launch: Launch, tmp_path: Path
) -> None:
    words, files = ("tiny", "steps=4", *TEACHER, *loss), {"sums.py": SUMS}
    whole = launch(*words, "store.uri=file://whole", module=FLOW, files=files)
    code, out = whole.end()
    assert code == 0, out
    whole.store_uri = f"file://{tmp_path}/whole"
    in_vllm = set(IN_VLLM) <= set(loss)
    if in_vllm:
        pytest.importorskip("vllm")
    teach = (
        "engines.teachers.vllm_teacher:VllmTeacher.teach"
        if in_vllm
        else "engines.train.fsdp_engine:FSDPEngine.teach"
    )
    dies = Fault(id="teacher", target=teach, action="kill", nth=3)
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [dies, AFTER_STEP_3])
    broken = launch(*words, module=FLOW, files=files, environment=faults.environment)
    code, out = broken.end()
    assert (code, faults.missed) == (-9, []), out
    resumed = launch("--resume", broken.files.run, module=FLOW)
    code, out = resumed.end()
    assert code == 0, out
    ours, theirs = whole.commits(), resumed.commits()
    assert [c.version_out.digest for c in ours] == [c.version_out.digest for c in theirs]
    assert story(committed(resumed.files)) == story(ours)
    assert audit(resumed.files).problems == []
    assert set(theirs[-1].refs["batch"].names) >= COLUMNS | (OF_WORDS if loss else set())
    replayed(resumed, 4)
    if loss == GIVEN:
        check_given(resumed)


def check_given(run: Launched) -> None:
    """Each shard is the student's or the data's, both are trained on, and lineage says which."""
    reasons: list[str] = []
    for commit in run.commits():
        of_step = commit.refs["samples"].fetch_list(run.files.store, "finish_reason")
        reasons += [str(one) for one in of_step]
        assert np.isfinite(commit.metrics["distillation/jsd_topk"])
    shards = [set(reasons[at : at + 2]) for at in range(0, len(reasons), 2)]
    assert all(shard == {"given"} or "given" not in shard for shard in shards)
    assert 0.2 < reasons.count("given") / len(reasons) < 0.8
    sample, _ = of_sample(run.files, reasons.index("given"))
    assert (sample.spans, sample.trained, sample.teacher) == ((), True, "tutor")  # type: ignore[union-attr]


@pytest.mark.slow
def test_each_row_has_the_teacher_that_it_names(launch: Launch) -> None:
    rows = {
        "rows.py": "def rows():\n"
        "    names = ('one', 'other')\n"
        "    return [{'question': f'{n} = ', 'who': names[n % 3 == 0]} for n in range(32)]\n"
    }
    run = launch(
        "tiny",
        "steps=2",
        "data.source={kind: function, path: 'rows.py:rows'}",
        "teachers.one.model.kind=random",
        "teachers.one.model.seed=7",
        "teachers.other.model.kind=random",
        "teachers.other.model.seed=8",
        "teacher_column=who",
        *WORDS,
        module=FLOW,
        files=rows,
    )
    code, out = run.end()
    assert code == 0, out
    store, digests = run.files.store, {}
    for commit in run.commits():
        samples, prompts = commit.refs["samples"], commit.refs["prompts"]
        rows_of = prompts.fetch_list(store, "row")
        wanted = [row["who"] for row in rows_of for _ in range(4)]  # type: ignore[index,call-overload]
        assert samples.fetch_list(store, "teacher") == wanted
        for name, digest in zip(wanted, samples.fetch_list(store, "teacher_digest"), strict=True):
            assert digests.setdefault(name, digest) == digest
    assert len(set(digests.values())) == len(digests) == 2


@pytest.mark.slow
def test_the_kl_to_a_trained_version_falls_with_three_seeds(launch: Launch) -> None:
    """The teacher is what GRPO made of the student; retention keeps it for as long as it teaches."""
    taught = launch("tiny", "steps=12", "name=teacher", "store.keep_versions=1")
    code, out = taught.end(800)
    assert code == 0, out
    (teacher,) = (one for one in Store(taught.store_uri).children() if one.startswith("teacher-"))
    for seed in range(3):
        run = launch(
            "tiny",
            "steps=8",
            f"name=seed{seed}",
            *(f"{name}={seed}" for name in ("seed", "rollout.seed", "data.source.seed")),
            *("group_size=1", "prompts_per_step=16", "rollout.shards=4"),
            f"teachers.tutor.version={teacher}",
            module=FLOW,
        )
        code, out = run.end(800)
        assert code == 0, out
        store = Store(run.store_uri)
        (name,) = (one for one in store.children() if one.startswith(f"seed{seed}-"))
        files = RunStore(store, name)
        settings = (files.read_run() or {})["config"]
        assert settings["teachers"]["tutor"]["version"] == f"{teacher}@12"  # type: ignore[index]
        commits = [read_commit(files, step) for step in range(1, 9)]
        falls = [commit.metrics["distillation/reverse_kl"] for commit in commits]
        assert np.mean(falls[-2:]) < 0.5 * np.mean(falls[:2]), falls
        (digest,) = set(commits[-1].refs["samples"].fetch_list(store, "teacher_digest"))
        assert digest == read_commit(RunStore(store, teacher), 12).version_out.digest
