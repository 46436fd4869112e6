"""The environment variables that Refrain reads. No other module reads one."""

import os


def prefect_api_url() -> str | None:
    """PREFECT_API_URL: the server to use; none starts one inside the run."""
    return os.environ.get("PREFECT_API_URL") or None


def user() -> str:
    """Who started this process, for lease owners and run tags."""
    return os.environ.get("USER") or os.environ.get("LOGNAME") or "unknown"


def visible_gpus() -> tuple[str, ...] | None:
    """CUDA_VISIBLE_DEVICES: the GPUs that may be used; None when it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    return tuple(part.strip() for part in value.split(",") if part.strip() not in ("", "-1"))
