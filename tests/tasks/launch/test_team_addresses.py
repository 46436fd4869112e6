"""The addresses by which others reach a team's servers."""

from __future__ import annotations

import socket

import pytest

from configs.overrides import ConfigError
from tasks.launch.team_servers import (
    check_free,
    check_places,
    own_addresses,
    place,
    seen_by_others,
)
from tests.ports import free_ports


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_what_listens_everywhere_is_printed_by_an_address_of_this_machine(host: str) -> None:
    found = place("prefect", host, 4200, None)
    assert host not in found.url.removeprefix("http://").rpartition(":")[0].strip("[]")
    if any(not one.startswith(("127.", "::1")) for one in own_addresses()):
        assert seen_by_others(host) in own_addresses()
        assert found.is_public
    assert found.here in ("http://127.0.0.1:4200", "http://[::1]:4200")


def test_a_single_address_is_printed_as_it_is() -> None:
    found = place("prefect", "fd00::7", 4200, None)
    assert found.url == found.here == "http://[fd00::7]:4200"
    assert "[fd00::7]:4200" in found.hosts
    assert not place("prefect", "127.0.0.1", 4200, None).is_public


def test_behind_a_proxy_its_address_counts() -> None:
    found = place("mlflow", "127.0.0.1", 5000, "https://mlflow.example.org/")
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
        ("http://example.org:99999", "is no address of a server"),
        ("http://0.0.0.0:5000", "--mlflow-url = http://0.0.0.0:5000 is where a server listens"),
        ("http://[::]:5000", "the name or address by which others reach this machine"),
        ("https://anna:secret@example.org", "has a login"),
    ],
)
def test_what_is_no_address_is_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as found:
        place("mlflow", "127.0.0.1", 5000, url)
    assert "secret" not in str(found.value)


def test_a_port_is_one() -> None:
    with pytest.raises(ConfigError, match="--prefect-port = 70000 is no port"):
        place("prefect", "127.0.0.1", 70000, None)


@pytest.mark.parametrize("host", ["192.0.2.1", "none.invalid", "a..b", "2001:db8::1"])
def test_a_host_is_of_this_machine(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"--host = {host} is no address of this machine \("):
        check_places(place("prefect", host, 4200, None), place("mlflow", host, 5000, None))
    for own in ("0.0.0.0", "localhost"):
        check_places(place("prefect", own, 4200, None), place("mlflow", own, 5000, None))


def test_ports_are_free_and_two() -> None:
    one, other = free_ports(2)
    places = [place("prefect", "127.0.0.1", one, None), place("mlflow", "127.0.0.1", other, None)]
    check_free(*places)
    with pytest.raises(ConfigError, match=f"are both {one}. Give one of them another"):
        check_places(places[0], place("mlflow", "127.0.0.1", one, None))
    with (
        socket.create_server(("127.0.0.1", other)),
        pytest.raises(
            ConfigError, match=rf"--mlflow-port = {other} cannot .*Address already in use"
        ),
    ):
        check_free(*places)
