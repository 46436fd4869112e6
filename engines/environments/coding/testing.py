"""What runs tests in a sandbox, on files that an agent left: by pytest, or without it by unittest.

Handed to Python as text (judging.py beside it). It imports what it needs before anything of the
repository can be found, takes its orders from standard input, and begins each line of its answer with
a word that was drawn for this call: what else the repository's code prints, how it exits and which
files it writes says nothing. Only the standard library is imported, and pytest where there is one.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
import traceback
import unittest
from collections.abc import Callable
from functools import partial
from typing import Any

KEPT = 600  # characters of why a test failed

# By module and name, what stands there, and its code.
Code = dict[tuple[str, str], tuple[object, object]]
Tell = Callable[[str, str, str], None]  # a test, "passed", "failed" or "skipped", and why


def main() -> None:
    """Run the tests that standard input names: {"word", "ids", "root", "folder", "settings"}.

    word: begins each line of the answer. ids: FILE, FILE::TEST or FILE::CLASS::TEST, with absolute
    paths below `root`, from which names in the answer are counted. folder: the repository. settings:
    of pytest, a file.
    """
    asked = json.load(sys.stdin)
    word, ids, root, folder = asked["word"], asked["ids"], asked["root"], asked["folder"]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what tests print is no answer
    os.chdir(folder)

    before: Code = {}

    def tell(name: str, outcome: str, why: str) -> None:
        if outcome == "passed" and (changed := first_changed(before)):
            outcome, why = "failed", f"{changed} was changed by what is tested"
        answers.write(f"{word} {json.dumps([name, outcome, why[-KEPT:]])}\n")

    try:
        import pytest
    except ImportError:
        before.update(code_of_tests())
        tell("", "begun", "")
        sys.path.insert(0, folder)
        by_unittest(ids, root, tell)
    else:
        tell("", "begun", "")
        sys.path.insert(0, folder)
        words = ["-c", asked["settings"], "--rootdir", root, "-p", "no:cacheprovider", "-q"]
        words += ["--continue-on-collection-errors", *ids]
        pytest.main(words, plugins=[reporter(pytest, tell, before)])
    answers.flush()
    os._exit(0)  # nothing that was registered for the end counts


def code_of_tests() -> Code:
    """What decides about passing: what the frameworks and Python have to call."""
    found: Code = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("unittest", "pytest", "_pytest", "pluggy", "builtins"):
            continue
        for key, one in list(vars(module).items()):
            if callable(one):
                found[name, key] = (one, getattr(one, "__code__", None))
            if inspect.isclass(one) and one.__module__ == name:
                for inner, method in list(vars(one).items()):
                    if inspect.isroutine(method) or isinstance(method, property):
                        found[name, f"{key}.{inner}"] = (method, getattr(method, "__code__", None))
    return found


def first_changed(before: Code) -> str:
    """The name of one of these that is another now; empty for none."""
    now = code_of_tests()
    for place, (one, code) in before.items():
        found = now.get(place, (None, None))
        if found[0] is not one or found[1] is not code:
            return ".".join(place)
    return ""


def reporter(pytest: Any, tell: Tell, before: Code) -> object:
    """A plugin that tells of each test, up to three times; one that passed has passed each time.

    before: gets the code of tests as other plugins leave it, before a conftest.py is loaded.
    """

    class Reporter:
        @pytest.hookimpl  # after those that come first, which patch pytest, and before conftest.py
        def pytest_load_initial_conftests(self) -> None:
            before.update(code_of_tests())

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                tell(report.nodeid, "failed", report.longreprtext)
            elif report.skipped or hasattr(report, "wasxfail"):
                tell(report.nodeid, "skipped", "")
            elif report.when == "call":
                tell(report.nodeid, "passed", "")

        @pytest.hookimpl(tryfirst=True)
        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                tell(report.nodeid, "failed", report.longreprtext)

    return Reporter()


def by_unittest(ids: list[str], root: str, tell: Tell) -> None:
    """Run classes of unittest, and functions without arguments."""
    modules: dict[str, Any] = {}
    for id in ids:
        path, *names = id.split("::")
        shown = os.path.relpath(path, root)
        try:
            if path not in modules:
                modules[path] = loaded(path)
            tests = tests_in(modules[path], names)
        except BaseException:
            tell("::".join([shown, *names]), "failed", traceback.format_exc())
            continue
        for test, run in tests:
            tell("::".join([shown, *test]), *run())


def loaded(path: str) -> Any:
    """The module of a file of tests, whose folder is looked into as pytest does."""
    folder = os.path.dirname(path)
    if not os.path.exists(os.path.join(folder, "__init__.py")) and folder not in sys.path:
        sys.path.insert(0, folder)
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tests_in(
    module: Any, names: list[str]
) -> list[tuple[list[str], Callable[[], tuple[str, str]]]]:
    """Each test that names stand for, which may be none or a class, and what runs it."""
    if not names:
        found = [
            name
            for name, one in vars(module).items()
            if (inspect.isclass(one) and issubclass(one, unittest.TestCase))
            or (inspect.isfunction(one) and name.startswith("test"))
        ]
        return [test for name in found for test in tests_in(module, [name])]
    one: Any = getattr(module, names[0])
    if not inspect.isclass(one):
        return [(names, lambda: outcome_of(unittest.FunctionTestCase(one)))]
    group: Any = one
    methods = names[1:] or unittest.TestLoader().getTestCaseNames(group)
    return [([names[0], one], partial(_of_method, group, one)) for one in methods]


def _of_method(group: type[unittest.TestCase], method: str) -> tuple[str, str]:
    return outcome_of(group(method))


def outcome_of(case: unittest.TestCase) -> tuple[str, str]:
    """Run a test; what it came to, and why."""
    result = unittest.TestResult()
    try:
        unittest.TestSuite([case]).run(result)
    except BaseException:  # sys.exit is no failure to unittest
        return "failed", traceback.format_exc()
    bad = [*result.errors, *result.failures]
    if bad:
        return "failed", bad[0][1]
    odd = result.skipped or result.expectedFailures or result.unexpectedSuccesses
    return ("skipped" if odd or result.testsRun != 1 else "passed"), ""


if __name__ == "__main__":
    main()
