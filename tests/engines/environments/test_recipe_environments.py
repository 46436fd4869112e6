"""The environments that come with recipes: a calculator, a search engine, Python, sorting names."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from engines.environments.alphabet_sort import AlphabetSort, rows
from engines.environments.calculator import calculate
from engines.environments.python_sandbox import PythonSandbox
from engines.environments.search import Search, exact_match
from engines.environments.tools import schema, tools_of

NAMES = ["AdaLovelace", "AlanTuring", "GraceHopper", "EmmyNoether", "KurtGoedel", "JohnMcCarthy"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 + 30", "42"),
        ("(12.5 + 30) / 4", "10.625"),
        ("-2*3 - -1", "-5"),
        ("1/3", "0.333333333333"),
    ],
)
def test_the_calculator_works_out(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["9**9", "x + 1", "True + 1", "f(2)", "'a' * 3", "1" * 300])
def test_the_calculator_refuses(expression: str) -> None:
    with pytest.raises(ValueError):
        calculate(expression)
    with pytest.raises(ZeroDivisionError):
        calculate("1 / 0")


def test_every_tool_has_a_schema() -> None:
    assert schema("calculate", calculate)["function"]["parameters"]["required"] == ["expression"]
    for kind, name in ((PythonSandbox(), "run_python"), (Search.__new__(Search), "search")):
        (tool,) = tools_of(kind)
        assert tool == name
        assert schema(tool, getattr(kind, tool))["function"]["description"]


def test_a_program_runs_in_the_sandbox() -> None:
    tool = PythonSandbox(timeout=5)
    tool.reset()
    try:
        assert tool.run_python("print(6 * 7)") == "42"
        assert tool.run_python("x = 1") == "The program printed nothing."
        assert tool.run_python("1 / 0").endswith("ZeroDivisionError: division by zero")
        assert "No such file" in tool.run_python(f"open({__file__!r})")
        assert "NameError" in tool.run_python("print(x)"), "each program starts anew"
    finally:
        tool.close()


def test_a_program_that_does_not_end_is_stopped() -> None:
    tool = PythonSandbox(timeout=1)
    try:
        assert tool.run_python("while True: pass").startswith("The program was stopped: ")
        assert tool.run_python("print(1)") == "1"
    finally:
        tool.close()


@pytest.mark.skipif(find_spec("bm25s") is None, reason="bm25s is not installed")
def test_a_search_finds_the_passage(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    passages = [
        {"title": "Apples", "text": "Apples grow on trees."},
        {"title": "Programs", "text": "Ada Lovelace wrote the first program."},
        {"text": "Rivers flow into the sea."},
    ]
    corpus.write_text("".join(json.dumps(one) + "\n" for one in passages))
    engine = Search(str(corpus), passages=2)
    assert engine.search("who wrote the first program").startswith(
        "[1] Programs\nAda Lovelace wrote the first program.\n\n[2] "
    )
    assert Search(str(corpus), passages=9).search("river").count("[") == 3
    engine.search("")  # a query without words is no error


@pytest.mark.skipif(find_spec("bm25s") is None, reason="bm25s is not installed")
def test_a_corpus_that_cannot_be_searched_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"cannot be read .* Set episodes.environment.params.corpus"
    ):
        Search(f"{tmp_path}/none.jsonl")
    (tmp_path / "odd.jsonl").write_text('{"contents": "a"}\n')
    with pytest.raises(ValueError, match="has no passages, or a line without `text`"):
        Search(f"{tmp_path}/odd.jsonl")


def test_answers_match_but_for_case_articles_and_punctuation() -> None:
    texts = ["<answer>The Ada  Lovelace.</answer>", "<answer>x</answer>", "Ada Lovelace", ""]
    answers = [["x y", "ada lovelace"]] * 4
    messages: list[str | list[dict[str, str]]] = [
        [{"role": "assistant", "content": text}] for text in texts
    ]
    assert exact_match([""] * 4, messages, answers) == [1, 0, 0, 0]
    assert exact_match([""] * 4, [*texts], answers) == [1, 0, 0, 0]


def answer(environment: AlphabetSort, tag: str, spoil: str = "") -> str:
    return f"I think.\n<{tag}>\n{environment._expected()}{spoil}\n</{tag}>"


def test_names_are_sorted_over_three_turns() -> None:
    environment = AlphabetSort(turns=3, names_per_turn=2, power=8)
    first = environment.reset(names=json.dumps(NAMES), seed=3)
    assert first == AlphabetSort(turns=3, names_per_turn=2).reset(json.dumps(NAMES), 3)
    assert first.startswith("Sort these names by ") and "<alphabetical_sorted>" in first
    second = environment.step(answer(environment, "alphabetical_sorted"))
    assert "<combined_alphabetical_sorted>" in second
    expected = environment._expected().splitlines()
    new = [line for line in expected if line.endswith("// new name!")]
    assert 0 < len(new) < len(expected)
    plain = [line.removesuffix(" // new name!") for line in expected]
    key = [environment._key(next(n for n in NAMES if n.lower() == one)).lower() for one in plain]
    assert key == sorted(key)
    environment.step(answer(environment, "combined_alphabetical_sorted"))
    assert not environment.done
    assert environment.step(answer(environment, "combined_alphabetical_sorted")) == ""
    assert environment.done and environment.get_reward() == 1.0


def test_a_missing_list_and_a_worse_second_one_score_nothing() -> None:
    environment = AlphabetSort(turns=2, names_per_turn=2, power=1)
    environment.reset(names=json.dumps(NAMES), seed=0)
    environment.step("no list")
    right = answer(environment, "combined_alphabetical_sorted")
    environment.step(right + answer(environment, "combined_alphabetical_sorted", "\nnobody"))
    assert environment.get_reward() == 0.0
    environment.reset(names=json.dumps(NAMES), seed=0)
    environment.step(answer(environment, "alphabetical_sorted", "\nnobody"))
    assert 0 < environment.get_reward() < 0.5, "half of the similarity of one turn"


def test_rows_hold_names_without_spaces(tmp_path: Path) -> None:
    (tmp_path / "names.jsonl").write_text('{"names": ["Ada Lovelace", "Alan Turing"]}\n')
    assert rows(f"{tmp_path}/names.jsonl") == [
        {"question": "", "names": '["AdaLovelace", "AlanTuring"]'}
    ]
    with pytest.raises(ValueError, match="2 names are too few for 3 turns"):
        AlphabetSort().reset(names='["A", "B"]', seed=0)
