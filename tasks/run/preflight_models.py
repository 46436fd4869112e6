"""Whether the train engine computes what the models of a run are: the check that starts processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from configs.grpo import GRPOConfig
from configs.lora import LoraConfig
from configs.model import Model, PretrainedModel
from configs.train import TrainConfig
from engines.models.checkpoints import present
from engines.models.facts import model_facts
from engines.train.self_test.testing import self_test
from engines.train.self_test.verdict import Verdict
from tasks.run.features import features_of
from tasks.run.findings import Finding, PreflightError


@contextmanager
def models_tested(
    config: GRPOConfig, resumed: bool = False
) -> Iterator[Callable[[], list[Finding]]]:
    """Begin the self-tests of a run's models; what is given waits for what they say.

    It raises PreflightError for a model of which the train engine would compute something else. A
    resumed run is only warned: its steps were made so.
    """
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
    found = f"{path}: its files are not here yet; its weights are compared when the trainer stands"
    return Finding(check="self-test", found=found)


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
        said = (
            f"{where}.path = {path}: its code cannot compute with weights in bfloat16 "
            f"({verdict.unrounded}). Set train.compute_dtype = float32."
        )
        if not resumed:
            raise PreflightError(said)
        return Finding(check="self-test", found=said, warning=True)
    if verdict.untested is not None:
        return Finding(
            check="self-test",
            found=f"{where}.path = {path} was not tested beside transformers: {verdict.untested}.",
            warning=True,
        )
    if verdict.refused is None:
        setting, instead = train.of_experts
        known = verdict.told if train.router_replay else verdict.routers > 0
        if where == "model" and setting and not known:
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
    said = f"{where}.path = {path}: {verdict.refused}{wrong}."
    if not resumed:
        raise PreflightError(f"{said} Set {where}.path to another model.")
    return Finding(check="self-test", found=f"{said} A new run would be refused.", warning=True)


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
