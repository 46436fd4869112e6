"""Where a team's server listens, and the addresses by which others reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

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


def place(name: str, host: str, port: int, url: str | None) -> Place:
    """The place of a server, such as prefect; ConfigError for a port or an address that is none."""
    if not 1 <= port <= 65535:
        raise ConfigError(f"--{name}-port = {port} is no port. Give one from 1 to 65535.")
    if url is None:
        return Place(host=host, port=port, url=f"http://{bracketed(seen_by_others(host))}:{port}")
    parts = urlsplit(url)
    if not _is_origin(parts):
        raise ConfigError(
            f"--{name}-url = {url} is no address of a server. Give it as http://NAME:PORT or "
            "https://NAME[:PORT], with nothing after it."
        )
    if parts.username or parts.query or parts.fragment:
        raise ConfigError(
            f"--{name}-url has a login or a query in it. Give it as https://NAME[:PORT] alone."
        )
    if parts.hostname in EVERYWHERE:
        raise ConfigError(
            f"--{name}-url = {url} is where a server listens, and none that a browser can open. Give "
            "the name or address by which others reach this machine, or the proxy's."
        )
    return Place(host=host, port=port, url=f"{parts.scheme}://{parts.netloc}")


def _is_origin(parts: SplitResult) -> bool:
    """Whether an address names a server and no page of it."""
    try:
        port = parts.port
    except ValueError:  # no number, or none that there is
        return False
    named = parts.scheme in ("http", "https") and parts.hostname and port != 0
    return bool(named) and not parts.path.strip("/")


def check_places(prefect: Place, mlflow: Place) -> None:
    """ConfigError where no two servers of this machine can be there."""
    if prefect.port == mlflow.port:
        raise ConfigError(
            f"--prefect-port and --mlflow-port are both {prefect.port}. Give one of them another."
        )
    _listen("--host", prefect.host, 0)


def check_free(prefect: Place, mlflow: Place) -> None:
    """ConfigError where one of them cannot listen at its place now."""
    check_places(prefect, mlflow)
    for name, one in (("prefect", prefect), ("mlflow", mlflow)):
        _listen(f"--{name}-port", one.host, one.port)


def _listen(option: str, host: str, port: int) -> None:
    """Listen for a moment; ConfigError that names the option where that cannot be."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(where)
            listener.listen()
    except (OSError, UnicodeError) as error:  # socket.gaierror is an OSError
        if port == 0:
            raise ConfigError(
                f"{option} = {host} is no address of this machine ({_reason(error)}). Give one of "
                f"{', '.join(['0.0.0.0', *own_addresses()])}, or a name of it."
            ) from None
        raise ConfigError(
            f"{option} = {port} cannot be listened at ({_reason(error)}). Give another, or end "
            "what is there."
        ) from None


def _reason(error: OSError | UnicodeError) -> str:
    """What went wrong, in the system's words."""
    return str((isinstance(error, OSError) and error.strerror) or error)


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
