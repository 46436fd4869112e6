"""Objects by import path: modules and files, and what is said where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from configs.base import UserFunction
from configs.imports import imported, imported_class

WORDS = """
import neighbour_of_words

class Word:
    def said(self): return neighbour_of_words.SAID

made = []
made.append(Word().said())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "words.py").write_text(WORDS)
    (tmp_path / "neighbour_of_words.py").write_text("SAID = 'said'")
    (tmp_path / "divides.py").write_text("\n1 / 0")
    return tmp_path


def test_a_file_is_loaded_once_under_a_name_of_its_own(folder: Path) -> None:
    word = imported(f"{folder}/words.py:Word")
    assert word().said() == "said"
    assert imported(f"{folder}/words.py:Word.said") is word.said
    assert imported(f"{folder}/words.py:made") == ["said"]
    assert "words" not in sys.modules and word.__module__ in sys.modules
    assert imported_class(f"{folder}/words.py:Word") is word


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_package.module:fn", "there is no module 'no_such_package' for"),
        ("json.no_such:fn", "there is no module 'json.no_such' for"),
        ("json:dumpss", "module 'json' has no 'dumpss'"),
        ("json", "'json' is no import path. Write package.module:NAME"),
        ("json:", "'json:' is no import path"),
        ("{}/none.py:fn", "there is no file '{}/none.py' on "),
        ("{}/words.py:fn", "file '{}/words.py' has no 'fn'"),
        (
            "{}/divides.py:fn",
            "'{}/divides.py' cannot be imported: ZeroDivisionError: division by zero",
        ),
        ("{}/divides.py:fn", " (divides.py:2)"),
    ],
)
def test_what_is_not_there_is_one_sentence(folder: Path, path: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        imported(path.replace("{}", str(folder)))
    assert said.replace("{}", str(folder)) in str(error.value)
    assert not any("divides" in name for name in sys.modules)


@pytest.mark.parametrize(
    "path",
    [
        "engines.workers.engine",
        "engines.workers.engine:",
        "engines.workers.engine:callable_methods",
    ],
)
def test_an_import_path_must_name_a_class(path: str) -> None:
    with pytest.raises(ValueError, match=r"engines\.workers\.engine"):
        imported_class(path)


# As settings name them


def test_a_file_is_seen_from_the_working_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    chosen = UserFunction(path="words.py:Word")
    assert chosen.path == f"{folder}/words.py:Word"
    assert "words" not in sys.modules  # it is read, not run


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("none.py:fn", "there is no file '{}/none.py'"),
        ("words.py:fn", "file '{}/words.py' has no 'fn'"),
        ("wrong.py:fn", "'{}/wrong.py' is not Python: "),
        ("taken.py:fn", "'{}/taken.py' imports 'configs', which is a package of Refrain's and a"),
        ("words.py", "String should match pattern"),
        ("no_such_module:fn", "no module 'no_such_module' is found for"),
    ],
)
def test_a_wrong_one_is_refused_as_a_setting(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, said: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "wrong.py").write_text("def fn(:")
    (folder / "configs").mkdir()
    (folder / "taken.py").write_text("def fn():\n    from configs.mine import MINE\n")
    with pytest.raises(ValueError) as error:
        UserFunction(path=path)
    assert said.replace("{}", str(folder)) in str(error.value)


def test_a_file_may_import_what_is_ours(folder: Path) -> None:
    (folder / "own.py").write_text("from configs.imports import imported as fn\n")
    assert imported(UserFunction(path=f"{folder}/own.py:fn").path) is imported
