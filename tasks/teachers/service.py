"""Running a teacher's service: its workers, its port, and the end of both."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

from configs.environment import given
from configs.overrides import ConfigError
from configs.process import close_to_others
from configs.teachers import TeacherServiceConfig
from configs.terminal_text import print_text
from engines.clusters.opening import check_cluster, open_cluster
from engines.failures import InfrastructureError
from engines.models.checkpoints import check_model
from engines.models.facts import model_facts
from engines.teachers.service import Limits, TeacherService
from engines.train.contract import TrainEngine, TrainSpec
from engines.workers.engine import EngineSpec
from engines.workers.gang import Gang
from storage.objects.errors import StoreError
from storage.objects.store import Store
from storage.runs.retention import YOUNG, pin_version
from storage.runs.run_store import Origin, RunStore
from tasks.launch.server_process import check_key
from tasks.run.roles import MODELS
from tasks.run.run_record import parent_config
from tasks.teachers.models import origin_of_version

if TYPE_CHECKING:
    from configs.cluster import ClusterConfig
    from configs.model import Model

FAILED = 1
ENGINE = "engines.train.fsdp_engine"
PIN_EVERY = YOUNG / 4  # seconds; a pin of what is no run counts for YOUNG


def serve(config: TeacherServiceConfig) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code. ConfigError before anything starts."""
    key = key_of_service(config.key_variable)
    check_key(config.key_variable, key)
    store = Store(config.store.uri, config.store.options, cache_bytes=config.store.cache_mib << 20)
    stores = [
        store,
        *(Store(uri, config.store.options, store.cache_bytes) for uri in config.other_stores),
    ]
    try:
        for one in stores:
            one.check_writable()
        model, origin = _teacher(config, store)
        check_model(model)
        check_cluster(_cluster(config))
    except (ValueError, StoreError, InfrastructureError) as error:
        raise ConfigError(str(error)) from error
    facts = model_facts(model)
    signal.signal(signal.SIGTERM, _stop)
    close_to_others()
    ended = threading.Event()
    try:
        with open_cluster(_cluster(config), preload=(ENGINE,)) as cluster:
            service = TeacherService(
                Gang(
                    cluster,
                    config.pool,
                    "teacher",
                    EngineSpec.of(
                        f"{ENGINE}:FSDPEngine", _spec(config, store, model, origin), TrainEngine
                    ),
                    config.train.deadline,
                    start_timeout=config.cluster.start_timeout,
                ),
                {one.uri: one for one in stores},
                Limits(
                    places=config.places,
                    lease_seconds=config.lease_seconds,
                    tokens_per_minute=config.tokens_per_minute,
                ),
                name=config.name,
                model=f"{origin or described(model)} in {config.train.compute_dtype}",
                positions=None if facts is None else facts.positions,
            )
            try:
                if origin is not None:
                    _keep(config.name, store, origin, ended)
                service.start()
                _listen(config, service, key)
            finally:
                ended.set()
                service.close()
    except KeyboardInterrupt:
        return 0
    except (RuntimeError, OSError, ValueError) as error:
        print_text(f"{type(error).__name__}: {error}", error=True)
        return FAILED
    return 0


def key_of_service(variable: str) -> str:
    """The key in an environment variable; ConfigError where it is not set."""
    key = given([variable]).get(variable)
    if not key:
        raise ConfigError(
            f"The environment variable {variable} is not set. Put the service's key into it, the "
            "same for the service and for the runs that it teaches."
        )
    return key


def described(model: Model) -> str:
    """A model in a few words."""
    return f"random, seed {model.seed}" if model.kind == "random" else model.path


def _teacher(config: TeacherServiceConfig, store: Store) -> tuple[Model, Origin | None]:
    """The model, and the policy version that it has the weights of, if it has any."""
    if config.version is None:
        assert config.model is not None, "the settings have one of the two"
        return config.model, None
    origin = origin_of_version(store, config.tracking, config.version, "version")
    return parent_config(RunStore(store, origin.run), origin).model, origin


def _cluster(config: TeacherServiceConfig) -> ClusterConfig:
    """The workers that are started: those of one pool."""
    return config.cluster.model_copy(
        update={"pools": {config.pool: config.cluster.pools[config.pool]}}
    )


def _spec(
    config: TeacherServiceConfig, store: Store, model: Model, origin: Origin | None
) -> TrainSpec:
    return TrainSpec(
        model=model,
        model_cache=str(MODELS.absolute()),
        train=config.train,
        base=None if origin is None else origin.weights,
        role="teacher",
        name=config.name,
        store_uri=store.uri,
        store_options=config.store.options,
        cache_bytes=store.cache_bytes,
        node_cache_bytes=config.store.node_cache_bytes,
        run=config.name,
        threads=config.cluster.pools[config.pool].threads,
    )


def _keep(name: str, store: Store, origin: Origin, ended: threading.Event) -> None:
    """Have retention keep the version that is taught by, until some time after the end."""
    owner = RunStore(store, origin.run)

    def pin() -> None:
        while not ended.is_set():
            pin_version(RunStore(store, name), owner, origin.weights.version, "teacher-service")
            ended.wait(PIN_EVERY)

    threading.Thread(target=pin, name="pin", daemon=True).start()


def _listen(config: TeacherServiceConfig, service: TeacherService, key: str) -> None:
    """Answer requests until a signal ends it."""
    import uvicorn

    from engines.teachers.api import app, settings_of

    settings = settings_of(app(service, key), config.host, config.port)
    server = uvicorn.Server(settings)
    listening = settings.bind_socket()
    _say(config, listening.getsockname()[1], service)
    server.run(sockets=[listening])


def _say(config: TeacherServiceConfig, port: int, service: TeacherService) -> None:
    facts = service.facts()
    quota = facts.tokens_per_minute
    limit = "no quota" if quota is None else f"{quota} tokens a minute for each"
    print_text(f"Teacher {facts.name} ({facts.model}): places for {facts.places} runs, {limit}")
    print_text(f"In runs: teachers.NAME.service=http://{config.host}:{port}", flush=True)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
