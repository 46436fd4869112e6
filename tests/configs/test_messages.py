"""What messages say to set is a setting."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import read_recipe
from configs.settings_help import fields
from tests.configs.flow_settings import of_commands

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?<![\w./:*`])([a-z_]+(?:\.(?:[a-z_]+|\d+|\*|NAME))+)(?![\w(/*]|\.[\w*])")
# Short forms of evaluation, and what an example calls its suite and pool.
OTHER = ("evaluation.source", "evaluation.rows", "evaluation.samples", "evaluation.greedy")


def known() -> set[str]:
    """Every setting and group of every flow, with * for a number or a name."""
    found: set[str] = set()
    for model in of_commands():
        for name, kind, *_ in fields(model):
            if kind.startswith("dict"):
                name += ".0"
            parts = ["*" if p in ("0", "NAME") else p for p in name.partition(" ")[0].split(".")]
            found |= {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    return found


def texts(file: Path) -> Iterator[str]:
    """What errors are raised with in a file, and what rules say, * in the place of values."""
    tree = ast.parse(file.read_text())
    if file.parent.name == "rules":  # with the functions that make a sentence
        said: list[ast.AST] = [tree]
    else:
        said = [n.exc for n in ast.walk(tree) if isinstance(n, ast.Raise) and n.exc is not None]
        said += [n.value for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg == "says"]
    for part in said:
        for node in ast.walk(part):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(p.value) if isinstance(p, ast.Constant) else "*" for p in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def unknown(text: str, settings: set[str]) -> list[str]:
    """Names in a text that begin like a setting and are none."""
    found = []
    for name in NAME.findall(text.replace("functions[]", "functions.*")):
        if name in OTHER or name.partition(".")[0] not in settings:
            continue
        name = name.removesuffix(".*")  # an entry of a mapping, or the next sentence
        parts = ["*" if p.isdigit() or p == "NAME" else p for p in name.split(".")]
        pattern = re.compile(r"\.".join(r"[\w*]+" if p == "*" else rf"(?:{p}|\*)" for p in parts))
        if not any(map(pattern.fullmatch, settings)):
            found.append(name)
    return found


def test_every_setting_that_an_error_names_is_one() -> None:
    settings = known()
    files = [
        f
        for folder in ("configs", "engines", "storage", "tasks", "flows")
        for f in (ROOT / folder).rglob("*.py")
    ]
    said = [(file, text) for file in files for text in texts(file) if " " in text]
    assert len(said) > 300
    assert not {(str(file), name) for file, text in said for name in unknown(text, settings)}


def test_a_name_that_is_no_setting_is_seen() -> None:
    assert unknown("Set rollout.shard lower, or episodes.environment.python.", known()) == [
        "rollout.shard", "episodes.environment.python",
    ]  # fmt: skip
    assert unknown("Set cluster.pools.*.gpus = 1 and teachers.NAME.model.", known()) == []


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("algorithm.advantage=rloo", "a group of settings. Set algorithm.advantage.kind = rloo."),
        ("model=qwen", "a group of settings. Set model.kind to pretrained or random."),
        ("lora=8", "a group of settings. Set what is in it, such as lora.rank."),
        ("rewards.functions=math", "a list. Set rewards.functions.0.kind = math."),
        ("guards=reward", "a list. Set what is in it, such as guards.0.name."),
        (
            "cluster.pools=3",
            "a group of names. Set what is in it, such as cluster.pools.NAME.workers.",
        ),
    ],
)
def test_a_value_for_a_whole_group_is_told_what_to_set(word: str, says: str) -> None:
    name, _, value = word.partition("=")
    value = value if value.isdigit() else repr(value)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{name} = {value}: it is {says}')}$"):
        read_recipe(GRPOConfig, "tiny", [word])


def test_a_form_that_is_not_kept_is_told_with_what_it_is_for() -> None:
    with pytest.raises(ConfigError, match=r"^name = 'a b' is not of the form .* Family of the run"):
        read_recipe(GRPOConfig, "tiny", ["name=a b"])
