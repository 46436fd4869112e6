"""The servers' compose file: it fits the schema, opens nothing, and holds no credential."""

import json
import os
import re
import subprocess
import time
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import yaml

INFRA = Path(__file__).parents[2] / "infra"
TEXT = (INFRA / "compose.yaml").read_text()
COMPOSE = yaml.safe_load(TEXT)


def test_it_fits_the_compose_specification() -> None:
    pytest.importorskip("check_jsonschema")
    schema = files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    jsonschema.validate(COMPOSE, json.loads(schema.read_text()))


def test_every_port_is_on_loopback_by_default() -> None:
    ports = [port for one in COMPOSE["services"].values() for port in one.get("ports", [])]
    proxy = COMPOSE["services"]["proxy"]["ports"]
    assert len(ports) == 3 + len(proxy) == 5
    assert all(
        port.startswith("${REFRAIN_BIND:-127.0.0.1}:") for port in ports if port not in proxy
    )
    assert COMPOSE["services"]["proxy"]["profiles"] == ["proxy"]


def test_credentials_come_from_the_environment_and_are_demanded() -> None:
    for service in COMPOSE["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search(
                "PASSWORD|SECRET|AUTH_STRING|ACCESS_KEY|_USER$|CONNECTION_URL|STORE_URI", name
            ):
                assert "${" in value or value in ("refrain", "mlflow"), name
    asked = set(re.findall(r"\$\{(\w+):\?", TEXT))
    assert asked == {
        "POSTGRES_PASSWORD",
        "PREFECT_AUTH_STRING",
        "S3_ACCESS_KEY",
        "S3_SECRET_KEY",
        "S3_REFRAIN_KEY",
        "S3_MLFLOW_KEY",
    }
    example = (INFRA / "compose.env.example").read_text()
    for name in asked:
        assert re.search(rf"^{name}=$", example, re.MULTILINE)
    for name in set(re.findall(r"\$\{(\w+):-", TEXT)):
        assert f"\n{name}=" in example


def test_services_wait_for_services_that_exist() -> None:
    services = COMPOSE["services"]
    for name, one in services.items():
        for other, how in one.get("depends_on", {}).items():
            assert other in services, name
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[other], name


def test_every_service_is_bounded_and_says_whether_it_is_well() -> None:
    """Limits, rotation of logs, no more rights than needed, a health check, a restart."""
    once = {"buckets", "backup-folder"}
    for name, one in COMPOSE["services"].items():
        assert one["cap_drop"] == ["ALL"], name
        assert one["security_opt"] == ["no-new-privileges:true"], name
        assert one["logging"]["options"] == {"max-size": "20m", "max-file": "5"}, name
        assert one["pids_limit"] > 0, name
        assert ("mem_limit" in one) == (name not in {*once, "worker"}), name
        assert ("healthcheck" in one) == (name not in once), name
        assert one["restart"] == ("no" if name in once else "unless-stopped"), name


def test_scripts_of_services_are_ones_that_shells_take() -> None:
    text = COMPOSE["configs"]["buckets"]["content"]
    assert not re.search(r"(?<!\$)\$(?!\$)", text.replace("$$", ""))
    subprocess.run(["sh", "-n"], input=text.replace("$$", "$"), text=True, check=True)
    subprocess.run(["bash", "-n", str(INFRA / COMPOSE["configs"]["backup"]["file"])], check=True)


def test_the_copies_are_well_while_both_databases_have_a_new_one(tmp_path: Path) -> None:
    _, script = COMPOSE["services"]["backup"]["healthcheck"]["test"]
    words = ["sh", "-c", script.replace("$$", "$").replace("/backups", str(tmp_path))]

    def well() -> bool:
        every = {"PATH": os.environ["PATH"], "BACKUP_EVERY": "86400"}
        return subprocess.run(words, env=every, check=False).returncode == 0

    (tmp_path / "mlflow-20261129T000000Z.dump").touch()
    assert not well()
    other = tmp_path / "prefect-20261129T000000Z.dump"
    other.touch()
    assert well()
    os.utime(other, (time.time() - 27 * 3600,) * 2)
    assert not well()


def test_a_proxy_is_the_only_door_and_names_agree() -> None:
    """What the proxy is told of the servers is where they are, and MLflow answers its worker."""
    services = COMPOSE["services"]
    site = services["proxy"]["environment"]
    assert (site["PREFECT_AT"], site["MLFLOW_AT"]) == ("prefect:4200", "mlflow:5000")
    hosts = services["mlflow"]["environment"]["MLFLOW_SERVER_ALLOWED_HOSTS"]
    assert "mlflow:5000" in hosts.split(",")
    assert services["prefect"]["environment"]["PREFECT_UI_API_URL"] == "/api"
    assert (INFRA / "Caddyfile").is_file() and (INFRA / "s3-policy.json").is_file()
