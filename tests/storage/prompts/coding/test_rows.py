"""Rows of coding tasks: their columns, SWE-bench's names for them, and what is wrong with a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.coding import CodingSource
from storage.prompts.coding.trees import File, kept
from storage.prompts.datasets import open_source
from storage.prompts.source import PromptSource

ROW = {"problem": "p", "repository": "repo", "fail_to_pass": ["t.py::test"]}


def source(folder: Path, *rows: dict[str, Any]) -> PromptSource:
    (folder / "repo").mkdir(exist_ok=True)
    (folder / "repo/t.py").write_text("def test(): pass")
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_source(CodingSource(path=str(file)))


def test_a_row_by_its_own_names_and_by_those_of_swe_bench(tmp_path: Path) -> None:
    swe = {
        "problem_statement": "p",
        "repository": "repo",
        "FAIL_TO_PASS": '["t.py::test"]',
        "PASS_TO_PASS": "[]",
        "instance_id": "a__b-1",
        "tests": {"new/t.py": "x", "absent": None},
    }
    rows = source(tmp_path, ROW, swe)
    one, other = rows.rows([0, 1])
    assert kept(str(one["repository"])) == {"t.py": File(b"def test(): pass")}
    assert kept(str(one["tests"])) == {}
    assert one == {
        "problem": "p",
        "repository": one["repository"],
        "tests": one["tests"],
        "fail_to_pass": ["t.py::test"],
        "pass_to_pass": [],
        "setup": "",
        "test_timeout": None,
        "layout": None,
    }
    assert other["instance_id"] == "a__b-1"
    assert other["repository"] == one["repository"]
    assert kept(str(other["tests"])) == {"new/t.py": File(b"x")}
    assert {name: other[name] for name in ("problem", "fail_to_pass", "pass_to_pass")} == {
        "problem": "p",
        "fail_to_pass": ["t.py::test"],
        "pass_to_pass": [],
    }


def test_the_digest_is_of_what_the_repositories_hold(tmp_path: Path) -> None:
    first = source(tmp_path, ROW).digest
    here = tmp_path / "elsewhere"
    here.mkdir()
    assert source(here, ROW).digest == first
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "repo").mkdir()
    (changed / "repo/more.py").write_text("")
    assert source(changed, ROW).digest != first


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"problem": None}, "Row 0 of .*: it has no problem; its columns are"),
        ({"repository": "none"}, "Row 0 of .*: there is no repository .*/none."),
        ({"repository": 3}, "repository is 3, and no address"),
        ({"fail_to_pass": []}, "fail_to_pass names no test"),
        ({"fail_to_pass": "t.py"}, "fail_to_pass is a text that is no JSON list"),
        ({"pass_to_pass": [1]}, "and no list of tests or commands"),
        ({"tests": {"../t.py": ""}}, "is no path within a repository"),
        ({"tests": {"t.py": 1}}, "tests: t.py is 1, and no text"),
        ({"setup": ["make"]}, "and no command"),
        ({"test_timeout": "1"}, "and no number of seconds"),
        ({"commit": 1}, "commit is 1, and no text"),
    ],
)
def test_a_wrong_row_is_a_sentence(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        source(tmp_path, {**ROW, **changes})
