"""Where batches, policy versions and trainer states are kept, and for how long."""

import sys
from typing import Literal, Self

import yaml
from pydantic import Field, ValidationInfo, field_validator, model_validator

from configs.base import Settings
from configs.environment import refuse_password, refuse_secrets

CONTINUE_FROM = r"^(models:/[^@/\s]+@[^@/\s]+|[A-Za-z0-9][A-Za-z0-9._-]*(@[1-9][0-9]*)?)$"

ContinueState = Literal["weights", "trainer"]
ContinueData = Literal["unseen", "cursor", "restart"]


class StoreConfig(Settings):
    """The object store."""

    uri: str = Field(
        "file://.refrain/store",
        description="fsspec address of the folder or bucket that holds runs: file://, s3://, …",
    )
    options: dict[str, str | int | float | bool] = Field(
        default_factory=dict,
        description="Arguments of the fsspec file system, such as endpoint_url. No credentials: "
        "those come from the environment. For S3, conditional_writes=false names an endpoint that "
        "has none (docs/operations.md). For file://, shared_by_group=true lets the folder's group "
        "read and write what is stored; without it only who started the run can.",
    )
    snapshot_every: int = Field(
        10, ge=1, description="Steps between snapshots of the trainer's state."
    )
    keep_versions: int = Field(
        3,
        ge=1,
        description="Policy versions kept besides the first, those at snapshots and registered ones.",
    )
    keep_registered: int | None = Field(
        10,
        ge=0,
        description="Versions of the model registry whose weights are kept, the newest. One that has "
        "an alias stays besides, whatever its age, for as long as it has it; null keeps all.",
    )
    keep_registered_days: float = Field(
        0.0,
        ge=0,
        description="Registered versions that are younger, in days, are kept besides, however many.",
    )
    whole_every: int = Field(
        1,
        ge=1,
        description="Of so many policy versions one is stored whole, the others as the exact "
        "difference from it, which takes less of the network and of the store and more of the "
        "processor (docs/decisions/delta-versions.md). 1 stores each whole, and so is each version "
        "at a snapshot, and each in float32. A store that is not local needs node_cache_gib too.",
    )
    node_cache_gib: float = Field(
        0.0,
        ge=0,
        description="What each machine keeps of policy versions, where the store is not local, in "
        "GiB of its temporary folder: its engines read each version once together, and those on the "
        "trainer's machine while it is on its way to the store. Two whole versions should fit. 0 "
        "keeps nothing.",
    )
    # Enough for every recipe here to be looked up whole, and an end to what a long run fills.
    keep_steps: int | None = Field(
        1000,
        ge=1,
        description="Steps whose batches are kept, by which samples are looked up (flows.lineage), "
        "recounted (flows.audit) and updates made again (flows.replay, together with "
        "keep_snapshots); null keeps all. Those that the kept snapshots need always stay, and "
        "commits, which have every count, version and digest.",
    )
    keep_snapshots: int = Field(2, ge=1, description="Snapshots of the trainer's state kept.")
    cache_mib: int = Field(256, ge=0, description="Batch cache of each worker, in MiB.")

    @field_validator("options", mode="before")
    @classmethod
    def _no_credentials(cls, options: object) -> object:
        if isinstance(options, dict):
            refuse_secrets(
                "store.options",
                options,
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or your provider's variables) in "
                "the environment instead.",
            )
        return options

    @field_validator("uri")
    @classmethod
    def _no_password(cls, uri: str) -> str:
        refuse_password("store.uri", uri)
        return uri

    @model_validator(mode="after")
    def _bases_are_kept(self) -> Self:
        local = self.uri.partition("://")[0] in ("file", "local", self.uri)
        if self.whole_every > 1 and not local and not self.node_cache_gib:
            raise ValueError(
                f"whole_every = {self.whole_every} with the store {self.uri} has every engine read "
                "two versions at each step. Set store.node_cache_gib, twice a version's size or more."
            )
        return self

    @property
    def node_cache_bytes(self) -> int:
        return int(self.node_cache_gib * 2**30)

    def words(self) -> list[str]:
        """The words by which a command finds this store: none for the default one."""
        changed = {} if self.uri == StoreConfig().uri else {"store.uri": self.uri}
        options = {f"store.options.{key}": value for key, value in self.options.items()}
        return [f"{key}={_as_yaml(value)}" for key, value in {**changed, **options}.items()]


def _as_yaml(value: str | int | float | bool) -> str:
    """A value as the value of a word; text that might be taken for a number is in quotes."""
    quote = "'" if isinstance(value, str) and not value[:1].isalpha() else None
    dumped = yaml.safe_dump(value, width=sys.maxsize, default_style=quote)
    return dumped.removesuffix("...\n").rstrip("\n")


class TrackingConfig(Settings):
    """MLflow."""

    uri: str = Field("sqlite:///.refrain/mlflow.db", description="MLflow's tracking address.")
    experiment: str = Field("refrain", description="MLflow experiment.")
    also: list[Literal["wandb", "trackio", "tensorboard"]] = Field(
        default_factory=list,
        description="Trackers that get the run's curves and settings too while it goes, by the names "
        "that they have in MLflow; the experiment is the project there (docs/trackers.md).",
    )
    tensorboard_folder: str = Field(
        ".refrain/tensorboard",
        description="Folder of TensorBoard's event files, with one for each experiment and run.",
    )
    registered_model: str | None = Field(
        None, description="Name in the model registry; none takes the run family's name."
    )
    copy_models: bool = Field(
        False,
        description="Whether each registered policy version is copied whole into MLflow's artifacts, "
        "where any client of MLflow loads it. Without, it lies in the store alone: a client loads it "
        "from there, and needs Refrain installed where MLflow alone cannot read it "
        "(docs/monitoring.md). Copies are kept until somebody deletes them in MLflow.",
    )
    traced_samples: int = Field(
        1,
        ge=0,
        le=100,
        description="Samples of each step, best to worst, that are traces in MLflow: prompt, answer, "
        "reward, and of an episode its turns. 0 makes none.",
    )
    prometheus_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port at which the live run tells Prometheus the metrics of its last step "
        "(infra/grafana.json shows them); none: it does not.",
    )
    prometheus_host: str = Field(
        "127.0.0.1",
        description="Address at which it does; with another than loopback whoever reaches the "
        "machine can read them.",
    )
    metrics_every: float = Field(
        15.0,
        ge=0,
        description="Seconds between looks at workers, queues, GPUs, vLLM and the store for "
        "Prometheus (docs/monitoring.md). 0 looks at none of them.",
    )
    metrics_folder: str = Field(
        ".refrain/metrics",
        description="Folder in which a run leaves, after each look, the file that `refrain "
        "exporter` reads. With one that all users of a machine share, one exporter tells of all "
        "their runs.",
    )
    push_gateway: str | None = Field(
        None,
        description="Address of a Prometheus push gateway that is sent the metrics after each "
        "look, where nobody can reach the flow's machine; none: no such.",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="Address of an OpenTelemetry collector (OTLP over HTTP, such as "
        "http://127.0.0.1:4318), which gets a trace of each step; none: no traces are made.",
    )
    system_metrics: int = Field(
        10,
        ge=0,
        description="Seconds between samples of each machine (processors, memory, disk, network, "
        "GPUs) on the run's page in MLflow: of the flow's, and of those that workers run on. 0 takes "
        "none.",
    )
    shown_samples: int = Field(
        3,
        ge=0,
        le=20,
        description="Samples of each step, best to worst, whose prompt and answer are shown on the "
        "dashboard. 0 shows none there; `refrain samples` shows any.",
    )

    @field_validator("uri", "push_gateway", "otlp_endpoint")
    @classmethod
    def _no_password(cls, uri: str | None, info: ValidationInfo) -> str | None:
        if uri is not None:
            refuse_password(f"tracking.{info.field_name}", uri)
        return uri

    @field_validator("push_gateway", "otlp_endpoint")
    @classmethod
    def _over_http(cls, address: str | None, info: ValidationInfo) -> str | None:
        if address is not None and not address.startswith(("http://", "https://")):
            raise ValueError(
                f"tracking.{info.field_name} = {address} is no address over HTTP. Set it to one such "
                "as http://127.0.0.1:9091."
            )
        return address

    @model_validator(mode="after")
    def _pushes_something(self) -> Self:
        if self.push_gateway is not None and not self.metrics_every:
            raise ValueError(
                "tracking.push_gateway is sent the metrics every tracking.metrics_every seconds, "
                "which is 0. Set it to 15."
            )
        return self
