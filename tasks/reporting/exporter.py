"""One address for all runs of a machine: the files that they leave for Prometheus, together."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from configs.terminal_text import print_text

SUFFIX = ".prom"  # of files, as the textfile collector of Prometheus's node exporter has it
LARGEST = 64 * 2**20  # bytes of a file; a run with a hundred engines leaves about two million


class RunFiles(Collector):
    """The metrics in the files of some folders, read anew at each look."""

    def __init__(self, folders: Sequence[Path], keep: float) -> None:
        """`keep`: seconds for which a run is told that says nothing more."""
        self._folders, self._keep = list(folders), keep

    def collect(self) -> Iterator[Metric]:
        """Of all runs together; of a run with several files the newest."""
        families: dict[str, Metric] = {}
        runs = unreadable = 0
        for path in self._files():
            try:
                for family in _families(path):
                    first = families.setdefault(family.name, family)
                    if first is not family:
                        first.samples += family.samples
                runs += 1
            except (OSError, ValueError):  # it is being removed, or no run wrote it
                unreadable += 1
        yield from families.values()
        yield GaugeMetricFamily("refrain_exporter_runs", "Runs that are told.", value=runs)
        yield GaugeMetricFamily(
            "refrain_exporter_unreadable_files",
            "Files in their folders that could not be read.",
            value=unreadable,
        )

    def _files(self) -> Iterable[Path]:
        newest: dict[str, tuple[float, Path]] = {}
        for path in (file for folder in self._folders for file in folder.glob(f"*{SUFFIX}")):
            try:
                modified = path.stat().st_mtime
            except OSError:
                continue
            if time.time() - modified <= self._keep:
                newest[path.stem] = max(newest.get(path.stem, (0.0, path)), (modified, path))
        return [path for _, (_, path) in sorted(newest.items())]


def _families(path: Path) -> list[Metric]:
    """What a file holds. OSError, or ValueError where it is not in Prometheus's text format."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has more than {LARGEST} bytes")
    return list(text_string_to_metric_families(path.read_text(encoding="utf-8")))


def serve(
    folders: Sequence[Path],
    keep: float,
    host: str,
    port: int,
    certificate: str | None,
    key: str | None,
) -> int:
    """Tell of the folders' runs until Ctrl-C or SIGTERM; returns the exit code.

    `keep` as RunFiles has it; `certificate`, `key`: PEM files of a server that speaks TLS.
    """
    registry = CollectorRegistry()
    registry.register(RunFiles(folders, keep))
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: ended.set())
    try:
        server, _ = start_http_server(
            port, addr=host, registry=registry, certfile=certificate, keyfile=key
        )
    except OSError as error:  # ssl.SSLError is one
        print_text(
            f"refrain exporter cannot listen at {host}:{port} ({error.strerror or error}).",
            error=True,
        )
        return 1
    at = f"http{'' if certificate is None else 's'}://{host}:{server.server_port}/metrics"
    print_text(f"{at} tells of the runs in {', '.join(map(str, folders))}", flush=True)
    ended.wait()
    server.shutdown()
    server.server_close()
    return 0
