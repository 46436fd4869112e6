"""The servers' compose file: it fits the schema, opens nothing, and holds no credential."""

import json
import re
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
    assert len(ports) == 3
    assert all(port.startswith("${REFRAIN_BIND:-127.0.0.1}:") for port in ports)


def test_credentials_come_from_the_environment_and_are_demanded() -> None:
    for service in COMPOSE["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search(
                "PASSWORD|SECRET|AUTH_STRING|ACCESS_KEY|_USER|CONNECTION_URL|STORE_URI", name
            ):
                assert "${" in value or value == "refrain", name
    asked = set(re.findall(r"\$\{(\w+):\?", TEXT))
    assert asked == {"POSTGRES_PASSWORD", "PREFECT_AUTH_STRING", "S3_ACCESS_KEY", "S3_SECRET_KEY"}
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
