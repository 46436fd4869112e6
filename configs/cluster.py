"""Workers: pools, the roles that live on them, and the check that a plan fits the nodes."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from configs.base import Settings

Role = Literal["actor", "ref", "critic", "rollout", "reward"]


class PoolConfig(Settings):
    """A set of identical workers."""

    workers: int = Field(1, ge=1, description="Worker processes; for a train pool, FSDP ranks.")
    gpus: int = Field(0, ge=0, description="GPUs of each worker.")
    threads: int = Field(
        1, ge=1, description="Compute threads of each worker's engine (OMP_NUM_THREADS)."
    )
    slots: int = Field(2, ge=1, description="Calls that a worker runs at once.")
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the workers."
    )

    @field_validator("env", mode="before")
    @classmethod
    def _numbers_as_text(cls, env: object) -> object:
        """A recipe's and a command line's numbers are text in an environment."""
        if not isinstance(env, dict):
            return env
        return {name: str(x) if type(x) in (int, float) else x for name, x in env.items()}


class RolesConfig(Settings):
    """Which pool each role lives on; two roles on one pool are colocated and take turns."""

    actor: str = Field("train", description="Pool of the policy that is trained.")
    ref: str = Field("train", description="Pool of the frozen reference policy.")
    critic: str | None = Field(None, description="Pool of the critic; none: that of the actor.")
    rollout: str = Field("rollout", description="Pool of the engines that sample.")
    reward: str = Field("cpu", description="Pool that scores completions and makes advantages.")

    def pool_of(self, role: Role) -> str:
        """The pool on which a role lives."""
        pools: dict[str, str | None] = dict(self)
        return pools[role] or self.actor


class ClusterConfig(Settings):
    """The Dask cluster."""

    kind: Literal["local", "address"] = Field(
        "local", description="local: workers on this machine; address: join a running cluster."
    )
    address: str | None = Field(
        None, description="Address of the Dask scheduler (kind = address), tcp://HOST:PORT."
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
    start_timeout: float = Field(
        300.0, gt=0, description="Longest wait for workers and engines to start, in seconds."
    )
    no_workers_timeout: float = Field(
        60.0, gt=0, description="Longest wait for a live worker of a pool, in seconds."
    )

    @model_validator(mode="after")
    def _consistent(self) -> "ClusterConfig":
        if (self.kind == "address") != (self.address is not None):
            raise ValueError(
                f"cluster.kind = {self.kind} and cluster.address = {self.address} contradict each "
                "other. Set cluster.kind = address together with cluster.address = tcp://HOST:PORT."
            )
        for role, pool in self.roles:
            if pool is not None and pool not in self.pools:
                raise ValueError(
                    f"cluster.roles.{role} = {pool} is no pool. "
                    f"Set it to one of {sorted(self.pools)}, or add cluster.pools.{pool}."
                )
        return self
