"""Suites on versions: while a run trains, on a pool of their own, and afterwards; one and the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from configs.evaluation import BackFillConfig
from configs.overrides import ConfigError
from storage.audit.audit import audit
from storage.evaluations.results import ROOT, EvaluationResult, evaluations_of, notes_of
from storage.evaluations.run_cost import cost_of_run
from storage.objects.store import Store
from storage.runs.commit_log import version_weights
from storage.runs.live import read_end
from storage.runs.run_store import RunStore
from storage.tracking.cost import SECONDS
from tasks.evaluation.back_fill import Subject, subjects_of
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch, Launched, starting
from tests.hub import serving
from tests.storage.prompts.test_chosen import HUB
from tests.storage.prompts.test_hub import repository

pytestmark = pytest.mark.cluster

SUITE = {
    "source": {"kind": "file", "path": "rows.jsonl"},
    "rows_per_shard": 3,
    "samples": 3,
    "greedy": False,
    "pass_at": [1, 2],
    "right_from": 0.2,
}
WORDS = (f"evaluation.suites.sums={json.dumps(SUITE)}",)
EVERY = ("evaluation.before=true", "evaluation.every=1")
ROWS = "".join(
    json.dumps({"question": f"{n} + {n} = ", "answer": str(2 * n)}) + "\n" for n in range(30, 40)
)
FILES = {"rows.jsonl": ROWS}
ASIDE = (
    "cluster.pools.test={workers: 1, threads: 1, slots: 4}",
    "cluster.roles.evaluation=test",
)


def counting(name: str) -> Fault:
    """Counts the calls of engines that sample; strikes at none of them."""
    target = "engines.rollout.engine:RolloutEngine.generate"
    return Fault(id=name, target=target, action="raise", nth=10**9)


def told(result: EvaluationResult) -> dict[str, object]:
    """What an evaluation says of a version, whoever made it and when."""
    return result.model_dump(mode="json", include={"key", "metrics", "intervals", "on", "weights"})


def texts(store: Store, result: EvaluationResult) -> list[object]:
    """The answers, by prompt and sample."""
    ids = result.samples.fetch_numpy(store, "response_ids")
    assert ids[1] is not None
    return [ids[0].tolist(), ids[1].tolist(), result.samples.fetch_list(store, "reward")]


def fill(launch: Launch, run: RunStore, *words: str, **more: object) -> Launched:
    """Evaluate the stored versions of a run."""
    asked = [run.run, "--suite", "sums", "--versions", "all", "--json", *words]
    return launch(*asked, module="flows.evaluate", **more)


def forgotten(run: RunStore) -> None:
    """As if the run had been made before there were evaluations."""
    run.store.delete(run.store.list(ROOT))
    run.store.delete(list(notes_of(run)))


def counted_once(run: Launched, pools: tuple[str, ...]) -> None:
    """Device-seconds of evaluations: those of the results are those of the commits and the end."""
    end = read_end(run.files)
    assert end is not None
    commits = run.commits()
    records = [*(commit.metrics for commit in commits), end.cost]
    results = evaluations_of(run.files)
    assert not any(one.back_fill for one in results)
    for pool in pools:
        told = [record.get(f"{SECONDS}/{pool}/evaluation") or 0.0 for record in records]
        made = [one.cost[f"device_seconds/{pool}"] for one in results]
        assert min(made) > 0 and sum(made) == pytest.approx(sum(told)), (pool, made, told)
        for commit, seconds in zip(commits, told, strict=False):
            own = [one for one in commit.attempts if one["stage"] == "evaluation"]
            held = sum(one["worker_seconds"].get(pool, 0.0) for one in own)  # type: ignore[union-attr]
            assert held == pytest.approx(seconds)
    cost = cost_of_run(run.files)
    assert cost is not None and cost.back_fills.device_hours == 0
    assert cost.after.device_hours == pytest.approx(end.cost["cost/device_hours"])
    hours = sum(record["cost/device_hours"] or 0.0 for record in records)
    assert cost.device_hours == pytest.approx(hours)


@pytest.mark.slow
def test_a_back_fill_says_what_the_run_said_to_the_digit_and_asks_nothing_twice(
    launch: Launch, tmp_path: Path
) -> None:
    run = launch("tiny", "steps=2", *WORDS, *EVERY, files=FILES).whole()
    files, store = run.files, run.files.store
    before = evaluations_of(files)
    assert [one.version for one in before] == [0, 1, 2]
    assert all(one.metrics["samples"] == 30 and not one.failed for one in before)
    assert len({one.metrics["reward"] for one in before}) > 1, "the versions differ"
    drawn = [set(one.samples.fetch_list(store, "weights_digest")) for one in before]
    assert drawn == [{one.weights.digest} for one in before]
    assert audit(files).problems == []
    counted_once(run, ("rollout", "cpu"))
    answers = [texts(store, one) for one in before]
    forgotten(files)

    # Killed once two shards of the second version are scored, of four a version.
    kill = Fault(id="kill", target="tasks.evaluation.evaluate:of_record", action="kill", nth=6)
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [kill])
    code, out = fill(launch, files, environment=faults.environment).end()
    assert (code, faults.missed) == (-9, []), out
    done = [key for key in store.list(ROOT) if "/evaluate/" in key and key.endswith(".json")]
    assert 4 < len(done) < 12

    faults.plan([counting("n")])
    code, out = fill(launch, files, environment=faults.environment).end()
    assert code == 0, out
    assert faults.calls("n") == 12 - len(done), "each shard is asked once, by one of the two"
    after = evaluations_of(files)
    assert [told(one) for one in after] == [told(one) for one in before]
    assert [texts(store, one) for one in after] == answers
    assert audit(files).problems == []
    assert all(one.back_fill and one.cost["device_seconds/rollout"] > 0 for one in after)
    cost = cost_of_run(files)
    assert cost is not None
    assert cost.back_fills.device_hours == sum(one.cost["device_hours"] for one in after)

    faults.plan([counting("again")])
    code, out = fill(launch, files, environment=faults.environment).end()
    assert code == 0, out
    assert not (faults.folder / "again.calls").exists(), "all of it was there"
    assert all(one["was_there"] for one in json.loads(out[out.index("{") :])["evaluations"])
    client = MlflowClient(f"sqlite:///{run.folder}/.refrain/mlflow.db")
    (page,) = client.search_runs([client.get_experiment_by_name("refrain").experiment_id])  # type: ignore[union-attr]
    curve = {
        one.step: one.value
        for one in client.get_metric_history(page.info.run_id, "eval/sums/reward")
    }
    assert curve == {one.version: one.metrics["reward"] for one in before}
    assert "eval/sums/pass_2" in page.data.metrics
    assert page.info.status == "FINISHED" and page.data.tags["refrain.last_step"] == "2"


@pytest.mark.slow
def test_which_versions_and_suites_can_be_back_filled(
    undisturbed: RunStore, tmp_path: Path
) -> None:
    """Everything is said before a server or a worker starts."""
    (tmp_path / "rows.jsonl").write_text(ROWS)
    suite = SUITE | {"source": {"kind": "file", "path": f"{tmp_path}/rows.jsonl"}}
    given = {
        "run": undisturbed.run,
        "suites": ["sums"],
        "settings": [f"evaluation.suites.sums={json.dumps(suite)}"],
        "store": {"uri": undisturbed.store.uri},
    }

    def found(**changes: object) -> list[Subject]:
        return subjects_of(BackFillConfig.model_validate(given | changes))

    (all_there,) = found()
    there = [one for one in undisturbed.versions() if 0 <= one <= 6]
    assert list(all_there.versions) == there and 6 in there and len(there) < 7
    assert list(found(versions="last")[0].versions) == [6]
    assert [w.digest for w in found(versions="5-6")[0].versions.values()] == [
        version_weights(undisturbed, version).digest for version in (5, 6)
    ]
    gone = min(set(range(7)) - set(there))
    for changes, said in (
        ({"versions": "9"}, "has no version 9. Name one from 0 to 6"),
        ({"versions": str(gone)}, f"weights of version {gone} of .* are no longer in the store"),
        ({"suites": ["gsm9k"]}, "There is no suite gsm9k"),
        ({"run": "gone"}, "There is no run gone"),
        ({"settings": ["cluster.roles.rollout=gpus"]}, "is no pool"),
    ):
        with pytest.raises(ConfigError, match=said):
            found(**changes)
    assert len(found(against=f"{undisturbed.run}@6", versions="6")) == 2


@pytest.fixture(scope="module")
def aside(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """Overlapping steps with evaluations on a pool of their own, and one version kept at a time."""
    folder = tmp_path_factory.mktemp("aside")
    words = ("max_staleness=1", "algorithm.correction=[{kind: truncate}]", "store.keep_versions=1")
    with starting(folder, prefect_api) as start:
        run = start("tiny", "steps=5", *WORDS, *EVERY, *ASIDE, *words, files=FILES)
        yield run.whole()


@pytest.mark.slow
def test_beside_the_steps_every_version_is_measured_though_retention_is_short(
    aside: Launched,
) -> None:
    found = evaluations_of(aside.files)
    assert [one.version for one in found] == [0, 1, 2, 3, 4, 5]
    commits = {commit.step: commit.version_out.digest for commit in aside.commits()}
    assert [one.weights.digest for one in found[1:]] == list(commits.values())
    for one in found:
        spans = one.samples.fetch_numpy(aside.files.store, "weight_spans")[0].reshape(-1, 3)
        assert set(spans[:, 0].tolist()) == {one.version}
        workers = set(one.samples.fetch_list(aside.files.store, "worker"))
        assert workers == {"test-0"}
    assert audit(aside.files).problems == []
    counted_once(aside, ("test",))


@pytest.mark.slow
def test_a_run_killed_while_it_evaluates_goes_on_at_the_shard(
    launch: Launch, tmp_path: Path
) -> None:
    kill = Fault(id="kill", target="tasks.evaluation.evaluate:of_record", action="kill", nth=6)
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [kill])
    run = launch("tiny", "steps=2", *WORDS, *EVERY, files=FILES, environment=faults.environment)
    code, out = run.end()
    assert (code, faults.missed) == (-9, []), out
    faults.plan([counting("n")])
    code, out = launch("--resume", run.files.run, environment=faults.environment).end()
    assert code == 0, out
    assert [one.version for one in evaluations_of(run.files)] == [0, 1, 2]
    assert audit(run.files).problems == []


@pytest.mark.slow
def test_a_failed_scoring_is_no_result_and_is_scored_again_without_asking(
    launch: Launch, tmp_path: Path
) -> None:
    breaks = "def score(prompts, completions, **kw):\n    raise ValueError('broken')\n"
    rewards = {"functions": [{"kind": "function", "path": "mine.py:score"}]}
    word = f"evaluation.suites.sums.rewards={json.dumps(rewards)}"
    run = launch("tiny", "steps=1", *WORDS, word, files=FILES | {"mine.py": breaks}).whole()
    (broken,) = evaluations_of(run.files)
    assert broken.failed == 30 and "reward" not in broken.metrics
    assert np.isnan(broken.samples.fetch_numpy(run.files.store, "reward")[0]).all()
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [counting("n")])
    code, out = fill(launch, run.files, environment=faults.environment).end()
    assert code == 0, out
    assert evaluations_of(run.files)[-1].failed == 30
    assert faults.calls("n") == 4, "version 0 had not been asked, and 1 is not asked again"


@pytest.mark.slow
def test_two_runs_are_compared_prompt_by_prompt(launch: Launch) -> None:
    first = launch("tiny", "steps=1", "name=first", *WORDS, files=FILES).whole()
    name = first.files.run
    launch("tiny", "steps=1", "name=second", "seed=5", *WORDS).whole()
    store = Store(first.store_uri)
    (second,) = (one for one in store.children() if one.startswith("second"))
    code, out = fill(launch, RunStore(store, name), "--against", second).end()
    assert code == 0, out
    found = json.loads(out[out.index("{") :])
    assert found["against"] == second
    assert {one["version"] for one in found["compared"]} == {0, 1}
    for one in found["compared"]:
        test = one["found"]
        assert test["prompts"] == 10 and 0 < test["p_value"] <= 1
        assert test["low"] <= test["difference"] <= test["high"]


@pytest.mark.slow
def test_a_run_is_tested_by_a_suite_whose_data_a_hub_has(launch: Launch, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs the extra hub")
    with serving({"openai/gsm8k": repository("gsm8k")}) as hub:
        places = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hub")}
        words = ["evaluation.suites=[gsm8k]", "evaluation.suites.gsm8k.max_new_tokens=8"]
        words += ["evaluation.suites.gsm8k.prompt.max_prompt_tokens=200"]
        run = launch("tiny", "steps=1", *words, environment=places).whole()
    (found,) = evaluations_of(run.files)
    assert (found.suite, found.version, found.asked, found.failed) == ("gsm8k", 1, 1, 0)
    assert found.prompts.fetch_list(run.files.store, "row") == [HUB["gsm8k"]]
    assert audit(run.files).problems == []
