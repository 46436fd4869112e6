"""The environment variables that Refrain reads. No other module reads one."""

import os
from collections.abc import Iterable


def user() -> str:
    """Who started this process, for lease owners and run tags."""
    return os.environ.get("USER") or os.environ.get("LOGNAME") or "unknown"


def visible_gpus() -> tuple[str, ...] | None:
    """CUDA_VISIBLE_DEVICES: the GPUs that may be used; None when it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    return tuple(part.strip() for part in value.split(",") if part.strip() not in ("", "-1"))


def given(names: Iterable[str]) -> dict[str, str]:
    """Those of these variables that are set; for workers on other machines."""
    return {name: os.environ[name] for name in names if name in os.environ}


def own_pod() -> dict[str, str] | None:
    """Name and uid of the Kubernetes pod that this process runs in, as its manifest gives them."""
    name, uid = os.environ.get("REFRAIN_POD_NAME"), os.environ.get("REFRAIN_POD_UID")
    return {"name": name, "uid": uid} if name and uid else None


def mlflow_database() -> str | None:
    """MLFLOW_BACKEND_STORE_URI: the database of a team's MLflow server, password included."""
    return os.environ.get("MLFLOW_BACKEND_STORE_URI")
