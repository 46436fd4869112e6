"""The scorer of code: a completion's program, run against its row's unit tests in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from configs.rewards import SandboxConfig, UnitTestsReward
from engines.rewards.protocol import SampleScore
from engines.rewards.row_tests import tests_of
from engines.sandboxes.opening import open_sandbox, prove, python_of
from engines.sandboxes.protocol import Executed, Sandbox, SandboxFailed
from storage.objects.documents import JsonValue, Row, digest
from storage.prompts.source import TASK

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")
_ROWS = 4096  # of which a scorer remembers whether their tests judge a program
NO_JUDGE = "the row's tests pass with an empty program, and so judge none"
TESTS = "tests"  # the stored column: extra/NAME/tests


def program_of(completion: str, part: str) -> str | None:
    """The program in a completion: its last block of Python, or all of it; None if there is none."""
    if part == "whole":
        return completion if completion.strip() else None
    blocks = [text for tag, text in _BLOCK.findall(completion) if tag.lower() in _PYTHON]
    return blocks[-1] if blocks and blocks[-1].strip() else None


@cache
def _text(module: str) -> str:
    spec = find_spec(f"engines.rewards.{module}")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


def unit_test_scorer(
    reward: UnitTestsReward, sandboxes: Mapping[str, SandboxConfig]
) -> UnitTestScorer:
    """The scorer of these settings; ValueError, one sentence, where this machine has no sandbox.

    sandboxes: of tasks that have one of their own.
    """
    prove(reward.sandbox, f"rewards.functions.{reward.name}.sandbox")
    for task, sandbox in sandboxes.items():
        prove(sandbox, f"data.source.tasks.{task}.sandbox")
    return UnitTestScorer(reward, sandboxes)


class _Result(BaseModel):
    """A line of the testing program: what a test came to."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    passed: bool
    error: str | None
    seconds: float


class UnitTestScorer:
    """Scores completions, several at once: each has a sandbox of its own."""

    def __init__(
        self, reward: UnitTestsReward, sandboxes: Mapping[str, SandboxConfig] | None = None
    ) -> None:
        self._reward, self._sandboxes = reward, dict(sandboxes or {})
        self._judging: dict[str, bool] = {}  # by a row's tests: whether they judge a program

    def __call__(self, completion: str, row: Row) -> SampleScore:
        """The score of a completion, and what each test came to.

        ValueError for a row whose tests cannot be run or judge no program, whatever the completion;
        SandboxFailed when the machine fails.
        """
        tests, settings = tests_of(self._reward, row), self._sandbox(row)
        with open_sandbox(settings) as sandbox:
            if not self._judge(settings, sandbox, tests):
                raise ValueError(NO_JUDGE)
            source = program_of(completion, self._reward.extract)
            if source is None:
                return self._scored([_missed("the completion has no program")] * len(tests))
            return self._scored(_results(self._run(settings, sandbox, tests, source), len(tests)))

    def judges(self, row: Row) -> bool:
        """Whether the tests of a row judge a program, or pass with an empty one.

        ValueError, a sentence, for a row without tests, or with such as cannot be run.
        """
        tests, settings = tests_of(self._reward, row), self._sandbox(row)
        with open_sandbox(settings) as sandbox:
            return self._judge(settings, sandbox, tests)

    def _sandbox(self, row: Row) -> SandboxConfig:
        """Where the programs of a row run."""
        return self._sandboxes.get(str(row.get(TASK)), self._reward.sandbox)

    def _judge(
        self, settings: SandboxConfig, sandbox: Sandbox, tests: list[dict[str, Any]]
    ) -> bool:
        """Run tests with an empty program, before one that may do something about them."""
        key = digest(f"{settings.model_dump_json()}{json.dumps(tests)}".encode())
        if key not in self._judging:
            ran = self._run(settings, sandbox, tests, source="", begin=True)
            passed = all(result["passed"] for result in _results(ran, len(tests)))
            if len(self._judging) >= _ROWS:
                self._judging.clear()
            self._judging[key] = not passed
        return self._judging[key]

    def _run(
        self,
        settings: SandboxConfig,
        sandbox: Sandbox,
        tests: list[dict[str, Any]],
        source: str,
        begin: bool = False,
    ) -> Executed:
        """Run tests of a program; `begin`: see that all can be, and end at the first that fails."""
        request = {
            "source": source,
            "loader": _text("tested_program"),
            "cases": _text("testing_cases"),
            "tests": tests,
            "seconds": self._reward.test_timeout,
            "begin": begin,
        }
        return sandbox.exec(
            [python_of(settings), "-I", "-B", "-c", _text("testing_program")],
            json.dumps(request).encode(),
        )

    def _scored(self, results: Sequence[dict[str, JsonValue]]) -> SampleScore:
        passed = sum(bool(result["passed"]) for result in results)
        share = passed / len(results)
        score = share if self._reward.score == "share" else float(passed == len(results))
        return SampleScore(score=score, extras={TESTS: list(results)})


def _results(ran: Executed, tests: int) -> list[dict[str, JsonValue]]:
    """What each test came to; those that were not reached have not passed.

    Only what was written before the program was loaded, the first line, can say that the tests or the
    machine are to blame.
    """
    first, *lines = ran.stdout.splitlines() or [b""]
    if first.startswith(b"{"):
        raise ValueError(f"the test cannot be run: {json.loads(first)['unusable']}")
    if first != b"begun":
        words = ran.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxFailed(f"The tests were not begun ({ran.cause}). {words}".rstrip())
    results: list[dict[str, JsonValue]] = []
    for line in lines[:tests]:
        try:
            results.append(_Result.model_validate_json(line).model_dump())
        except ValidationError:  # the testing program was stopped in the middle of it
            break
    reason = "the program ended the tests" if ran.cause == "ended" else ran.cause.replace("_", " ")
    return results + [_missed(f"not reached: {reason}")] * (tests - len(results))


def _missed(why: str) -> dict[str, JsonValue]:
    return {"passed": False, "error": why, "seconds": 0.0}
