"""The rows of coding tasks: a repository and tests by their digests, a problem, and what has to pass.

Rows come from a file, whose columns may have SWE-bench's names, or from task folders of Harbor and
Terminal-Bench (storage/prompts/coding/task_folders.py). Opening them reads every repository, and
keeps each once by its digest in this machine's cache (storage/prompts/coding/trees.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from configs.coding import CodingSource
from storage.objects.documents import Row
from storage.prompts.coding.repositories import repository
from storage.prompts.coding.task_folders import TaskFolder, task_folders
from storage.prompts.coding.trees import File, Tree, check_path, checked, keep
from storage.prompts.source import PromptSource, RowsInMemory, row_name

# Columns, and the names that SWE-bench has for them.
SWE_BENCH = {
    "problem_statement": "problem",
    "FAIL_TO_PASS": "fail_to_pass",
    "PASS_TO_PASS": "pass_to_pass",
}


class CodingRows(RowsInMemory):
    """The rows, in memory; their repositories are not."""

    def __init__(self, config: CodingSource, opened: PromptSource | None) -> None:
        """opened: the file of rows; None: the address is a folder of task folders."""
        self.left_out: dict[str, str] = {}  # task folder -> why it is no row
        rows = self._of_folders(config.path) if opened is None else _of_file(opened, config.path)
        super().__init__(config.path, rows)

    def _of_folders(self, address: str) -> list[Row]:
        rows = []
        for name, task in task_folders(address):
            if isinstance(task, TaskFolder):
                rows.append(_of_folder(name, task))
            else:
                self.left_out[name] = str(task)
        if not rows:
            shown = "; ".join(f"{name}: {why}" for name, why in self.left_out.items())
            raise ValueError(
                f"data.source.path is {address}: none of its {len(self.left_out)} task folders can "
                f"run here. {shown}."
            )
        return rows


def is_of_folders(address: str) -> bool:
    """Whether an address is a folder of task folders, or one; ValueError where it is nothing."""
    return next(iter(task_folders(address, only_look=True)), None) is not None


def _of_folder(name: str, task: TaskFolder) -> Row:
    return {
        "problem": task.problem,
        "repository": keep(task.repository),
        "tests": keep(task.tests),
        "fail_to_pass": list(task.passes),
        "pass_to_pass": [],
        "setup": task.setup,
        "test_timeout": task.test_timeout,
        "layout": {
            "folder": task.folder,
            "tests": task.tests_at,
            "reward": task.reward_file,
            "variables": dict(task.variables),
        },
        "task_folder": name,
    }


def _of_file(opened: PromptSource, address: str) -> list[Row]:
    base = address.rpartition("/")[0]
    digests: dict[tuple[str, str | None], str] = {}  # of repositories that were read

    def tree_of(value: object, commit: str | None, what: str) -> str:
        if isinstance(value, Mapping):
            return keep(_of_texts(value, what))
        if not isinstance(value, str) or not value:
            raise ValueError(f"{what} is {value!r:.60}, and no address")
        place = value if "://" in value or value.startswith("/") else f"{base}/{value}"
        if (place, commit) not in digests:
            digests[place, commit] = keep(repository(place, commit))
        return digests[place, commit]

    rows = []
    for number, row in enumerate(opened.rows(range(len(opened)))):
        try:
            rows.append(_row(row, tree_of))
        except ValueError as error:
            raise ValueError(
                f"{row_name(number)} of {address}: {str(error).rstrip('.')}."
            ) from None
    return rows


def _row(row: Row, tree_of: Any) -> Row:
    columns = {SWE_BENCH.get(name, name): value for name, value in row.items()}
    for column in ("problem", "repository"):
        if columns.get(column) is None:
            raise ValueError(
                f"it has no {column}; its columns are {', '.join(sorted(row)) or 'none'}"
            )
    commit = columns.get("commit")
    if commit is not None and not isinstance(commit, str):
        raise ValueError(f"commit is {commit!r:.60}, and no text")
    fail = _tests(columns.get("fail_to_pass"), "fail_to_pass")
    if not fail:
        raise ValueError("fail_to_pass names no test, so nothing would be judged")
    timeout = columns.get("test_timeout")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)):
        raise ValueError(f"test_timeout is {timeout!r:.60}, and no number of seconds")
    return {
        **columns,
        "repository": tree_of(columns["repository"], commit, "repository"),
        "tests": tree_of(columns.get("tests") or {}, None, "tests"),
        "fail_to_pass": list(fail),
        "pass_to_pass": list(_tests(columns.get("pass_to_pass"), "pass_to_pass")),
        "setup": _text(columns.get("setup"), "setup"),
        "test_timeout": timeout,
        "layout": None,
    }


def _tests(value: object, what: str) -> list[str]:
    """Names of tests or commands: a list, or its JSON as SWE-bench has it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"{what} is a text that is no JSON list: {value!r:.60}") from None
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ValueError(f"{what} is {value!r:.60}, and no list of tests or commands")
    return value


def _text(value: object, what: str) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{what} is {value!r:.60}, and no command")
    return value or ""


def _of_texts(files: Mapping[str, object], what: str) -> Tree:
    tree = {}
    for path, text in files.items():
        if text is None:  # Parquet has every key of the column in each row
            continue
        if not isinstance(text, str):
            raise ValueError(f"{what}: {path} is {text!r:.60}, and no text of a file")
        tree[check_path(path)] = File(text.encode())
    return checked(tree, what)
