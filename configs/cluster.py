"""Workers: pools, the roles that live on them, and how each kind of cluster is reached."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from configs.base import LocalFile, Settings
from configs.environment import refuse_password, refuse_secrets

# Where clouds tell a machine's programs its credentials.
METADATA = (IPv4Network("169.254.0.0/16"), IPv6Network("fd00:ec2::/32"))

# By which entries of a list are told apart, as `kubectl patch` does; other lists are replaced.
LIST_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
}
ADDED_LISTS = ("tolerations", "envFrom")  # whose entries are added to those that there are
PROGRAMS = ("worker", "scheduler", "flow")  # containers of the pods

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


class NoTls(Settings):
    """Plain TCP between flow, scheduler and workers."""

    kind: Literal["off"] = "off"


class TemporaryTls(Settings):
    """A certificate made for this run alone. Slurm's workers read it from cluster.slurm.folder."""

    kind: Literal["temporary"] = "temporary"


class TlsFiles(Settings):
    """Certificates that every machine has at the same path."""

    kind: Literal["files"] = "files"
    ca_file: LocalFile = Field(description="The authority's certificate, PEM.")
    cert: LocalFile = Field(description="The certificate of this cluster's processes, PEM.")
    key: LocalFile = Field(
        description="Path of its private key, PEM; the key itself stays in the file."
    )


Tls = Annotated[NoTls | TemporaryTls | TlsFiles, Field(discriminator="kind")]


class SlurmJobs(Settings):
    """What some jobs want otherwise than the rest."""

    partition: str | None = Field(None, description="Partition of these jobs.")
    time_limit: int | None = Field(None, ge=60, description="Time limit of these jobs, in seconds.")
    directives: list[str] = Field(
        default_factory=list,
        description="Further sbatch options of these jobs, such as --constraint=a100.",
    )


class SlurmPool(SlurmJobs):
    """The jobs of a pool."""

    workers_per_job: int = Field(
        1,
        ge=1,
        description="Workers that share a job, and so a node; a divisor of the pool's workers. Ranks "
        "of a train pool reach one another's GPUs by NVLink only within a job, where Slurm "
        "constrains devices: set it to a node's GPUs, divided by those of a worker.",
    )


class SlurmFlow(SlurmJobs):
    """The job of the flow itself, when a run is submitted by `refrain cluster submit`."""

    threads: int = Field(2, ge=1, description="Cores of the flow's job.")
    memory_gib: float | None = Field(None, gt=0, description="Memory of the flow's job, in GiB.")
    handover: int = Field(
        180,
        ge=1,
        description="Seconds before its time limit at which the flow stops, and a job that goes on "
        "with the run is submitted.",
    )


class SlurmConfig(Settings):
    """Workers as Slurm jobs: a job array for each pool."""

    partition: str | None = Field(None, description="Partition; none takes Slurm's default.")
    account: str | None = Field(None, description="Account that is charged.")
    time_limit: int | None = Field(
        None,
        ge=60,
        description="Time limit of a worker's job, in seconds (Slurm counts whole minutes); none "
        "takes the partition's.",
    )
    handover: int = Field(
        300,
        ge=1,
        description="Seconds before its time limit at which a worker's replacement is submitted. "
        "The worker takes no new call once that one has joined.",
    )
    gpu_option: str = Field(
        "--gres=gpu:{gpus}",
        description="sbatch option that asks for a job's GPUs; {gpus} is their number.",
    )
    directives: list[str] = Field(
        default_factory=list, description="Further sbatch options, such as --qos=high."
    )
    prologue: list[str] = Field(
        default_factory=list, description="Shell lines before a worker starts, such as module load."
    )
    python: str | None = Field(
        None, description="Python of the workers; none takes the one that runs the flow."
    )
    folder: str = Field(
        ".refrain/slurm", description="Shared folder for the jobs' scripts and logs."
    )
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="What the jobs' names begin with; none makes one up.",
    )
    pools: dict[str, SlurmPool] = Field(
        default_factory=dict, description="What single pools want otherwise, by pool."
    )
    flow: SlurmFlow = Field(
        default=SlurmFlow(), description="The flow's own job (refrain cluster submit)."
    )

    def workers_per_job(self, pool: str) -> int:
        """Workers of a pool that share a job."""
        return self.pools.get(pool, SlurmPool()).workers_per_job


class SshConfig(Settings):
    """Workers on machines that `ssh` reaches without a password."""

    hosts: list[str] = Field(
        default_factory=list, description="Machines, as `ssh` takes them: [USER@]HOST."
    )
    options: list[str] = Field(
        default_factory=list, description="Further options of ssh, such as -p2222."
    )
    python: str = Field("python3", description="Python on those machines, with Refrain installed.")
    folder: str | None = Field(
        None, description="Working folder there; none takes the home folder."
    )
    forward_environment: list[str] = Field(
        default_factory=lambda: [
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "AWS_DEFAULT_REGION",
            "AWS_ENDPOINT_URL",
            "HF_TOKEN",
        ],
        description="Names of environment variables that the workers get from this process, "
        "through the encrypted connection and into no file.",
    )


class KueueGang(Settings):
    """Pods of a cluster are admitted together, by Kueue (kueue.sigs.k8s.io)."""

    kind: Literal["kueue"] = "kueue"
    queue: str = Field(description="LocalQueue that the pods are in.")


class CoschedulingGang(Settings):
    """Pods of a cluster are scheduled together, by the plugin Coscheduling of scheduler-plugins."""

    kind: Literal["coscheduling"] = "coscheduling"
    scheduler: str = Field(
        "scheduler-plugins-scheduler", description="Name of the scheduler that has the plugin."
    )
    timeout: int = Field(
        600, ge=1, description="Longest wait of the first pod for the last one, in seconds."
    )


Gang = Annotated[KueueGang | CoschedulingGang, Field(discriminator="kind")]
JsonObject = dict[str, JsonValue]  # as Kubernetes writes it


class KubernetesPods(Settings):
    """What pods have beside their program. A pool's are added to those of all pods."""

    labels: dict[str, str] = Field(default_factory=dict, description="Labels of the pods.")
    annotations: dict[str, str] = Field(
        default_factory=dict,
        description="Annotations of the pods, as of a mesh or a network plugin.",
    )
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="Labels of the nodes that the pods run on."
    )
    tolerations: list[JsonObject] = Field(
        default_factory=list,
        description="Taints of nodes that the pods bear, as Kubernetes writes them: {key: "
        "nvidia.com/gpu, operator: Exists, effect: NoSchedule}.",
    )
    affinity: JsonObject = Field(
        default_factory=dict, description="Affinity of the pods, as Kubernetes writes it."
    )
    topology_spread: list[JsonObject] = Field(
        default_factory=list,
        description="Topology spread constraints, as Kubernetes writes them. One without "
        "labelSelector counts the pods of the same pool.",
    )
    priority_class: str | None = Field(None, description="Priority class of the pods.")
    image_pull_secrets: list[str] = Field(
        default_factory=list, description="Names of the secrets by which the image is pulled."
    )
    host_network: bool = Field(
        False,
        description="The pods have their node's network. No NetworkPolicy holds them then: keep "
        "programs that a model wrote out of such a pool.",
    )
    resources: dict[str, str] = Field(
        default_factory=dict,
        description="Further resources of each pod by name, such as rdma/hca_shared_devices_a: 1.",
    )
    capabilities: list[str] = Field(
        default_factory=list,
        description="Linux capabilities of the container, such as IPC_LOCK for RDMA; all others are "
        "dropped.",
    )
    volumes: list[JsonObject] = Field(
        default_factory=list, description="Further volumes, as Kubernetes writes them."
    )
    volume_mounts: list[JsonObject] = Field(
        default_factory=list,
        description="Where they are in the container, as Kubernetes writes it.",
    )
    ephemeral_storage_gib: float | None = Field(
        None,
        gt=0,
        description="Disk of each pod for /tmp, its logs and what else it writes, in GiB; none: as "
        "the namespace says. store.node_cache_gib has to fit into it.",
    )
    grace_seconds: int | None = Field(
        None,
        ge=1,
        description="Seconds between being told to end and being killed; more than a checkpoint "
        "takes (time/snapshot). A worker ends the call that it is at first. None: 120.",
    )
    run_as_user: int | None = Field(
        None, ge=1, description="User id of the pods' programs, never root; none: 1000."
    )
    read_only_root: bool | None = Field(
        None,
        description="The container can write nothing but its volumes; /tmp is one, and HOME is there "
        "unless the pool's env sets it. none: true.",
    )
    patch: JsonObject = Field(
        default_factory=dict,
        description="What else the pod's spec shall have, as a merge patch: objects are merged, null "
        "removes, containers, env and volumes are merged by name, volumeMounts by mountPath, "
        "tolerations are added, and other lists replaced. The container is called worker, scheduler "
        "or flow; another one needs an image.",
    )


class KubernetesPool(KubernetesPods):
    """What a pool's pods want otherwise than the rest."""

    shared_memory_gib: float = Field(
        1.0, gt=0, description="Size of /dev/shm in each pod, in GiB; it counts to its memory."
    )


class KubernetesFlow(KubernetesPods):
    """The flow's own pod, as `refrain kubernetes render` writes it."""

    threads: float = Field(2.0, gt=0, description="CPUs of the flow's pod.")
    memory_gib: float = Field(8.0, gt=0, description="Memory of the flow's pod, in GiB.")
    prefect_api_url: str | None = Field(
        None, description="API of the team's Prefect server, http(s)://HOST:PORT/api."
    )
    retries: int = Field(
        6,
        ge=0,
        description="How often the flow is started again after an error, from its last committed "
        "step. Evictions and lost nodes are not counted.",
    )
    keep_seconds: int = Field(
        604_800, ge=0, description="Seconds after its end until the Job is removed, with its log."
    )
    deadline_seconds: int | None = Field(
        None, ge=1, description="Longest time of the run with all its restarts; none: no limit."
    )

    @field_validator("prefect_api_url")
    @classmethod
    def _no_password(cls, url: str | None) -> str | None:
        refuse_password("cluster.kubernetes.flow.prefect_api_url", url or "")
        return url


def lies_in(network: IPv4Network | IPv6Network, larger: IPv4Network | IPv6Network) -> bool:
    """Whether all addresses of a network are of another one."""
    if isinstance(network, IPv4Network) and isinstance(larger, IPv4Network):
        return network.subnet_of(larger)
    if isinstance(network, IPv6Network) and isinstance(larger, IPv6Network):
        return network.subnet_of(larger)
    return False


class NetworkDestination(Settings):
    """A place outside the cluster that workers may reach."""

    cidr: str = Field(description="Addresses, such as 10.1.0.0/16.")
    ports: list[int] = Field(
        default_factory=lambda: [443], min_length=1, description="TCP ports there."
    )

    @field_validator("cidr")
    @classmethod
    def _no_metadata(cls, cidr: str) -> str:
        try:
            network = ip_network(cidr)
        except ValueError as error:
            raise ValueError(f"{cidr} is no network: {error}. Write such as 10.1.0.0/16.") from None
        if any(lies_in(network, addresses) for addresses in METADATA):
            raise ValueError(
                f"{cidr} is where clouds hand out credentials, and programs that a model wrote run "
                "in these pods. Leave it out; give credentials by cluster.kubernetes.secret."
            )
        return str(network)


class KubernetesConfig(KubernetesPods):
    """Workers as pods, by the Dask operator (dask-kubernetes)."""

    image: str | None = Field(None, description="Container image with Refrain installed.")
    namespace: str = Field("default", description="Namespace of the pods.")
    service_account: str | None = Field(None, description="Service account of the pods.")
    secret: str | None = Field(
        None,
        description="Kubernetes secret whose entries become environment variables of the pods; "
        "the way for the store's credentials.",
    )
    tls_secret: str | None = Field(
        None,
        description="Kubernetes secret with the files of cluster.tls; its entries appear in the "
        "folder of cluster.tls.ca_file.",
    )
    gpu_resource: str = Field("nvidia.com/gpu", description="Resource by which GPUs are asked for.")
    gang: Gang | None = Field(
        None, description="Workers start all together or not at all; none: each when it can."
    )
    liveness_seconds: int = Field(
        1800,
        ge=0,
        description="Seconds for which a worker may not answer before its pod is started again. 0: "
        "for ever.",
    )
    operator_namespace: str = Field(
        "dask-operator", description="Namespace of Dask's operator, which may ask the scheduler."
    )
    destinations: list[NetworkDestination] = Field(
        default_factory=list,
        description="What workers may reach outside the cluster: the store, a model hub, judges. "
        "Never the addresses at which clouds hand out credentials.",
    )
    flow: KubernetesFlow = Field(
        default=KubernetesFlow(), description="The flow's own pod (refrain kubernetes render)."
    )
    pools: dict[str, KubernetesPool] = Field(
        default_factory=dict, description="What single pools want otherwise, by pool."
    )


def patch_sentence(kubernetes: KubernetesConfig) -> str:
    """What is wrong with the first patch that cannot be meant so; empty where none is."""
    place = "cluster.kubernetes"
    faults = [*_faults(f"{place}.patch", kubernetes.patch, PROGRAMS)]
    faults += _faults(f"{place}.flow.patch", kubernetes.flow.patch, ("flow",))
    for name, pool in kubernetes.pools.items():
        faults += _faults(f"{place}.pools.{name}.patch", pool.patch, ("worker",))
    return next(iter(faults), "")


def _faults(place: str, patch: Any, programs: Sequence[str]) -> Iterator[str]:
    """programs: containers that the pods may have."""
    for field, value in patch.items() if isinstance(patch, dict) else ():
        below = f"{place}.{field}"
        if field == "containers" and not isinstance(value, list):
            yield f"{below} would leave the pod without its program. Write a list, or remove it."
        if field not in LIST_KEYS or not isinstance(value, list):
            yield from _faults(below, value, programs)
            continue
        key = LIST_KEYS[field]
        for number, entry in enumerate(value):
            if not isinstance(entry, dict) or not isinstance(entry.get(key), str | int):
                yield f"{below}.{number} has no {key}, by which entries are merged. Set it."
                continue
            if field in ("containers", "initContainers"):
                names = programs if field == "containers" else ()
                yield from _foreign(below, str(entry[key]), "image" in entry, names)
            yield from _faults(f"{below}.{number}", entry, programs)


def _foreign(place: str, name: str, image: bool, programs: Sequence[str]) -> Iterator[str]:
    """A container that the pods do not have, where it is no whole one, or called almost as theirs."""
    if name in programs:
        return
    if near := difflib.get_close_matches(name.lower(), programs, n=1):
        yield f"{place} has {name}. Did you mean {near[0]}? Call another container less like it."
    elif not image:
        hint = f", and that of these pods is {' or '.join(programs)}" if programs else ""
        yield f"{place} has {name} without an image{hint}. Give it an image, or the pods' own name."


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
    def _no_credentials(self) -> PoolConfig:
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
        """The pool on which a role lives; one that names none has that of another role."""
        pool: str | None = dict(self)[role]
        if pool is not None:
            return pool
        if role in ("opponent", "evaluation"):
            return self.rollout
        return self.actor if role in ("aggregator", "critic", "teacher") else self.reward


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
    def _consistent(self) -> ClusterConfig:
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
        for pool, config in self.pools.items():
            per_job = self.slurm.workers_per_job(pool)
            if config.workers % per_job:
                raise ValueError(
                    f"cluster.slurm.pools.{pool}.workers_per_job = {per_job} does not divide "
                    f"cluster.pools.{pool}.workers. Set it to a divisor of {config.workers}."
                )

    def _pools_of_pods(self) -> None:
        for name, pods in self.kubernetes.pools.items():
            if name not in self.pools:
                raise ValueError(
                    f"cluster.kubernetes.pools.{name} is of no pool. Name it as one of "
                    f"{sorted(self.pools)}, or add cluster.pools.{name}."
                )
            memory = self.pools[name].memory_gib
            if memory is not None and pods.shared_memory_gib >= memory:
                raise ValueError(
                    f"cluster.kubernetes.pools.{name}.shared_memory_gib = {pods.shared_memory_gib:g} "
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
