"""Where batches, policy versions and trainer states are kept, and for how long."""

from pydantic import Field

from configs.base import Settings


class StoreConfig(Settings):
    """The object store."""

    uri: str = Field(
        "file://.refrain/store",
        description="fsspec address of the folder or bucket that holds runs: file://, s3://, …",
    )
    options: dict[str, str | int | float | bool] = Field(
        default_factory=dict,
        description="Arguments of the fsspec file system, such as endpoint_url. No credentials: "
        "those come from the environment.",
    )
    snapshot_every: int = Field(
        10, ge=1, description="Steps between snapshots of the trainer's state."
    )
    keep_versions: int = Field(
        3, ge=1, description="Policy versions kept besides those at snapshots and tagged ones."
    )
    keep_steps: int | None = Field(
        None, ge=1, description="Steps whose batches are kept; none keeps all."
    )
    keep_snapshots: int = Field(2, ge=1, description="Snapshots of the trainer's state kept.")
    cache_mib: int = Field(256, ge=0, description="Batch cache of each worker, in MiB.")


class TrackingConfig(Settings):
    """MLflow."""

    uri: str = Field("sqlite:///.refrain/mlflow.db", description="MLflow's tracking address.")
    experiment: str = Field("refrain", description="MLflow experiment.")
    registered_model: str | None = Field(
        None, description="Name in the model registry; none takes the run family's name."
    )
