"""The environment variables that Refrain reads. No other module reads one."""

import os


def user() -> str:
    """Who started this process, for lease owners and run tags."""
    return os.environ.get("USER") or os.environ.get("LOGNAME") or "unknown"
