"""Where a team's server listens, and the addresses by which others reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from configs.overrides import ConfigError

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # and where this machine reaches what is there
DOCUMENTATION = "192.0.2.1"  # of nobody (RFC 5737): only a route is looked up


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Of one server."""

    host: str  # that it listens at
    port: int
    url: str  # by which others reach it: http(s)://NAME[:PORT]

    @property
    def here(self) -> str:
        """The address by which this machine reaches it."""
        return f"http://{bracketed(EVERYWHERE.get(self.host, self.host))}:{self.port}"

    @property
    def hosts(self) -> list[str]:
        """What a request to it may have as `Host`."""
        names = {*own_names(), self.host} if self.host in EVERYWHERE else {self.host}
        own = {f"{bracketed(name)}:{self.port}" for name in {*names, "localhost", "127.0.0.1"}}
        return sorted({*own, urlsplit(self.url).netloc})

    @property
    def origins(self) -> list[str]:
        """Origins of its own pages, as browsers name them."""
        return sorted({self.url, *(f"http://{host}" for host in self.hosts)})

    @property
    def is_public(self) -> bool:
        """Whether others than this machine reach it."""
        return not is_loopback(self.host) or not is_loopback(urlsplit(self.url).hostname or "")


def place(option: str, host: str, port: int, url: str | None) -> Place:
    """A server's place; ConfigError where `url`, which the option gave, is no address of one."""
    if url is None:
        return Place(host=host, port=port, url=f"http://{bracketed(seen_by_others(host))}:{port}")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ConfigError(
            f"{option} = {url} is no address of a server. Give it as http://NAME:PORT or "
            "https://NAME[:PORT], with nothing after it."
        )
    if parts.username or parts.query or parts.fragment:
        raise ConfigError(
            f"{option} has a login or a query in it. Give it as https://NAME[:PORT] alone."
        )
    return Place(host=host, port=port, url=f"{parts.scheme}://{parts.netloc}")


def seen_by_others(host: str) -> str:
    """The name or address that others use for what listens at a host.

    Of all addresses the one from which this machine reaches the network; without any its name.
    """
    if host not in EVERYWHERE:
        return host
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((DOCUMENTATION, 9))  # sends nothing
        return str(probe.getsockname()[0])
    found = [name for name in own_addresses() if not is_loopback(name)]
    return found[0] if found else socket.getfqdn()


def own_names() -> list[str]:
    """Names and addresses of this machine."""
    return [socket.gethostname(), socket.getfqdn(), *own_addresses()]


def own_addresses() -> list[str]:
    """Addresses of this machine's interfaces, those of one link left out."""
    return [
        one.address
        for interface in psutil.net_if_addrs().values()
        for one in interface
        if one.family in (socket.AF_INET, socket.AF_INET6) and "%" not in one.address
    ]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def bracketed(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
