"""From a version to its samples and back, on a run whose every number is known."""

import threading

import pytest

from storage.audit import lineage
from storage.audit.lineage import RemovedSample, of_prompt, of_sample, of_version, prompt_of
from storage.audit.samples import SampleOrigin, Span
from storage.runs.forks import begin_at
from storage.runs.retention import sweep
from storage.runs.run_store import RunStore
from tests.storage.audit import small_run


def test_from_a_version_to_its_samples(run: RunStore) -> None:
    commits = small_run.make(run)
    found = of_version(run, 3)
    assert (found.digest, found.there) == (commits[2].version_out.digest, True)
    assert [step.step for step in found.steps] == [3, 2, 1]
    newest = found.steps[0]
    assert newest.sampled_with == commits[1].version_out.digest
    assert (newest.samples, newest.trained, newest.sample_ids) == (6, 3, (12, 17))
    assert newest.prompt_rows == (44, 45)
    assert newest.span_versions == (2,)
    assert newest.reward == pytest.approx(0.625)
    assert newest.workers == {"rollout-1": 6}
    assert [step.retried for step in found.steps] == [6, 0, 6]
    assert found.reward_code == {"c0de": [small_run.CODE]}
    assert [one.trained for one in found.samples] == [True] * 3 + [False] * 3


def test_steps_are_read_several_at_a_time(run: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    small_run.make(run)
    together, read = threading.Barrier(3), lineage.step_origin

    def once_all_are_asked_for(*asked: object) -> lineage.StepOrigin:
        together.wait(timeout=10)
        return read(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr(lineage, "step_origin", once_all_are_asked_for)
    assert [step.step for step in of_version(run, 3).steps] == [3, 2, 1]


def test_from_a_sample_to_where_it_went(run: RunStore) -> None:
    commits = small_run.make(run)
    sample, commit = of_sample(run, 14)
    assert isinstance(sample, SampleOrigin) and commit.step == 3
    assert (sample.step, sample.group, sample.prompt_row) == (3, 4, 44)
    assert sample.spans == (Span(version=2, start=0, stop=2),)
    assert sample.weights_digest == commits[1].version_out.digest
    assert (sample.worker, sample.attempt) == ("rollout-1", 2)
    assert (sample.reward, sample.advantage, sample.trained) == (0.5, 2.0, True)
    assert prompt_of(run, sample) == {"question": "row 44?"}
    left_out, _ = of_sample(run, 17)
    assert isinstance(left_out, SampleOrigin)
    assert (left_out.trained, left_out.advantage) == (False, None)
    with pytest.raises(ValueError, match="No stored batch of run run has sample 99"):
        of_sample(run, 99)


def test_from_a_prompt_to_its_samples(run: RunStore) -> None:
    small_run.make(run)
    found = of_prompt(run, 43)
    assert [(one.sample, one.step) for one in found.samples] == [(9, 2), (10, 2), (11, 2)]
    assert of_prompt(run, 99).dropped == [("run", 3, "prompt too long")]
    with pytest.raises(ValueError, match="has not drawn row 7"):
        of_prompt(run, 7)


def test_a_forks_past_is_its_parents(run: RunStore) -> None:
    commits = small_run.make(run)
    child = RunStore(run.store, "child")
    small_run.begin(child, begin_at(run, 2, fork=True))
    assert of_version(child, 2).run == "run"
    small_run.take(child, 3, commits[1])
    found = of_version(child, 3)
    assert [(step.run, step.step) for step in found.steps] == [("child", 3), ("run", 2), ("run", 1)]
    assert of_sample(child, 3)[0].run == "run"
    assert {one.run for one in of_prompt(child, 44).samples} == {"child"}
    assert {one.run for one in of_prompt(run, 44).samples} == {"run"}


def test_what_retention_removed_is_said(run: RunStore) -> None:
    small_run.make(run, steps=6, snapshots=(2, 4))
    sweep(run, keep_versions=1, keep_steps=1, keep_snapshots=1)
    found = of_version(run, 6)
    assert [step.removed for step in found.steps] == [False, False, True, True, True, True]
    assert not of_version(run, 3).there
    assert [step.samples for step in found.steps] == [6] * 6  # the commit knows
    sample, commit = of_sample(run, 1)
    assert sample == RemovedSample(run="run", step=1, sample=1, group=0)
    assert commit.version_out.version == 1
    with pytest.raises(ValueError, match="retention removed are gone"):
        of_sample(run, 36)


def test_versions_that_there_are_not(run: RunStore) -> None:
    small_run.make(run, steps=2)
    assert of_version(run, 0).steps == []
    for version in (-1, 3):
        with pytest.raises(ValueError, match=f"no policy version {version}. Name one from 0 to 2"):
            of_version(run, version)
