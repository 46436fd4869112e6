"""Which packages are installed, and the command that installs one which only some settings need.

Refrain is on no package index, so an extra of it can be named in a checkout alone. The packages
themselves are there, and their ranges are in the metadata of what is installed.
"""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires, version

DISTRIBUTION = "refrain-rl"
_NAME = re.compile(r"[\w.-]+")


def pip_install(*packages: str) -> str:
    """`pip install` of packages, each in the range that Refrain goes with; any where none is said."""
    ranges = _ranges()
    return shlex.join(["pip", "install", *(ranges.get(name, name) for name in packages)])


def installed(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _ranges() -> dict[str, str]:
    """Packages of all extras by name, as pip takes them."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # a checkout that is not installed
        return {}
    wanted = [line.partition(";")[0].strip() for line in lines]
    return {match.group(): line for line in wanted if (match := _NAME.match(line))}
