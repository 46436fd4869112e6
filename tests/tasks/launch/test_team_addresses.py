"""The addresses by which others reach a team's servers."""

from __future__ import annotations

import pytest

from configs.overrides import ConfigError
from tasks.launch.team_addresses import own_addresses, place, seen_by_others


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_what_listens_everywhere_is_printed_by_an_address_of_this_machine(host: str) -> None:
    found = place("--prefect-url", host, 4200, None)
    assert host not in found.url.removeprefix("http://").rpartition(":")[0].strip("[]")
    if any(not one.startswith(("127.", "::1")) for one in own_addresses()):
        assert seen_by_others(host) in own_addresses()
        assert found.is_public
    assert found.here in ("http://127.0.0.1:4200", "http://[::1]:4200")


def test_a_single_address_is_printed_as_it_is() -> None:
    found = place("--prefect-url", "fd00::7", 4200, None)
    assert found.url == found.here == "http://[fd00::7]:4200"
    assert "[fd00::7]:4200" in found.hosts
    assert not place("--prefect-url", "127.0.0.1", 4200, None).is_public


def test_behind_a_proxy_its_address_counts() -> None:
    found = place("--mlflow-url", "127.0.0.1", 5000, "https://mlflow.example.org/")
    assert (found.url, found.here) == ("https://mlflow.example.org", "http://127.0.0.1:5000")
    assert "mlflow.example.org" in found.hosts
    assert "https://mlflow.example.org" in found.origins
    assert found.is_public


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mlflow.example.org", "is no address of a server"),
        ("https://example.org/mlflow", "with nothing after it"),
        ("ftp://example.org", "http://NAME:PORT"),
        ("https://anna:secret@example.org", "has a login"),
    ],
)
def test_what_is_no_address_is_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as found:
        place("--mlflow-url", "127.0.0.1", 5000, url)
    assert "secret" not in str(found.value)
