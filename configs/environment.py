"""What Refrain finds where it runs: variables, the working folder, packages; credentials it refuses.

No other module reads a variable. Settings are stored, shown and logged, so what looks like a
credential is refused there. Refrain is on no package index, so an extra of it can be named in a
checkout alone. The packages themselves are there, and their ranges are in the metadata of what is
installed.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

SECRET = re.compile(
    r"secret|passw(or)?d|credential|(private|access|api|account)_?key|^key$|(^|_)token($|_)",
    re.IGNORECASE,
)
IN_ADDRESS = re.compile(r"^[a-z0-9+.-]+://[^/@]*:[^/@]+@", re.IGNORECASE)

DISTRIBUTION = "refrain-rl"
_NAME = re.compile(r"[\w.-]+")

GIT = "git"  # of run.json
GIT_SECONDS = 10.0  # seconds that git may take


def user() -> str:
    """Who started this process, for lease owners and run tags."""
    return os.environ.get("USER") or os.environ.get("LOGNAME") or "unknown"


def push_gateway_login() -> tuple[str, str] | None:
    """User and password that a Prometheus push gateway asks for, or a proxy before it."""
    user, password = (
        os.environ.get(f"REFRAIN_PUSH_GATEWAY_{part}") for part in ("USER", "PASSWORD")
    )
    return None if user is None or password is None else (user, password)


def import_from_working_folder() -> None:
    """Let modules of the working folder be imported, where `python -P` does not: a user's reward.

    At the end of the path, where a folder `configs` or `tasks` of the user's hides none of ours. The
    processes below this one take the path over. Commands do the same in flows/__init__.py.
    """
    folder = os.getcwd()
    if not {"", folder} & set(sys.path):
        sys.path.append(folder)


def visible_gpus() -> tuple[str, ...] | None:
    """CUDA_VISIBLE_DEVICES: the GPUs that may be used; None when it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    return tuple(part.strip() for part in value.split(",") if part.strip() not in ("", "-1"))


def compilers(gpu: bool) -> tuple[str, ...]:
    """CXX or CC: any of these compiles for torch, C++ for a CPU, C for Triton's calls of a GPU."""
    if gpu:
        return (os.environ["CC"],) if os.environ.get("CC") else ("gcc", "clang")
    return (os.environ.get("CXX") or "g++",)


@cache
def cpu_multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's CPU has instructions that torch and vLLM use for bfloat16.

    On x86 those of AVX-512, on ARM those of bf16. Where they lack, products in bfloat16 take several
    times as long as in float32. True where it is not known.
    """
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return True
    features = [line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))]
    return not features or {"avx512bw", "bf16"} & set(features[0].split()) != set()


@cache
def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Maker, family and model of this machine's CPU: libraries choose their kernels by them.

    Empty where the machine does not say.
    """
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    facts: dict[str, str] = {}  # of the first processor
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    x86 = ("vendor_id", "cpu family", "model")
    arm = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part")
    return " ".join(facts[name] for name in (*x86, *arm) if facts.get(name))


def given(names: Iterable[str]) -> dict[str, str]:
    """Those of these variables that are set; for workers on other machines."""
    return {name: os.environ[name] for name in names if name in os.environ}


def own_pod() -> dict[str, str] | None:
    """Name and uid of the Kubernetes pod that this process runs in, as its manifest gives them."""
    name, uid = os.environ.get("REFRAIN_POD_NAME"), os.environ.get("REFRAIN_POD_UID")
    return {"name": name, "uid": uid} if name and uid else None


def health_pages() -> list[str]:
    """REFRAIN_HEALTH_URL: addresses, by spaces, that answer while what runs here is well."""
    return os.environ.get("REFRAIN_HEALTH_URL", "").split()


def mlflow_database() -> str | None:
    """MLFLOW_BACKEND_STORE_URI: the database of a team's MLflow server, password included."""
    return os.environ.get("MLFLOW_BACKEND_STORE_URI")


def cache_folder() -> Path:
    """Where files are kept that can be made again: XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "refrain")


def secret_keys(settings: Mapping[str, object], prefix: str = "") -> Iterable[str]:
    """Dotted names of the settings that look like credentials, groups within groups included."""
    for name, value in settings.items():
        if SECRET.search(name):
            yield f"{prefix}{name}"
        elif isinstance(value, Mapping):
            yield from secret_keys(value, f"{prefix}{name}.")


def refuse_secrets(where: str, settings: Mapping[str, object], remedy: str) -> None:
    """ValueError when a setting's name looks like a credential's; the value is not repeated."""
    for name in secret_keys(settings):
        raise ValueError(
            f"{where}.{name} looks like a credential, and settings are stored with the run, in "
            f"MLflow and in Prefect. Remove it; {remedy}"
        )


def refuse_password(where: str, address: str) -> None:
    """ValueError when an address holds a password."""
    if IN_ADDRESS.match(address):
        raise ValueError(
            f"{where} holds a password, and settings are stored with the run, in MLflow and in "
            "Prefect. Take it out of the address and give it by the environment, on Kubernetes by a "
            "Secret (cluster.kubernetes.secret)."
        )


def pip_install(*packages: str) -> str:
    """`pip install` of packages, each in the range that Refrain goes with; any where none is said."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # a checkout that is not installed
        lines = []
    extras = [line.partition(";")[0].strip() for line in lines]  # as pip takes them
    ranges = {match.group(): line for line in extras if (match := _NAME.match(line))}
    return shlex.join(["pip", "install", *(ranges.get(name, name) for name in packages)])


def installed(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkingTree:
    """The state of a working folder."""

    commit: str  # digest of the last commit
    changed: bool  # whether a file that is under git, or could be, differs from it


def working_tree(folder: Path) -> WorkingTree | None:
    """The state of a folder; None where it is not under git, or git is not installed."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    return WorkingTree(commit=commit, changed=bool(_git(folder, "status", "--porcelain")))


def _git(folder: Path, *words: str) -> str:
    """What git says; empty where it fails."""
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
