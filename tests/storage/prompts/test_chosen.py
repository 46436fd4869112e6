"""Rows chosen by their values, and multiple-choice questions made of right and wrong answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.data import FileSource, HubSource, MultipleChoice
from configs.evaluation import EvaluationConfig, suite_names
from configs.rewards import ChoiceReward, MathReward
from storage.prompts.datasets import open_source

ROWS = [
    {"Question": f"Which? {n}", "Right": f"r{n}", "W1": f"a{n}", "W2": f"b{n}", "W3": f"c{n}",
     "kind": "choice" if n % 2 else "free"}
    for n in range(40)
]  # fmt: skip
CHOICES = MultipleChoice(question="Question", right="Right", wrong=("W1", "W2", "W3"))


def source(folder: Path, rows: list[dict[str, str]] = ROWS, **settings: object) -> FileSource:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileSource(path=str(path), **settings)  # type: ignore[arg-type]


def test_the_letter_is_that_of_the_right_answer_and_no_letter_is_favoured(tmp_path: Path) -> None:
    found = open_source(source(tmp_path, choices=CHOICES)).rows(range(40))
    letters = []
    for number, row in enumerate(found):
        asked, _, answers = str(row["Question"]).partition("\n\n")
        assert asked == f"Which? {number}"
        lines = dict(line.split(". ") for line in answers.splitlines())
        assert list(lines) == ["A", "B", "C", "D"]
        assert set(lines.values()) == {f"{name}{number}" for name in "rabc"}
        assert lines[str(row["answer"])] == f"r{number}"
        letters.append(row["answer"])
    assert all(4 <= letters.count(letter) <= 18 for letter in "ABCD")


def test_the_order_is_the_rows_own_wherever_it_stands(tmp_path: Path) -> None:
    whole = open_source(source(tmp_path, choices=CHOICES)).rows([7])
    assert open_source(source(tmp_path, ROWS[7:], choices=CHOICES)).rows([0]) == whole


def test_only_rows_with_the_values_are_there(tmp_path: Path) -> None:
    found = open_source(source(tmp_path, where={"kind": "choice"}))
    assert len(found) == 20
    assert [row["Question"] for row in found.rows([0, 19])] == ["Which? 1", "Which? 39"]


def test_digests_tell_choices_apart(tmp_path: Path) -> None:
    settings = [{}, {"where": {"kind": "choice"}}, {"choices": CHOICES}]
    digests = {open_source(source(tmp_path, **one)).digest for one in settings}
    assert len(digests) == 3
    assert open_source(source(tmp_path)).digest.startswith("sha256:"), (
        "as before there were choices"
    )


def test_what_rows_lack_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no column 'level'"):
        open_source(source(tmp_path, where={"level": 5}))
    with pytest.raises(ValueError, match="No row of .* has the values"):
        open_source(source(tmp_path, where={"kind": "other"}))
    open_source(source(tmp_path, choices=CHOICES)).check_columns(["Question", "answer"])
    with pytest.raises(ValueError, match="no column 'solution'"):
        open_source(source(tmp_path, choices=CHOICES)).check_columns(["solution"])


# Columns of the hub's data sets as their pages list them, a row of each. They were not loaded from there.
HUB: dict[str, dict[str, str]] = {
    "gsm8k": {"question": "1 + 1?", "answer": "Add.\n#### 2"},
    "math500": {"problem": "1 + 1?", "solution": "2.", "answer": "2", "subject": "Algebra"},
    "aime24": {"problem": "1 + 1?", "answer": "002", "url": "x"},
    "aime25": {"problem": "1 + 1?", "answer": "2", "id": "0"},
    "amc23": {"question": "1 + 1?", "answer": "2.0", "url": "x"},
    "gpqa": {
        "Question": "1 + 1?",
        "Correct Answer": "2",
        **{f"Incorrect Answer {n}": f"{n + 2}" for n in (1, 2, 3)},
        "Subdomain": "Arithmetic",
    },
    "hle": {
        "id": "a",
        "question": "1 + 1?\nA. 2\nB. 3",
        "image": "",
        "answer": "A",
        "answer_type": "multipleChoice",
        "rationale": "x",
    },
}


@pytest.mark.parametrize("kind", ["file", "hub"])
@pytest.mark.parametrize("name", suite_names())
def test_a_suite_of_the_hub_opens_where_the_data_are_laid_out_alike(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file with its columns; by the datasets library from a folder with subset and split too."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(HUB[name]) + "\n")
    changes = {} if kind == "hub" else {"source": {"kind": "file", "path": str(path)}}
    suite = EvaluationConfig.model_validate({"suites": {name: changes}}).suites[name]
    source = suite.source
    if isinstance(source, HubSource):
        pytest.importorskip("datasets", reason="needs the extra hub")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        (tmp_path / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {source.subset or 'default'}\n  data_files:\n"
            f"  - split: {source.split}\n    path: rows.jsonl\n---\n"
        )
        source = source.model_copy(update={"name": str(tmp_path)})
    assert suite.prompt is not None and suite.rewards is not None
    found, (function,) = open_source(source), suite.rewards.functions
    assert isinstance(function, MathReward | ChoiceReward)
    found.check_columns([suite.prompt.prompt_column, function.answer_column])
    (row,) = found.rows(range(len(found)))
    assert "1 + 1?" in str(row[suite.prompt.prompt_column])
    assert str(row[function.answer_column])
