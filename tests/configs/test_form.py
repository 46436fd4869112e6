"""The settings as a form: complete, and checked by JSON schema as Prefect's server does it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

from configs.algorithm.advantages import Advantage
from configs.form import title_of
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from flows.grpo import grpo
from tasks.run.run import Run
from tests.configs.flow_settings import any_flows_recipes, of_flows
from tests.spread import spread


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return parameter_schema(grpo).model_dump_for_openapi()


def properties(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, definition in schema["definitions"].items():
        for key, field in definition.get("properties", {}).items():
            yield f"{name}.{key}", field
            for choice in field.get("anyOf", []):
                for inner, shown in choice.get("properties", {}).items():
                    yield f"{name}.{key}.{inner}", shown


def test_every_setting_has_a_title_and_a_meaning(schema: dict[str, Any]) -> None:
    named = list(properties(schema))
    assert len(named) > 150
    for name, field in named:
        target = schema["definitions"].get(field.get("$ref", "").rpartition("/")[2], {})
        assert field.get("title") or target.get("title"), name
        assert field.get("description") or target.get("description"), name


ADVANTAGE_KINDS = [
    choice.model_fields["kind"].default for choice in get_args(get_args(Advantage)[0])
]
WORDS: dict[str, tuple[str, ...]] = {  # without which a flow's settings are none
    "DistillConfig": ("teachers.t.model.kind=random", "rollout.max_new_tokens=16"),
    "SRPOConfig": (
        "episodes.environment.kind=class",
        "episodes.environment.path=engines.environments.builtin:Corridor",
    ),
}


@pytest.mark.parametrize("flow", of_flows().values())
def test_a_form_offers_the_estimators_that_its_flow_takes(flow: type[GRPOConfig]) -> None:
    taken = set()
    for kind in ADVANTAGE_KINDS:
        chosen = f"algorithm.advantage.kind={kind}"
        function = ("algorithm.advantage.path=os:getcwd",) if kind == "function" else ()
        with contextlib.suppress(ConfigError):
            load_recipe(flow, "tiny", [*WORDS.get(flow.__name__, ()), chosen, *function])
            taken.add(kind)
    schema = flow.model_json_schema()
    (algorithm,) = (
        schema["$defs"][name]
        for name in ("AlgorithmConfig", "DistillAlgorithm")
        if schema["properties"]["algorithm"]["$ref"].endswith(f"/{name}")
    )
    choice = algorithm["properties"]["advantage"]
    assert set(choice["properties"]["kind"]["enum"]) == taken
    text = json.dumps(choice)
    for kind in ADVANTAGE_KINDS:
        assert (f'"const": "{kind}"' in text) == (f'"{kind}"' in text) == (kind in taken), kind


@pytest.mark.parametrize("name", spread(any_flows_recipes(), 5))
def test_every_recipe_fits_the_form(schema: dict[str, Any], name: str) -> None:
    config = load_recipe(GRPOConfig, name).model_dump(mode="json")
    validate({"config": config}, schema, raise_on_error=True)


@pytest.mark.parametrize("name", any_flows_recipes())
def test_a_value_is_shown_in_the_tab_of_its_kind(schema: dict[str, Any], name: str) -> None:
    config = load_recipe(GRPOConfig, name)
    chosen = {"GRPOConfig.model": config.model, "DataConfig.source": config.data.source}
    for place, value in chosen.items():
        group, field = place.split(".")
        tabs = schema["definitions"][group]["properties"][field]["anyOf"]
        keys = set(value.model_dump())
        # Prefect's form takes the first tab that has most of the value's keys.
        shown = max(tabs, key=lambda tab: len(keys & set(tab["properties"])))
        assert value.kind in shown["properties"]["kind"]["enum"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"kind": "random", "layers": 0}}, "'config.model.layers'.*minimum of 1"),
        ({"model": {"kind": "pretrained"}}, "'config.model'.*'path' is a required property"),
        ({"model": {"kind": "tiny"}}, "'config.model'"),
        ({"continue_from": "models:/x"}, "'config.continue_from'"),
    ],
)
def test_a_refusal_names_the_setting(
    schema: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    config = load_recipe(GRPOConfig, "tiny").model_dump(mode="json")
    with pytest.raises(ValidationError, match=said):
        validate({"config": {**config, **change}}, schema, raise_on_error=True)


def test_the_form_asks_for_settings_and_never_for_a_run(schema: dict[str, Any]) -> None:
    assert list(schema["properties"]) == ["resume", "fork", "config"]
    assert schema["required"] == ["config"]


def groups(schema: Any) -> Iterator[dict[str, Any]]:
    """All groups of fields, on whatever level."""
    if isinstance(schema, dict):
        if "properties" in schema and "if" not in schema.get("properties", {}):
            yield schema["properties"]
        for inner in schema.values():
            yield from groups(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from groups(inner)


def in_order(fields: dict[str, Any]) -> list[str]:
    """As Prefect's form sorts them."""
    return sorted(fields, key=lambda name: fields[name]["position"])


def test_every_field_has_a_place_among_those_of_its_group(schema: dict[str, Any]) -> None:
    shown = {"properties": schema["properties"], "definitions": schema["definitions"]}
    checked = 0
    for fields in groups(shown):
        if set(fields) == {"kind"} and set(fields["kind"]) <= {"const", "enum"}:
            continue  # a condition of the rules
        assert sorted(field["position"] for field in fields.values()) == [*range(len(fields))]
        checked += 1
    assert checked > 100


def test_what_most_runs_set_comes_first(schema: dict[str, Any]) -> None:
    groups = {
        name: found["properties"]
        for name, found in schema["definitions"].items()
        if "properties" in found
    }
    assert in_order(schema["properties"]) == ["resume", "fork", "config"]
    assert in_order(groups["GRPOConfig"])[:5] == ["model", "data", "rewards", "steps", "train"]
    assert in_order(groups["TrainConfig"])[0] == "learning_rate"
    assert in_order(groups["RewardsConfig"])[0] == "functions"


# What a person fills in below `kind`, all else left empty.
@pytest.mark.parametrize(
    ("place", "given", "said"),
    [
        ("rewards", {"kind": "math"}, None),
        ("rewards", {"kind": "math", "answer_column": "solution", "weight": 0.5}, None),
        ("rewards", {"kind": "unit_tests", "sandbox": {"kind": "processes", "timeout": 9}}, None),
        ("rewards", {"kind": "function"}, "'path' is a required property"),
        ("rewards", {"kind": "math", "votes": 3}, r"'votes' was unexpected"),
        ("rewards", {"kind": "mathh"}, "'mathh' is not one of"),
        ("loss", {"kind": "gspo", "clip_low": 0.1}, None),
        ("loss", {"kind": "cispo", "clip_low": None}, None),
        ("loss", {"kind": "gspo", "beta": 0.1}, r"'beta' was unexpected"),
        ("loss", {"kind": "gspo", "clip_low": -1}, "clip_low.*less than"),
        ("advantage", {"kind": "grpo", "leave_one_out": True, "normalize": "batch"}, None),
        ("advantage", {"kind": "grpo_passk", "normalize": "batch"}, "normalize"),
    ],
)
def test_a_choice_of_many_is_one_group_that_its_kind_rules(
    schema: dict[str, Any], place: str, given: dict[str, Any], said: str | None
) -> None:
    config = load_recipe(GRPOConfig, "tiny").model_dump(mode="json")
    if place == "rewards":
        config["rewards"] = {"functions": [given]}
    else:
        config["algorithm"][place] = given
    if said is None:
        validate({"config": config}, schema, raise_on_error=True)
        GRPOConfig.model_validate(config)
    else:
        with pytest.raises(ValidationError, match=said):
            validate({"config": config}, schema, raise_on_error=True)


def test_a_choice_of_many_has_no_default_that_other_kinds_would_be_sent(
    schema: dict[str, Any],
) -> None:
    """Nor what Prefect's form fills in by itself: booleans, groups with defaults."""
    groups = schema["definitions"]
    algorithm = groups["AlgorithmConfig"]["properties"]
    items = groups["RewardsConfig"]["properties"]["functions"]["items"]
    for choice in (items, algorithm["loss"], algorithm["advantage"]):
        assert choice["type"] == "object"
        for name, field in choice["properties"].items():
            assert "default" not in field and "$ref" not in field, name
            assert field.get("type") not in ("boolean", "object"), name
            assert field["title"] and field["description"], name


def test_a_run_handed_to_a_flow_is_not_spread_out_on_the_dashboard() -> None:
    run = Run.__new__(Run)
    run.name = "mine"
    assert grpo.serialize_parameters({"run": run}) == {"run": "<Run>"}


def test_titles_read_as_people_write() -> None:
    assert title_of("kv_cache_gib") == "KV cache (GiB)"
    assert title_of("kl") == "KL"
    assert title_of("prompts_per_step") == "Prompts per step"


def test_suites_that_come_with_refrain_stand_by_their_names(schema: dict[str, Any]) -> None:
    own = {"source": {"kind": "file", "path": "held-out.jsonl"}}
    suites = {"gsm8k": {}, "aime24": {"rows": 5}, "rg_chain_sum": {}, "mine": own}
    config = load_recipe(GRPOConfig, "tiny").model_dump(mode="json")
    config["evaluation"] = {"suites": suites}
    validate({"config": config}, schema, raise_on_error=True)
    found = GRPOConfig.model_validate(config).evaluation
    assert found is not None and list(found.suites) == list(suites)
    assert found.suites["gsm8k"].source.kind == "hub" and found.suites["aime24"].rows == 5
    config["evaluation"] = {"suites": {"gsm8k": {"rows": 0}}}
    with pytest.raises(ValidationError, match="evaluation"):
        validate({"config": config}, schema, raise_on_error=True)
    with pytest.raises(ValueError, match="mine.*source"):
        GRPOConfig.model_validate(config | {"evaluation": {"suites": {"mine": {}}}})
