"""Recipes and functions agree: every name is in both, with the same parameters."""

import inspect
import subprocess
import sys
import typing

import pytest
from pydantic import TypeAdapter, ValidationError

from configs.algorithm import advantages, algorithm, corrections, losses
from configs.algorithm.algorithm import AlgorithmConfig
from configs.base import Method
from engines.algorithms.advantages import ADVANTAGES
from engines.algorithms.kl import KL_ESTIMATORS
from engines.algorithms.losses import POLICY_LOSSES
from engines.algorithms.rollout_correction import CORRECTIONS
from engines.algorithms.sample_selection import SELECTIONS

TABLES = [
    (advantages.Advantage, ADVANTAGES),
    (losses.Loss, {name: method.loss for name, method in POLICY_LOSSES.items()}),
    (corrections.CorrectionStep, CORRECTIONS),
    (corrections.SelectionStep, SELECTIONS),
]


def choices(union) -> dict[str, type[Method]]:
    """Kind -> settings of each choice of a union."""
    members = typing.get_args(typing.get_args(union)[0])
    return {m.model_fields["kind"].default: m for m in members}


@pytest.mark.parametrize(("union", "table"), TABLES)
def test_every_name_of_a_recipe_is_a_function_and_the_other_way_round(union, table):
    assert set(choices(union)) - {"function"} == set(table)


@pytest.mark.parametrize(("union", "table"), TABLES)
def test_settings_are_the_parameters_of_the_function(union, table):
    for kind, settings in choices(union).items():
        if kind == "function":
            continue
        parameters = inspect.signature(table[kind]).parameters.values()
        own = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        # Which rewards a rule of selection is given is for its caller.
        assert set(settings.model_fields) - {"kind", "rewards"} == own, kind
        assert all(p.default is p.empty for p in parameters), f"{kind}: a default stands once"


@pytest.mark.parametrize(("union", "table"), TABLES)
def test_every_method_cites_its_source_and_every_setting_is_described(union, table):
    for kind, settings in choices(union).items():
        assert settings.__doc__
        assert all(f.description or n == "kind" for n, f in settings.model_fields.items()), kind
    for kind, function in table.items():
        assert function.__doc__, kind


def test_selecting_methods_take_the_parameters_of_their_loss():
    for name, method in POLICY_LOSSES.items():
        if method.select is not None:
            ours = inspect.signature(method.select).parameters
            assert list(ours) == list(inspect.signature(method.loss).parameters), name


def test_estimators_of_the_recipe_are_those_of_the_table():
    names = typing.get_args(algorithm.KLConfig.model_fields["estimator"].annotation)
    assert set(names) == set(KL_ESTIMATORS)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"loss": {"kind": "clipped", "dual_clip": 1.0}}, "greater than 1"),
        ({"loss": {"kind": "ppo"}}, "clipped"),
        ({"loss": {"kind": "dro", "beta": 0.0}}, "greater than 0"),
        ({"loss": {"kind": "function", "path": "engines.nowhere:f"}}, "no module"),
        (
            {"loss": {"kind": "function", "path": "engines.algorithms.kl:nothing"}},
            "has no 'nothing'",
        ),
        ({"loss": {"kind": "function", "path": "nothing"}}, "pattern"),
        ({"correction": [{"kind": "band", "lower": 3.0, "upper": 2.0}]}, "Swap them"),
        ({"correction": [{"kind": "truncate", "upper": True}]}, "valid number"),
        ({"correction": [{"kind": "reject", "statistic": "token_k2", "lower": 0.1}]}, "no lower"),
        ({"kl": {"placement": "reward", "estimator": "k3+"}}, "estimator = k3"),
        ({"shaping": {"overlong": {"buffer": 9, "max_tokens": 4}}}, "longer than"),
        ({"entropy": {"weight": 1.0}}, "Extra inputs"),
        (
            {
                "correction": [{"kind": "band", "normalize": True}],
                "ratio_against": "rollout_logprobs",
            },
            "Set normalize = false",
        ),
        (
            {"advantage": {"kind": "gdpo"}, "kl": {"placement": "reward", "coefficient": 0.1}},
            "Set algorithm.kl.placement = loss",
        ),
        (
            {"proximal": "loglinear", "ratio_against": "rollout_logprobs"},
            "does not use. Set proximal = recompute",
        ),
        (
            {"proximal": "loglinear", "correction": [{"kind": "truncate", "normalize": True}]},
            "the exact ones are there. Set algorithm.proximal = recompute",
        ),
        (
            {"proximal": "loglinear", "advantage": {"kind": "optimal_token_baseline"}},
            "Set algorithm.proximal = recompute",
        ),
        (
            {"proximal": "loglinear", "kl": {"coefficient": 0.1, "placement": "reward"}},
            "Set algorithm.proximal = recompute",
        ),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_remedy(recipe, message):
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig.model_validate(recipe)


def test_what_a_recipe_needs():
    def made(**recipe):
        return AlgorithmConfig.model_validate(recipe)

    assert not made().needs_critic
    assert made(advantage={"kind": "gae"}).needs_critic
    assert made(kl={"coefficient": 0.1}).needs_reference
    assert not made(correction=[{"kind": "band"}]).needs_stored_logprobs
    assert made(correction=[{"kind": "band", "normalize": True}]).needs_stored_logprobs
    token_baseline = made(advantage={"kind": "multi_turn_optimal_token_baseline"})
    assert token_baseline.needs_stored_logprobs and token_baseline.needs_squares
    assert made(advantage={"kind": "remax"}).needs_baselines
    assert made(kl={"coefficient": 0.1, "placement": "reward"}).needs_stored_logprobs
    plain = made()
    assert not (plain.needs_stored_logprobs or plain.needs_squares or plain.needs_baselines)


def test_a_recipe_survives_json():
    recipe = AlgorithmConfig.model_validate(
        {"advantage": {"kind": "gdpo", "weights": {"a": 2.0}}, "correction": [{"kind": "veto"}]}
    )
    again = TypeAdapter(AlgorithmConfig).validate_json(recipe.model_dump_json())
    assert again == recipe


def test_settings_import_no_torch():
    code = "import sys, configs.algorithm.algorithm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_users_path_is_checked_without_running_it():
    code = (
        "import sys; from configs.algorithm.algorithm import AlgorithmConfig as A;"
        "A.model_validate({'loss': {'kind': 'function', 'path': 'engines.algorithms.losses:sapo'}});"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
