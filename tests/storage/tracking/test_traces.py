"""Samples as traces of MLflow."""

from __future__ import annotations

from configs.storage import TrackingConfig
from storage.tracking.machine_samples import MachineSample
from storage.tracking.tracker import LONGEST_TEXT, TracedSample, Tracker
from tests.storage.tracking.test_tracker import client, page


def sample(name: str, reward: float | None, **more: object) -> TracedSample:
    given = {"step": 3, "at": 1e9, "prompt": "1 + 1 =", "response": "2", "tokens": 1, **more}
    return TracedSample(sample=name, reward=reward, ending="stop", **given)  # type: ignore[arg-type]


def test_a_sample_is_a_trace_of_its_run_once(config: TrackingConfig) -> None:
    parts = [("policy", "look"), ("environment", "a door"), ("policy", "open")]
    given = [sample("a", 0.5, parts=parts), sample("b", None, prompt="x" * 2 * LONGEST_TEXT)]
    tracker = Tracker(config)
    tracker.start(page("traced"))
    for _ in range(2):  # a retry, or a run that is resumed
        tracker.log_traces(given)
    experiment = client(config).get_experiment_by_name("refrain").experiment_id
    found = {
        one.info.client_request_id: one
        for one in client(config).search_traces(locations=[experiment])
    }
    assert set(found) == {"a", "b"}
    a, b = found["a"], found["b"]
    assert a.info.request_metadata["mlflow.sourceRun"] == tracker.run_id
    assert a.info.timestamp_ms == 10**12
    assert (str(a.info.state), str(b.info.state)) == ("OK", "ERROR")
    (reward,) = a.info.assessments
    assert (reward.name, reward.value) == ("reward", 0.5)
    root, *turns = a.data.spans
    assert (root.inputs, root.outputs) == ({"prompt": "1 + 1 ="}, {"response": "2"})
    assert [(one.name, one.outputs["text"]) for one in turns] == parts
    assert {one.parent_id for one in turns} == {root.span_id}
    assert len(b.data.spans[0].inputs["prompt"]) < 1.01 * LONGEST_TEXT
    tracker.finish()


def test_machines_have_names_of_their_own(config: TrackingConfig) -> None:
    tracker = Tracker(config.model_copy(update={"system_metrics": 10}))
    tracker.start(page("machines"))
    began = client(config).get_run(tracker.run_id).info.start_time / 1000
    looks = [
        MachineSample(host="node-1", at=began + at, metrics={"gpu_0_utilization_percentage": at})
        for at in (10.0, 20.0)
    ]
    tracker.log_machines(looks)
    tracker.log_machines(looks)
    name = "system/node-1/gpu_0_utilization_percentage"
    found = client(config).get_metric_history(tracker.run_id, name)
    assert [(one.step, one.value) for one in found] == [(1, 10.0), (2, 20.0)]
    tracker.finish()
