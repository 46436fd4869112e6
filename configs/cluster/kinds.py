"""How each kind of cluster is reached: Slurm jobs, Kubernetes pods, machines behind SSH; TLS."""

from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator

from configs.base import LocalFile, Settings
from configs.environment import refuse_password

# Where clouds tell a machine's programs its credentials.
METADATA = (IPv4Network("169.254.0.0/16"), IPv6Network("fd00:ec2::/32"))


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


def lies_in(one: IPv4Network | IPv6Network, other: IPv4Network | IPv6Network) -> bool:
    """Whether all addresses of a network are of another one."""
    if isinstance(one, IPv4Network) and isinstance(other, IPv4Network):
        return one.subnet_of(other)
    if isinstance(one, IPv6Network) and isinstance(other, IPv6Network):
        return one.subnet_of(other)
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
        if any(lies_in(network, one) for one in METADATA):
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
