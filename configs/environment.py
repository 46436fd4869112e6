"""The environment variables that Refrain reads. No other module reads one."""

import os


def prefect_api_url() -> str | None:
    """PREFECT_API_URL: the server to use; none starts one inside the run."""
    return os.environ.get("PREFECT_API_URL") or None


def user() -> str:
    """Who started this process, for lease owners and run tags."""
    return os.environ.get("USER") or os.environ.get("LOGNAME") or "unknown"
