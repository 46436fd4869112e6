"""Credentials among settings are seen by name and by look, and what is none is not taken for one."""

from __future__ import annotations

import pytest

from configs.credentials import credential_sentence, secret_name, secret_value
from configs.grpo import GRPOConfig, check_new_run
from configs.recipe import load_recipe

PLANTED = "pl4nted7c1e9d02b6"


@pytest.mark.parametrize(
    "name",
    [
        *("OPENAI_KEY", "PGPASS", "AUTHORIZATION", "WANDB_API_KEY", "HF_TOKEN", "SMTP_PASS"),
        *(
            "MYSQL_PWD",
            "X-Api-Key",
            "SESSION_COOKIE",
            "sas_url",
            "db_dsn",
            "AZURE_SAS",
            "openai_key",
        ),
        *(
            "connection_string",
            "proxy_auth",
            "ssh_passphrase",
            "JWT",
            "apiKey",
            "AWS_SECRET_ACCESS_KEY",
        ),
    ],
)
def test_names_of_credentials(name: str) -> None:
    assert secret_name(name, PLANTED)
    config = load_recipe(GRPOConfig, "tiny", [])
    source = config.data.source.model_copy(update={"params": {name: PLANTED}})
    changed = config.model_copy(update={"data": config.data.model_copy(update={"source": source})})
    with pytest.raises(ValueError, match="Remove it from the settings") as caught:
        check_new_run(changed)
    assert f"data.source.params.{name}" in str(caught.value)
    assert PLANTED not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("answer_key", "solution"), ("sort_key", "difficulty"), ("key_column", "id")),
        *(("max_tokens", 512), ("bypass", "no"), ("first_pass", "quick"), ("tokens", 3)),
        *(("TOKENIZERS_PARALLELISM", "false"), ("author", "x"), ("compass", "north")),
        *(("keyboard", "dvorak"), ("passages", "10"), ("pattern", "x"), ("use_auth", False)),
        *(("OMP_NUM_THREADS", "2"), ("HF_HOME", "/data/hf"), ("reply_to", "")),
    ],
)
def test_names_of_other_things(name: str, value: object) -> None:
    assert not secret_name(name, value)


@pytest.mark.parametrize(
    "value",
    [
        "postgresql://me:hunter2@db/runs",
        "redis://:hunter2@cache:6379/0",
        "see mongodb+srv://u:p%40ss@h/x for rows",
        "https://acct.blob.core.windows.net/c/d.parquet?sv=2024&sig=aB3%2Fxyz123",
        "https://b.s3.amazonaws.com/d.jsonl?X-Amz-Algorithm=A&X-Amz-Signature=0a1b2c3d4e",
        "https://host/v1?api_key=hunter2hunter2",
        "Authorization: Bearer abc123def456ghi",
        "Basic dXNlcjpwYXNzd29yZDE=",
        "sk-proj-abc123DEF456ghi789",
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_" + "a1" * 18,
        "hf_" + "aB3" * 11,
        "-----BEGIN RSA PRIVATE KEY-----",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.sig",
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=Zm9vYmFy",
        "export OPENAI_KEY=abcdef123456",
        "host=db user=me password=hunter2",
        "--export=ALL,WANDB_API_KEY=0123456789abcdef",
    ],
)
def test_values_that_look_so_wherever_they_stand(value: str) -> None:
    assert secret_value(value)
    config = load_recipe(GRPOConfig, "tiny", [])
    slurm = config.cluster.slurm.model_copy(update={"prologue": ["module load cuda", value]})
    changed = config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"slurm": slurm})}
    )
    said = credential_sentence(changed)
    assert said.startswith("cluster.slurm.prologue.1 holds ")
    assert value not in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "value",
    [
        "http://127.0.0.1:8000/v1/mail@host",
        "s3://bucket/runs@3",
        "https://hub.co/data?split=train&seed=3",
        "Basic arithmetic and a bearer of news",
        "task-a-long-name-of-something",
        "risk-0123456789abcdef01",
        "{question}\nAnswer: {answer}",
        "export OPENAI_KEY=$OPENAI_KEY",
        'export WANDB_API_KEY="$(cat ~/.wandb)"',
        "module load python/3.11",
        "0123456789abcdef0123456789abcdef01234567",
        "git@github.com:org/name.git",
    ],
)
def test_values_of_other_things(value: str) -> None:
    assert secret_value(value) == ""


@pytest.mark.parametrize("headers", [{"X-Custom": PLANTED}, {"Cookie": "a"}, PLANTED])
def test_headers_are_refused(headers: object) -> None:
    config = load_recipe(GRPOConfig, "tiny", [])
    rollout = config.rollout.model_copy(update={"engine_args": {"default_headers": headers}})
    said = credential_sentence(config.model_copy(update={"rollout": rollout}))
    assert said.startswith("rollout.engine_args.default_headers")
    assert PLANTED not in said


def test_variables_of_workers_are_looked_at() -> None:
    words = [f"cluster.pools.cpu.env={{OPENAI_KEY: {PLANTED}, HF_HOME: /data}}"]
    config = load_recipe(GRPOConfig, "tiny", words)  # a stored run's settings are read all the same
    with pytest.raises(
        ValueError, match=r"cluster\.pools\.cpu\.env\.OPENAI_KEY looks like"
    ) as caught:
        check_new_run(config)
    assert PLANTED not in str(caught.value)


@pytest.mark.parametrize(
    "word",
    [
        "tolerations=[{key: nvidia.com/gpu, operator: Exists}]",
        "topology_spread=[{maxSkew: 1, topologyKey: topology.example.com/block-layer-1}]",
        "volumes=[{name: c, secret: {secretName: creds}}]",
        "volumes=[{name: c, csi: {driver: d, volumeAttributes: {secretProviderClass: vault}}}]",
        "patch={containers: [{name: worker, env: [{name: HF_TOKEN, value: null}]}]}",
        "patch={imagePullSecrets: [{name: registry}], automountServiceAccountToken: false}",
        "patch={containers: [{name: worker, env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: "
        "{name: creds, key: hf}}}, {name: HF_HOME, value: /data}]}]}",
    ],
)
def test_names_in_kubernetes_objects_are_no_credentials(word: str) -> None:
    config = load_recipe(GRPOConfig, "tiny", [f"cluster.kubernetes.pools.train.{word}"])
    assert credential_sentence(config) == ""


@pytest.mark.parametrize(
    ("word", "place"),
    [
        (f"patch={{containers: [{{env: [{{name: MY_PASSWORD, value: {PLANTED}}}]}}]}}",
         "patch.containers.0.env.0.value is that of MY_PASSWORD"),
        (f"patch={{a: {{httpHeaders: [{{name: Authorization, value: {PLANTED}}}]}}}}",
         "patch.a.httpHeaders.0.value is that of Authorization"),
        ("patch={a: [http://me:hunter2@mirror]}", "patch.a.0 holds an address with a password"),
        (f"volumes=[{{flexVolume: {{options: {{password: {PLANTED}}}}}}}]",
         "volumes.0.flexVolume.options.password looks like a credential"),
        (f"annotations={{example.org/token: {PLANTED}}}",
         "annotations.example.org/token looks like a credential"),
    ],
)  # fmt: skip
def test_credentials_in_kubernetes_objects_are_refused(word: str, place: str) -> None:
    said = credential_sentence(load_recipe(GRPOConfig, "tiny", [f"cluster.kubernetes.{word}"]))
    assert said.startswith(f"cluster.kubernetes.{place}")
    assert "by a Secret (cluster.kubernetes.secret)" in said
    assert PLANTED not in said and "hunter2" not in said
