"""The manifests of a run on Kubernetes: they fit its schemas, and hold the run's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import read_recipe
from flows import kubernetes as command
from tasks.launch import kubernetes

validate = pytest.importorskip("kubernetes_validate").validate

VERSIONS = ("1.32", "1.37")
VALUES = kubernetes.INFRA / "values.yaml"
RECIPE = "gsm8k-multinode"


def settings(*words: str) -> GRPOConfig:
    return read_recipe(GRPOConfig, RECIPE, [*kubernetes.words_of(str(VALUES)), *words])


def rendered(*words: str) -> dict[str, Any]:
    """The manifests by kind and name."""
    made = kubernetes.render(settings(*words), "flows.grpo", "sums-1")
    found = {f"{one['kind']}/{one['metadata']['name']}": one for one in made}
    assert len(found) == len(made)
    return found


def flow_pod(found: dict[str, Any]) -> dict[str, Any]:
    return dict(found["Job/sums-1"]["spec"]["template"]["spec"])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_fit_kubernetes_schemas(version: str) -> None:
    found = rendered(
        "cluster.kubernetes.flow.deadline_seconds=86400", "tracking.prometheus_port=9400"
    )
    for one in found.values():
        validate(one, version, strict=True)
        assert one["metadata"]["namespace"] == "training"
    job = found["Job/sums-1"]
    job["spec"]["template"]["spec"]["containers"][0]["enviroment"] = []
    with pytest.raises(Exception, match="enviroment"):
        validate(job, version, strict=True)


def test_the_job_goes_on_with_a_run_of_one_name() -> None:
    found = rendered()
    job, (flow,) = found["Job/sums-1"]["spec"], flow_pod(found)["containers"]
    assert flow["args"] == ["refrain", "grpo", "/etc/refrain/run.yaml", "--name", "sums-1"]
    env = {one["name"]: one.get("value") for one in flow["env"]}
    assert env["PREFECT_API_URL"] == "http://prefect.tools.svc:4200/api"
    assert job["backoffLimit"] == 6
    assert job["ttlSecondsAfterFinished"] == 7 * 24 * 3600
    ignored, fatal = job["podFailurePolicy"]["rules"]
    assert ignored["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert fatal["onExitCodes"]["values"] == [2, 3]  # BAD_SETTINGS, CANCELLED
    assert flow["resources"]["limits"] == {"cpu": "2", "memory": "8192Mi"}
    assert flow_pod(found)["automountServiceAccountToken"] is True
    assert flow_pod(found)["serviceAccountName"] == "refrain-flow"


def test_the_settings_travel_whole(tmp_path: Path) -> None:
    odd = settings("rollout.stop=['1e-6', 'a\\n']", "cluster.kubernetes.annotations={a.b/c: 'on'}")
    made = kubernetes.render(odd, "flows.grpo", "sums-1")
    read = list(yaml.safe_load_all(kubernetes.as_yaml(made)))
    assert read == made
    (holder,) = (one for one in read if one["kind"] == "ConfigMap")
    (tmp_path / "run.yaml").write_text(holder["data"]["run.yaml"])
    again = read_recipe(GRPOConfig, str(tmp_path / "run.yaml"))
    assert again == odd
    assert again.model_fields_set == odd.model_fields_set


def test_words_go_before_values_and_values_before_the_recipe(tmp_path: Path) -> None:
    values = tmp_path / "team.yaml"
    values.write_text("steps: 7\nseed: 8\ncluster: {pools: {cpu: {env: {A: '1e-6'}}}}\n")
    config = read_recipe(GRPOConfig, RECIPE, [*kubernetes.words_of(str(values)), "seed=9"])
    assert (config.steps, config.seed) == (7, 9)
    assert config.cluster.pools["cpu"].env == {"A": "1e-6"}
    assert config.cluster.pools["cpu"].workers == 4  # the recipe's


def test_programs_that_a_model_wrote_reach_the_named_places_alone() -> None:
    found = rendered(
        "cluster.kubernetes.destinations=[{cidr: 10.0.0.0/8, ports: [443]}, {cidr: 0.0.0.0/0}]",
        "cluster.kubernetes.operator_namespace=dask",
    )
    closed = found["NetworkPolicy/refrain-closed"]["spec"]
    assert closed["policyTypes"] == ["Ingress", "Egress"]
    pods, dns, store, everywhere = closed["egress"]
    assert all("podSelector" in place for place in pods["to"])
    assert {port["port"] for port in dns["ports"]} == {53}
    assert store == {
        "to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "ports": [{"protocol": "TCP", "port": 443}],
    }
    (place,) = everywhere["to"]
    assert place == {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}
    operator = found["NetworkPolicy/refrain-operator"]["spec"]
    (source,) = operator["ingress"][0]["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "dask"}
    assert operator["podSelector"]["matchLabels"] == {"dask.org/component": "scheduler"}
    assert found["NetworkPolicy/refrain-flow"]["spec"]["ingress"] == []


def test_the_flows_pod_has_its_own_settings_and_those_of_all_pods() -> None:
    found = rendered(
        "cluster.kubernetes.priority_class=low",
        "cluster.kubernetes.patch={hostAliases: [{ip: 10.0.0.9, hostnames: [s3]}]}",
        "cluster.kubernetes.flow.patch={priorityClassName: null, containers: [{name: flow, tty: true}]}",
        "cluster.kubernetes.flow.annotations={a/b: c}",
    )
    pod = flow_pod(found)
    assert "priorityClassName" not in pod
    assert pod["hostAliases"] == [{"ip": "10.0.0.9", "hostnames": ["s3"]}]
    assert pod["containers"][0]["tty"] is True
    assert pod["containers"][0]["name"] == "flow"
    labels = found["Job/sums-1"]["spec"]["template"]["metadata"]
    assert labels["annotations"] == {"a/b": "c"}
    assert labels["labels"] == {"app.kubernetes.io/name": "refrain-flow"}  # the policies' choice


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("cluster.kind=local", "Set cluster.kind=kubernetes"),
        ("store.uri=file:///data", "store.uri = file:///data is a folder of the flow's pod alone"),
        ("cluster.kubernetes.destinations=[]", "workers could not reach s3://BUCKET/refrain"),
        ("tracking.uri=sqlite:///a.db", "would be lost with the flow's pod"),
        ("cluster.kubernetes.flow.prefect_api_url=null", "prefect_api_url is not set"),
        ("cluster.kubernetes.flow.patch={containers: [{name: flwo}]}", "Did you mean flow"),
        ("store.uri=s3://me:hunter2@bucket", r"by a Secret \(cluster.kubernetes.secret\)"),
        ("cluster.pools.cpu.env={API_KEY: a}", r"by a Secret \(cluster.kubernetes.secret\)"),
        (
            "cluster.kubernetes.patch={containers: [{name: flow, env: [{name: PASSWORD, value: a}]}]}",
            r"patch.containers.0.env.0.value is that of PASSWORD.* by a Secret",
        ),
    ],
)
def test_a_run_that_would_leave_nothing_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kubernetes.render(settings(word), "flows.grpo", "sums-1")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["render", RECIPE, "--values", str(VALUES), "--name", "sums-1", "steps=5"]
    assert command.main(words) == 0
    shown = capsys.readouterr()
    assert list(yaml.safe_load_all(shown.out)) == kubernetes.render(
        settings("steps=5"), "flows.grpo", "sums-1"
    )
    assert shown.err == ""
    assert "steps: 5\n" in shown.out  # settings are shown as people write them
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    data = [f"data.source={{kind: file, path: {prompts}}}"]
    assert command.main([*words, *data]) == 0
    assert capsys.readouterr().err == f"{prompts} has to be in the image, under the same path.\n"
    assert command.main([*words, "--name", "Sums_1"]) == 2
    assert "cannot be a Job's name" in capsys.readouterr().err
    assert command.main(["render", "--values", "nothing.yaml"]) == 2
    assert "There is no file nothing.yaml" in capsys.readouterr().err
