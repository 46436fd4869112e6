"""The scorer of code: a completion's program, run against its row's unit tests in a sandbox."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from configs.rewards import UnitTestsReward
from engines.rewards.protocol import SampleScore
from engines.sandboxes.opening import open_sandbox, prove, python_of
from engines.sandboxes.protocol import Executed, SandboxFailed
from storage.objects.json_values import JsonValue, Row

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")
TESTS = "tests"  # the stored column: extra/NAME/tests


def program_of(completion: str, part: str) -> str | None:
    """The program in a completion: its last block of Python, or all of it; None if there is none."""
    if part == "whole":
        return completion if completion.strip() else None
    blocks = [text for tag, text in _BLOCK.findall(completion) if tag.lower() in _PYTHON]
    return blocks[-1] if blocks and blocks[-1].strip() else None


def tests_of(reward: UnitTestsReward, row: Row) -> list[dict[str, Any]]:
    """A row's tests, as engines/rewards/testing_program.py takes them; ValueError if it has none.

    Four forms, as text of JSON or as they are:

        ["assert add(1, 2) == 3", …]                                   a test each
        "def check(candidate): …", or "def test_one(): …", or asserts  a test for each function
        {"inputs": ["1 2\\n", …], "outputs": ["3\\n", …]}                standard input and output
        [{"input": "1 2\\n", "output": "3\\n"}, …]                       the same

    With "fn_name" beside inputs and outputs, a test calls that function with the values of an input.
    """
    found = _plain(row.get(reward.tests_column))
    setup = row.get(reward.setup_column) if reward.setup_column is not None else None
    before = "\n".join(map(str, setup)) if isinstance(setup, list) else str(setup or "")
    tests: list[dict[str, Any]] = []
    if isinstance(found, str):
        tests = _of_script(found, before, row.get(reward.function_column))
    elif isinstance(found, Mapping) and {"inputs", "outputs"} <= found.keys():
        inputs, outputs = found["inputs"], found["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            raise ValueError("inputs and outputs of a row's tests are no lists")
        pairs = list(zip(inputs, outputs, strict=True))
        name = found.get("fn_name")
        tests = [_call(name, *pair) if name else _printing(*pair) for pair in pairs]
    elif isinstance(found, list):
        tests = [_one(test, before) for test in found]
    if not tests:
        raise ValueError(f"the row's column {reward.tests_column!r} holds no tests")
    return tests[: reward.max_tests]


def _plain(value: object) -> object:
    """What a text of JSON holds; other values and other texts as they are."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _one(test: object, setup: str) -> dict[str, Any]:
    if isinstance(test, str):
        return _calling(test, setup)
    if isinstance(test, Mapping) and {"input", "output"} <= test.keys():
        if test.get("testtype", "stdin") != "stdin":
            raise ValueError(f"tests of the kind {test['testtype']!r} are not known: stdin is")
        return _printing(test["input"], test["output"])
    raise ValueError(f"a row's test is neither a text nor has it input and output: {test!r:.100}")


def _of_script(script: str, setup: str, function: object) -> list[dict[str, Any]]:
    """A test for each function check or test_… of a script; the whole script if it has none."""
    try:
        parsed = ast.parse(script).body
    except SyntaxError as error:
        raise ValueError(f"the row's tests are no Python: {error}") from None
    names = [node.name for node in parsed if isinstance(node, ast.FunctionDef)]
    if "check" in names:
        if not isinstance(function, str):
            raise ValueError(
                "the row's tests have check(candidate), and no column names the function"
            )
        return [_calling(script, setup, "check", function)]
    tests = [name for name in names if name.startswith("test")]
    return [_calling(script, setup, name) for name in tests] or [_calling(script, setup)]


def _calling(code: str, setup: str, function: str = "", argument: str = "") -> dict[str, Any]:
    return {
        "kind": "calls",
        "code": code,
        "setup": setup,
        "function": function,
        "argument": argument,
    }


def _call(name: object, given: object, expected: object) -> dict[str, Any]:
    if not isinstance(name, str) or not name.isidentifier() or not isinstance(given, list):
        raise ValueError(f"tests of the function {name!r} do not give it a list of arguments")
    # As a method of Solution too, where the program has such a class.
    return _calling(
        f"_f = {name} if {name!r} in globals() else Solution().{name}\n"
        f"_given, _expected = {given!r}, {expected!r}\n"
        "_found = _f(*_given)\n"
        "_found = list(_found) if type(_found) is tuple else _found\n"
        "assert _found == _expected",
        "",
    )


def _printing(given: object, expected: object) -> dict[str, Any]:
    lines = ["\n".join(map(str, v)) if isinstance(v, list) else str(v) for v in (given, expected)]
    return {"kind": "output", "input": lines[0], "output": lines[1]}


@cache
def _text(module: str) -> str:
    spec = find_spec(f"engines.rewards.{module}")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


def unit_test_scorer(reward: UnitTestsReward) -> UnitTestScorer:
    """The scorer of these settings; ValueError, one sentence, where this machine has no sandbox."""
    prove(reward.sandbox, f"rewards.functions.{reward.name}.sandbox")
    return UnitTestScorer(reward)


class UnitTestScorer:
    """Scores completions, several at once: each has a sandbox of its own."""

    def __init__(self, reward: UnitTestsReward) -> None:
        self._reward = reward

    def __call__(self, completion: str, row: Row) -> SampleScore:
        """The score of a completion, and what each test came to.

        ValueError for a row whose tests cannot be run, SandboxFailed when the machine fails.
        """
        tests = tests_of(self._reward, row)
        source = program_of(completion, self._reward.extract)
        if source is None:
            return self._scored([_missed("the completion has no program")] * len(tests))
        asked = {
            "source": source,
            "loader": _text("tested_program"),
            "tests": tests,
            "seconds": self._reward.test_timeout,
        }
        settings = self._reward.sandbox
        with open_sandbox(settings) as sandbox:
            ran = sandbox.exec(
                [python_of(settings), "-I", "-B", "-c", _text("testing_program")],
                json.dumps(asked).encode(),
            )
        return self._scored(_results(ran, len(tests)))

    def _scored(self, results: Sequence[dict[str, JsonValue]]) -> SampleScore:
        passed = sum(bool(result["passed"]) for result in results)
        share = passed / len(results)
        score = share if self._reward.score == "share" else float(passed == len(results))
        return SampleScore(score=score, extras={TESTS: list(results)})


def _results(ran: Executed, tests: int) -> list[dict[str, JsonValue]]:
    """What each test came to; those that were not reached have not passed."""
    lines = ran.stdout.splitlines()
    if not lines:  # no line of the program has run yet
        said = ran.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxFailed(f"The tests were not begun ({ran.cause}). {said}".rstrip())
    results: list[dict[str, JsonValue]] = []
    for line in lines[1 : tests + 1]:
        try:
            found = json.loads(line)
        except ValueError:  # the testing program was stopped in the middle of it
            break
        if found.pop("unusable"):
            raise ValueError(f"the test cannot be run: {found['error']}")
        results.append(found)
    reason = "the program ended the tests" if ran.cause == "ended" else ran.cause.replace("_", " ")
    return results + [_missed(f"not reached: {reason}")] * (tests - len(results))


def _missed(why: str) -> dict[str, JsonValue]:
    return {"passed": False, "error": why, "seconds": 0.0}
