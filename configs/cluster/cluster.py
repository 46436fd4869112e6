"""Workers: pools, the roles that live on them, and the check that a plan fits the nodes."""

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from configs.base import Settings
from configs.cluster.kinds import (
    KubernetesConfig,
    NoTls,
    SlurmConfig,
    SshConfig,
    TemporaryTls,
    Tls,
    TlsFiles,
)
from configs.environment import refuse_secrets

Role = Literal[
    "actor",
    "aggregator",
    "ref",
    "critic",
    "teacher",
    "rollout",
    "opponent",
    "reward",
    "environment",
    "reward_model",
    "evaluation",
    "encoder",
]
POD_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
Kind = Literal["local", "address", "slurm", "kubernetes", "ssh"]

GIVEN_TO_WORKERS = (
    "workers get credentials from their own environment, on Kubernetes by a Secret "
    "(cluster.kubernetes.secret); docs/security.md says how for each kind of cluster."
)


class PoolConfig(Settings):
    """A set of identical workers."""

    workers: int = Field(
        1, ge=1, description="Worker processes; for a train pool, FSDP ranks or elastic workers."
    )
    gpus: int = Field(0, ge=0, description="GPUs of each worker.")
    threads: int = Field(
        1, ge=1, description="Compute threads of each worker's engine (OMP_NUM_THREADS)."
    )
    slots: int = Field(
        2,
        ge=1,
        description="Calls that a worker runs at once. Unless set, where workers have GPUs and "
        "sample: its part of a step's shards, as far as its engine decodes them at once, and one "
        "more.",
    )
    memory_gib: float | None = Field(
        None, gt=0, description="Memory of each worker's job or pod, in GiB; none: its default."
    )
    gpu_memory_gib: float | None = Field(
        None,
        gt=0,
        description="Memory of each GPU, in GiB, for the memory plan; none: as nvidia-smi says here.",
    )
    price_per_hour: float | None = Field(
        None,
        ge=0,
        description="Price of one device of the pool for an hour, in cluster.currency: of a GPU, or "
        "of a worker where the pool has none; none: no cost in money.",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the workers; no credentials."
    )

    @model_validator(mode="after")
    def _no_credentials(self) -> "PoolConfig":
        refuse_secrets("cluster.pools.NAME.env", self.env, GIVEN_TO_WORKERS)
        return self

    @field_validator("env", mode="before")
    @classmethod
    def _numbers_as_text(cls, env: object) -> object:
        """A recipe's and a command line's numbers are text in an environment."""
        if not isinstance(env, dict):
            return env
        return {name: str(x) if type(x) in (int, float) else x for name, x in env.items()}


class RolesConfig(Settings):
    """Which pool each role lives on; cluster.share_devices is about two roles on one pool."""

    actor: str = Field("train", description="Pool of the policy that is trained.")
    aggregator: str | None = Field(
        None,
        description="Pool on one of whose workers gradients are added up, where train.engine = "
        "elastic; none: that of the actor. One of its own stays while those come and go.",
    )
    ref: str = Field("train", description="Pool of the frozen reference policy.")
    critic: str | None = Field(None, description="Pool of the critic; none: that of the actor.")
    teacher: str | None = Field(
        None,
        description="Pool of the teachers of a distillation, all of them on each worker; none: a "
        "pool of their own, like the actor's with one worker.",
    )
    rollout: str = Field("rollout", description="Pool of the engines that sample.")
    opponent: str | None = Field(
        None, description="Pool of the engines of episodes.opponent; none: that of rollout."
    )
    reward: str = Field("cpu", description="Pool that scores completions and makes advantages.")
    environment: str | None = Field(
        None, description="Pool of the environments of episodes; none: that of rewards."
    )
    reward_model: str | None = Field(
        None,
        description="Pool of the reward models and of judges of kind local_judge; none: that of "
        "rewards. Each worker holds all.",
    )

    evaluation: str | None = Field(
        None,
        description="Pool of their own on which evaluations sample and score while training goes on; "
        "none: they have the engines of rollout and reward, between steps.",
    )
    encoder: str | None = Field(
        None, description="Pool of the encoder of what episodes see; none: that of rewards."
    )

    def pool_of(self, role: Role) -> str:
        """The pool on which a role lives."""
        pools: dict[str, str | None] = dict(self)
        if role in ("opponent", "evaluation"):
            return pools[role] or self.rollout
        beside_rewards = role in ("environment", "reward_model", "encoder")
        return pools[role] or (self.reward if beside_rewards else self.actor)


class ClusterConfig(Settings):
    """The Dask cluster."""

    kind: Kind = Field(
        "local",
        description="local: workers on this machine; address: join a running cluster; slurm: "
        "workers as jobs; kubernetes: workers as pods; ssh: workers on machines that ssh reaches.",
    )
    address: str | None = Field(
        None, description="Address of the Dask scheduler (kind = address), tcp://HOST:PORT."
    )
    host: str | None = Field(
        None,
        description="Address or network interface of this machine at which workers on others "
        "reach the scheduler (kind = slurm or ssh). Nothing else is opened to the network.",
    )
    tls: Tls | None = Field(
        None,
        description="Encryption and mutual authentication of flow, scheduler and workers; none: "
        "temporary for slurm and ssh, and with shared_machine; off for the rest.",
    )
    shared_machine: bool = Field(
        False,
        description="Other people log in to this machine, so that they reach what listens on "
        "loopback: TLS is temporary where workers are on this machine too, unless tls says "
        "otherwise.",
    )
    slurm: SlurmConfig = Field(default_factory=SlurmConfig, description="Slurm (kind = slurm).")
    ssh: SshConfig = Field(default_factory=SshConfig, description="SSH (kind = ssh).")
    kubernetes: KubernetesConfig = Field(
        default_factory=KubernetesConfig, description="Kubernetes (kind = kubernetes)."
    )
    pools: dict[str, PoolConfig] = Field(
        default_factory=lambda: {
            "train": PoolConfig(threads=2),
            "rollout": PoolConfig(threads=2, slots=9),
            "cpu": PoolConfig(slots=8),
        },
        description="Pools by name.",
    )
    roles: RolesConfig = Field(default=RolesConfig(), description="The pool of each role.")
    currency: str = Field("USD", description="Currency of every cluster.pools.NAME.price_per_hour.")
    share_devices: bool = Field(
        False,
        description="Engines whose roles live on one pool have its devices in turn: before another "
        "one works, the last one gives its memory back. false: all hold theirs at once.",
    )
    dashboard: str | None = Field(
        None,
        pattern=r"^[^:/]+:[0-9]{1,5}$",
        description="HOST:PORT of Dask's own dashboard on the flow's machine, such as "
        "127.0.0.1:8787; none: off. It knows no passwords (kind = local, slurm or ssh).",
    )
    start_timeout: float = Field(
        300.0,
        gt=0,
        description="Longest wait for workers to start, and longest time in which an engine that "
        "starts makes no progress, in seconds.",
    )
    no_workers_timeout: float = Field(
        60.0, gt=0, description="Longest wait for a live worker of a pool, in seconds."
    )

    @property
    def encryption(self) -> Tls:
        """The TLS that is used."""
        if self.tls is not None:
            return self.tls
        needed = self.kind in ("slurm", "ssh") or (self.kind == "local" and self.shared_machine)
        return TemporaryTls() if needed else NoTls()

    @model_validator(mode="after")
    def _consistent(self) -> "ClusterConfig":
        if (self.kind == "address") != (self.address is not None):
            raise ValueError(
                f"cluster.kind = {self.kind} and cluster.address = {self.address} contradict each "
                "other. Set cluster.kind = address together with cluster.address = tcp://HOST:PORT."
            )
        needed = self._missing()
        if needed is not None:
            raise ValueError(f"cluster.kind = {self.kind} needs {needed}")
        if self.kind == "slurm":
            self._whole_jobs()
        if self.kind == "kubernetes":
            self._pools_of_pods()
        if self.dashboard is not None and self.kind in ("address", "kubernetes"):
            raise ValueError(
                f"cluster.dashboard = {self.dashboard} is of a scheduler that this run starts, and "
                f"with cluster.kind = {self.kind} it starts none. Leave it out."
            )
        for role, pool in self.roles:
            if pool is not None and pool not in self.pools:
                raise ValueError(
                    f"cluster.roles.{role} = {pool} is no pool. "
                    f"Set it to one of {sorted(self.pools)}, or add cluster.pools.{pool}."
                )
        return self

    def _whole_jobs(self) -> None:
        for pool, wanted in self.pools.items():
            per_job = self.slurm.workers_per_job(pool)
            if wanted.workers % per_job:
                raise ValueError(
                    f"cluster.slurm.pools.{pool}.workers_per_job = {per_job} does not divide "
                    f"cluster.pools.{pool}.workers. Set it to a divisor of {wanted.workers}."
                )

    def _pools_of_pods(self) -> None:
        for name, own in self.kubernetes.pools.items():
            if name not in self.pools:
                raise ValueError(
                    f"cluster.kubernetes.pools.{name} is of no pool. Name it as one of "
                    f"{sorted(self.pools)}, or add cluster.pools.{name}."
                )
            memory = self.pools[name].memory_gib
            if memory is not None and own.shared_memory_gib >= memory:
                raise ValueError(
                    f"cluster.kubernetes.pools.{name}.shared_memory_gib = {own.shared_memory_gib:g} "
                    f"counts to cluster.pools.{name}.memory_gib = {memory:g}, and leaves nothing of "
                    "it. Set one lower or the other higher."
                )

    def _missing(self) -> str | None:
        """What the kind of cluster needs and the settings do not give, and how to give it."""
        if self.kind in ("slurm", "ssh") and self.host is None:
            return (
                "cluster.host. Set it to the address or network interface of this machine that the "
                "workers' machines reach, such as ib0; 127.0.0.1 if they are this machine."
            )
        if self.kind == "ssh" and not self.ssh.hosts:
            return "machines. Set cluster.ssh.hosts=[HOST, …]."
        if isinstance(self.encryption, TemporaryTls) and self.kind in ("address", "kubernetes"):
            return (
                "certificates that its processes have already. Set cluster.tls.kind = files with "
                "cluster.tls.ca_file, cert and key."
            )
        if self.kind == "kubernetes":
            return self._missing_for_pods()
        if self.kind == "address":
            secured = str(self.address).startswith("tls://")
            if secured != isinstance(self.encryption, TlsFiles):
                return (
                    f"cluster.address = {self.address} to agree with cluster.tls.kind = "
                    f"{self.encryption.kind}. Use tls://HOST:PORT together with "
                    "cluster.tls.kind = files."
                )
        return None

    def _missing_for_pods(self) -> str | None:
        """As `_missing`, for pods."""
        if self.kubernetes.image is None:
            return "an image with Refrain installed. Set cluster.kubernetes.image."
        if isinstance(self.tls, TlsFiles) and self.kubernetes.tls_secret is None:
            return "the certificates in its pods. Set cluster.kubernetes.tls_secret."
        for pool in self.pools:
            if not POD_NAME.fullmatch(pool):
                return (
                    f"another name for cluster.pools.{pool}: names of pods have lower-case "
                    "letters, digits and hyphens only."
                )
        return None
