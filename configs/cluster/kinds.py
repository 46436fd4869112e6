"""How each kind of cluster is reached: Slurm jobs, Kubernetes pods, machines behind SSH; TLS."""

from typing import Annotated, Literal

from pydantic import Field

from configs.base import LocalFile, Settings


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
    """The job of the flow itself, when a run is submitted by `python -m flows.cluster submit`."""

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
        default=SlurmFlow(), description="The flow's own job (python -m flows.cluster submit)."
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


class KubernetesPool(Settings):
    """What a pool's pods want otherwise than the rest."""

    node_selector: dict[str, str] = Field(
        default_factory=dict, description="Labels of the nodes that the pool's pods run on."
    )
    shared_memory_gib: float = Field(1.0, gt=0, description="Size of /dev/shm in each pod, in GiB.")


class KubernetesConfig(Settings):
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
    pools: dict[str, KubernetesPool] = Field(
        default_factory=dict, description="What single pools want otherwise, by pool."
    )
