"""Every method that a recipe can name, read from the settings themselves: a new one is found here."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from configs.algorithm import advantages, algorithm, corrections, losses

Recipe = dict[str, Any]  # settings below `algorithm`


def choices(union: Any) -> dict[str, type[BaseModel]]:
    """Kind -> settings of each member of a union, without a user's own function."""
    members = typing.get_args(typing.get_args(union)[0])
    kinds = {member.model_fields["kind"].default: member for member in members}
    kinds.pop("function")
    return kinds


def minimal(settings: type[BaseModel]) -> dict[str, Any]:
    """The settings of a method, with 2 for those that have no default."""
    return {name: 2 for name, field in settings.model_fields.items() if field.is_required()}


def chosen(union: Any) -> dict[str, dict[str, Any]]:
    """Kind -> the least that a recipe says to choose it."""
    return {kind: {"kind": kind, **minimal(model)} for kind, model in choices(union).items()}


def literals(model: type[BaseModel], field: str) -> tuple[str, ...]:
    """The values that a setting can have."""
    annotation = model.model_fields[field].annotation
    return typing.get_args(annotation)


ADVANTAGES = chosen(advantages.Advantage)
BY_GRPO = {  # the other flows' estimators left out
    kind: choice
    for kind, choice in ADVANTAGES.items()
    if kind not in ("gae", "tree", "tree_segment", "tree_sibling")
}
LOSSES = chosen(losses.Loss)
CORRECTIONS = chosen(corrections.CorrectionStep)
SELECTIONS = chosen(corrections.SelectionStep)
SELECTIONS["success_rate"] |= {"low": 0.0, "success": 0.5}  # few of tiny's answers are digits
RATIOS = literals(algorithm.AlgorithmConfig, "ratio_against")
AGGREGATIONS = typing.get_args(algorithm.Aggregation)
PENALTIES = {
    name: minimal(typing.get_args(field.annotation)[0])
    for name, field in corrections.ShapingConfig.model_fields.items()
    if name != "truncated"
}


def kl_recipes() -> Iterator[tuple[str, Recipe]]:
    """Every estimator at every place where it can stand, plain and unbiased."""
    for estimator in literals(algorithm.KLConfig, "estimator"):
        for placement in literals(algorithm.KLConfig, "placement"):
            if placement == "reward" and estimator.endswith("+"):
                continue  # refused: a reward has no gradient
            kl = {"coefficient": 0.1, "estimator": estimator, "placement": placement}
            name = estimator.replace("+", "-straight-through")
            yield f"kl-{name}-{placement}", {"kl": kl}
    yield "kl-unbiased", {"kl": {"coefficient": 0.1, "unbiased": True}}


def correction_recipes() -> Iterator[tuple[str, Recipe]]:
    """Every correction; those with levels at both, raw and divided by the batch's mean."""
    for kind, recipe in CORRECTIONS.items():
        if kind in ("truncate", "band"):
            for level in literals(corrections.WeightCorrection, "level"):
                for normalize in (False, True):
                    step = {**recipe, "level": level, "normalize": normalize}
                    name = f"correction-{kind}-{level}" + ("-normalized" if normalize else "")
                    yield name, {"correction": [step]}
        elif kind == "reject":
            for statistic in literals(corrections.RejectCorrection, "statistic"):
                yield (
                    f"correction-{statistic}",
                    {"correction": [{**recipe, "statistic": statistic}]},
                )
        else:
            yield f"correction-{kind}", {"correction": [recipe]}


def recipes() -> dict[str, Recipe]:
    """Name -> a recipe that differs from the default in one method."""
    found: dict[str, Recipe] = {}
    for kind, choice in ADVANTAGES.items():
        found[f"advantage-{kind}"] = {"advantage": choice}
    for kind, choice in LOSSES.items():
        found[f"loss-{kind}"] = {"loss": choice}
    for name in AGGREGATIONS:
        found[f"aggregation-{name}"] = {"aggregation": name}
    found.update(kl_recipes())
    found.update(correction_recipes())
    for name in RATIOS:
        bypass = {"ratio_against": name, "correction": [{"kind": "truncate"}]}
        found[f"ratio-{name}"] = bypass | {"loss": {"kind": "reinforce"}}
    for kind, choice in SELECTIONS.items():
        found[f"selection-{kind}"] = {"selection": [choice]}
    for name, penalty in PENALTIES.items():
        found[f"shaping-{name}"] = {"shaping": {name: penalty}}
    for value in literals(corrections.ShapingConfig, "truncated"):
        found[f"shaping-truncated-{value}"] = {"shaping": {"truncated": value}}
    found["entropy"] = {"entropy": {"coefficient": 0.01}}
    found["entropy-floor"] = {"entropy": {"coefficient": 0.01, "floor": 2.0}}
    found["entropy-top-share"] = {"entropy": {"top_share": 0.2}}
    for name in AGGREGATIONS:
        critic = {"advantage": {"kind": "gae"}, "critic": {"aggregation": name, "clip": None}}
        found[f"critic-{name}"] = critic
    return found


def covering(position: int) -> Recipe:
    """Of every list of methods the one at `position`, counted round: a recipe with many choices."""
    corrected = [recipe["correction"][0] for _, recipe in correction_recipes()]
    penalties = list(PENALTIES.items())
    estimators = [recipe["kl"] for _, recipe in kl_recipes()]

    def at(values: list[Any]) -> Any:
        return values[position % len(values)]

    recipe: Recipe = {
        "advantage": at(list(BY_GRPO.values())),
        "loss": at(list(LOSSES.values())),
        "aggregation": at(list(AGGREGATIONS)),
        "kl": {**at(estimators), "controller": at(["adaptive", "fixed"])},
        "correction": [at(corrected), at(list(reversed(corrected)))],
        "selection": [at(list(SELECTIONS.values()))],
        "shaping": dict([at(penalties)]),
        "entropy": {"coefficient": 0.001},
    }
    recipe["shaping"]["truncated"] = at(list(literals(corrections.ShapingConfig, "truncated")))
    if recipe["shaping"]["truncated"] == "zero":  # groups of equal rewards would all be left out
        recipe["selection"] = [SELECTIONS["best_of"]]
    if recipe["advantage"]["kind"] == "gdpo":
        recipe["kl"]["placement"] = "loss"
    return recipe


def words(recipe: Mapping[str, Any]) -> list[str]:
    """A recipe as key=value words of a command line."""
    import json

    return [f"algorithm.{name}={json.dumps(value)}" for name, value in recipe.items()]
