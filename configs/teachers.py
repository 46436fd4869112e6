"""The settings of a run's teachers, and those of a service that teaches several runs."""

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from configs.base import Settings
from configs.cluster import ClusterConfig, PoolConfig, RolesConfig
from configs.environment import refuse_password
from configs.model import Model
from configs.resolving import SLOW, Decider, Decision, Machine
from configs.rollout import RolloutConfig
from configs.storage import CONTINUE_FROM, StoreConfig, TrackingConfig
from configs.train import TrainConfig

TEACHER_POOL = "teacher"  # what the pool is called that a run gets which names none
TEACHER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
KEY_VARIABLE = "REFRAIN_TEACHER_KEY"
VARIABLE = r"^[A-Z_][A-Z0-9_]*$"
PORT = 8200


class FSDPTeaching(Settings):
    """The train engine: scores by the numbers that the student is trained with."""

    kind: Literal["fsdp"] = "fsdp"


class VllmTeaching(Settings):
    """vLLM, an engine on each worker of the pool; the number format is rollout.dtype."""

    kind: Literal["vllm"] = "vllm"
    tensor_parallel_size: int = Field(
        1, ge=1, description="Devices over which one engine is split."
    )
    max_sequences: int = Field(64, ge=1, description="Samples that an engine scores at once.")
    kv_cache_gib: float = Field(
        2.0, gt=0, description="Memory of vLLM's key-value cache on CPU, in GiB."
    )
    gpu_memory_utilization: float = Field(
        0.85, gt=0, le=1, description="Share of the GPU's memory that vLLM may take."
    )

    def engine_of(self, sampling: RolloutConfig, words: int) -> RolloutConfig:
        """The settings of an engine: what is not set here is as in those that sample.

        words: the most that are asked for of a token, which vLLM has to be told when it starts.
        """
        settings = self.model_dump(exclude={"kind"})
        arguments = {**sampling.engine_args, "max_logprobs": words}
        arguments.pop("speculative_config", None)  # nothing is drawn
        other = {"engine": "vllm", "engine_args": arguments, "speculative": None}
        return sampling.model_copy(update={**settings, **other})


Teaching = Annotated[FSDPTeaching | VllmTeaching, Field(discriminator="kind")]


class TeacherConfig(Settings):
    """A frozen model that scores the student's token ids; it has the student's tokenizer."""

    model: Model | None = Field(None, description="The model, from a path or the hub.")
    version: str | None = Field(
        None,
        pattern=CONTINUE_FROM,
        description="In its place a policy version of this store: models:/NAME@ALIAS, RUN, or "
        "RUN@STEP. A new run records which it found.",
    )
    service: str | None = Field(
        None,
        description="In their place the address of a service that teaches several runs, "
        "http://HOST:PORT (refrain teacher serve).",
    )
    engine: Teaching = Field(
        FSDPTeaching(), description="What the model or version runs in; a service has its own."
    )
    key_variable: str = Field(
        KEY_VARIABLE,
        pattern=VARIABLE,
        description="NAME of the environment variable with the service's key, not the key.",
    )
    digest: str | None = Field(
        None,
        description="Digest of the weights that the service has to hold, in the number format of "
        "rollout.dtype. A new run records which it found.",
    )
    patience: float = Field(
        600.0,
        ge=0,
        description="How long a run waits for a service that does not answer, or has no place for "
        "it any more, in seconds.",
    )

    @model_validator(mode="after")
    def _is_one_of_three(self) -> Self:
        named = {"a model": self.model is not None}
        named[f"the version {self.version}"] = self.version is not None
        named[f"the service {self.service}"] = self.service is not None
        sources = [what for what, is_set in named.items() if is_set]
        if len(sources) != 1:
            raise ValueError(
                "A teacher is a model, a policy version or a service, and one of teachers has "
                f"{' and '.join(sources) or 'none of them'}. Set one of teachers.NAME.model, "
                "teachers.NAME.version and teachers.NAME.service."
            )
        if self.service is None and self.digest is not None:
            raise ValueError(
                "teachers.NAME.digest is of a service's weights, and this teacher is none. Set "
                "teachers.NAME.service, or digest = null."
            )
        if self.service is not None and self.engine.kind != "fsdp":
            raise ValueError(
                f"teachers.NAME.engine.kind = {self.engine.kind} is of a teacher on the run's own "
                "workers, and this one is a service, which computes by FSDP. Set "
                "teachers.NAME.engine.kind = fsdp, or a model or version in place of the service."
            )
        return self

    @field_validator("service")
    @classmethod
    def _is_an_address(cls, service: str | None) -> str | None:
        if service is None:
            return None
        refuse_password("teachers.NAME.service", service)
        parts = urlsplit(service)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(
                f"teachers.NAME.service = {service} is no address of a service. Set it to "
                f"http://HOST:PORT, such as http://127.0.0.1:{PORT}."
            )
        return service.rstrip("/")


class TeacherCluster(ClusterConfig):
    """The workers of a service: one pool."""

    pools: dict[str, PoolConfig] = Field(
        default_factory=lambda: {TEACHER_POOL: PoolConfig(threads=2)},
        description="Pools by name; the service uses that of the role teacher, each worker a rank.",
    )
    roles: RolesConfig = Field(
        default=RolesConfig(
            actor=TEACHER_POOL,
            ref=TEACHER_POOL,
            rollout=TEACHER_POOL,
            reward=TEACHER_POOL,
            teacher=TEACHER_POOL,
        ),
        description="The pool of the role teacher; a service has no other.",
    )


def _number_format(config: "TeacherServiceConfig", machine: Machine) -> Iterator[Decision]:
    """Float32 on CPUs that are slow in bfloat16."""
    on_gpus = config.cluster.pools[config.pool].gpus > 0
    if machine.multiplies_bfloat16 or on_gpus or "compute_dtype" in config.train.model_fields_set:
        return
    yield Decision(path=("train", "compute_dtype"), value="float32", because=SLOW)


class TeacherServiceConfig(Settings):
    """A teacher that several runs ask: its model, who may ask, and how much."""

    deciders: ClassVar[tuple[Decider, ...]] = (_number_format,)

    name: str = Field(
        "teacher",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="What messages and the store call the service.",
    )
    model: Model | None = Field(None, description="The teacher, from a path or the hub.")
    version: str | None = Field(
        None,
        pattern=CONTINUE_FROM,
        description="In its place a policy version of the store: models:/NAME@ALIAS, RUN, or "
        "RUN@STEP. It is kept while the service lives, and an hour longer.",
    )
    host: str = Field("127.0.0.1", description="Address that the service listens at.")
    port: int = Field(PORT, ge=0, lt=65536, description="Its port; 0 takes a free one.")
    key_variable: str = Field(
        KEY_VARIABLE,
        pattern=VARIABLE,
        description="NAME of the environment variable with the key that runs have to show.",
    )
    places: int = Field(8, ge=1, description="Runs that may hold a lease at once.")
    lease_seconds: float = Field(
        60.0, ge=1, description="After so long a run that is not heard of loses its place."
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Quota of each run: tokens, of prompts and answers, that are scored for it in a "
        "minute; further ones wait while others have their turn. None: no limit.",
    )
    store: StoreConfig = Field(
        default_factory=StoreConfig,
        description="The store whose runs may ask, and where a version is.",
    )
    other_stores: tuple[str, ...] = Field(
        (), description="Addresses of more stores whose runs may ask, with store.options too."
    )
    tracking: TrackingConfig = Field(
        default_factory=TrackingConfig, description="MLflow, where a version is of its registry."
    )
    train: TrainConfig = Field(
        default_factory=TrainConfig,
        description="How the train engine computes; of a teacher only what a forward pass needs.",
    )
    cluster: TeacherCluster = Field(default_factory=TeacherCluster, description="Workers.")

    @property
    def pool(self) -> str:
        """The pool that the teacher lives on."""
        return self.cluster.roles.pool_of("teacher")

    @field_validator("other_stores")
    @classmethod
    def _no_passwords(cls, stores: tuple[str, ...]) -> tuple[str, ...]:
        for uri in stores:
            refuse_password("other_stores", uri)
        return stores

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if (self.model is None) == (self.version is None):
            has = "neither is" if self.model is None else "both are"
            raise ValueError(
                f"A service teaches by a model or a policy version, and {has} set. Set model or "
                "version."
            )
        return self
