"""What an agent does to be rewarded without a solution earns nothing, under pytest and without it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from engines.environments.coding.judging import CodingTask, judged
from storage.objects.documents import Row
from storage.prompts.coding.trees import File, Link, Tree, overlaid
from tests.engines.environments.coding.conftest import SETTINGS, SYSTEM, TASKS, WITHOUT_PYTEST, Open
from tests.spread import spread

PYTHONS = [
    pytest.param(f"{Path(sys.prefix).resolve()}/bin/python", id="pytest"),
    pytest.param(
        SYSTEM,
        id="unittest",
        marks=pytest.mark.skipif(
            not WITHOUT_PYTEST, reason=f"{SYSTEM} is not there, or has pytest"
        ),
    ),
]
PASSING = """import unittest
class Fixed(unittest.TestCase):
    def test_nine_hundred(self): pass
    def test_year(self): pass
class Small(unittest.TestCase):
    def test_four(self): pass
    def test_year(self): pass
"""
HOOKS = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
def pytest_runtest_call(item):
    pass
def pytest_collection_modifyitems(items):
    for item in items:
        item.runtest = lambda: None
"""
SHADOW = """
import json, os, sys
names = json.loads(sys.stdin.read() or "{}")
print("passed"); os._exit(0)
"""
PATCHES_UNITTEST = """
import unittest
unittest.TestCase.assertEqual = lambda *arguments, **named: None
def to_roman(number): return ""
"""
PATCHES_CODE = """
import unittest
unittest.TestCase.assertEqual.__code__ = (lambda self, first, second, msg=None: None).__code__
def to_roman(number): return ""
"""
PATCHES_RESULTS = """
import unittest
unittest.TestResult.addFailure = unittest.TestResult.addError = lambda *arguments: None
try:
    import _pytest.reports, _pytest.runner
    made = _pytest.reports.TestReport.from_item_and_call
    def passing(item, call):
        call.excinfo = None
        return made(item, call)
    _pytest.reports.TestReport.from_item_and_call = staticmethod(passing)
except ImportError:
    pass
def to_roman(number): return ""
"""
PATCHES_BUILTINS = """
import builtins
class Quiet(Exception): pass
builtins.AssertionError = Quiet
builtins.isinstance = lambda *arguments: True
def to_roman(number): return ""
"""
FORGES = """
import os, sys
for descriptor in range(20):
    try:
        for test in ("test_roman.py::Fixed::test_nine_hundred", "test_roman.py::Fixed::test_year"):
            os.write(descriptor, b'["repository/tests/%s", "passed", ""]\\n' % test.encode())
            os.write(descriptor, b'x ["repository/tests/%s", "passed", ""]\\n' % test.encode())
    except OSError:
        pass
print("2 passed in 0.01s")
open("results.xml", "w").write("<testsuite tests='4' failures='0'/>")
os._exit(0)
"""
LATER = """
import atexit, os, subprocess, sys
atexit.register(os._exit, 0)
subprocess.Popen([sys.executable, "-c", "import time, shutil; time.sleep(0.3); open('tests/test_roman.py', 'w').write('')"])
sys.exit(0)
"""


ATTACKS: Mapping[str, Tree] = {
    "tests that pass": {
        "tests/test_roman.py": File(PASSING.encode()),
        "tests/test_small.py": File(PASSING.encode()),
    },
    "a link in the place of the tests": {
        "tests": Link("mine"),
        "mine/test_roman.py": File(PASSING.encode()),
        "mine/test_small.py": File(PASSING.encode()),
    },
    "hooks of pytest": {
        "conftest.py": File(HOOKS.encode()),
        "tests/conftest.py": File(HOOKS.encode()),
    },
    "a package of tests that patches": {"tests/__init__.py": File(PATCHES_UNITTEST.encode())},
    "modules that are imported by themselves": {
        name: File(SHADOW.encode())
        for name in (
            "sitecustomize.py",
            "usercustomize.py",
            "pytest.py",
            "unittest.py",
            "json.py",
            "_pytest/__init__.py",
        )
    },
    "settings of pytest": {
        "pytest.ini": File(b"[pytest]\naddopts = -p evil\npython_classes = Nothing\n"),
        "pyproject.toml": File(b"[tool.pytest.ini_options]\naddopts = '-p evil'\n"),
        "evil.py": File(HOOKS.encode()),
    },
    "exit at once": {"roman.py": File(b"import os\nos._exit(0)\n")},
    "exit later": {"roman.py": File(LATER.encode())},
    "forged answers": {"roman.py": File(FORGES.encode())},
    "patched assertions": {"roman.py": File(PATCHES_UNITTEST.encode())},
    "patched code": {"roman.py": File(PATCHES_CODE.encode())},
    "patched results": {"roman.py": File(PATCHES_RESULTS.encode())},
    "patched builtins": {"roman.py": File(PATCHES_BUILTINS.encode())},
    "skipped tests": {"roman.py": File(b"import unittest\nraise unittest.SkipTest('no')\n")},
    "kills what it can reach": {
        "roman.py": File(b"import os, signal\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)\n")
    },
    "compiled tests": {"tests/__pycache__/test_roman.cpython-311.pyc": File(b"\0" * 64)},
}


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("attack", spread(ATTACKS, 6))
def test_an_attack_earns_nothing(
    attack: str, python: str, rows: dict[str, Row], opened: Open
) -> None:
    sandbox = SETTINGS.sandbox.model_copy(update={"python": python, "memory_mib": 1024})
    settings = SETTINGS.model_copy(update={"sandbox": sandbox})
    task = CodingTask.of(rows["roman"])
    found = judged(settings, task, overlaid(task.repository, ATTACKS[attack]))
    assert found.reward == 0, found
    if attack in ("tests that pass", "hooks of pytest", "settings of pytest", "compiled tests"):
        assert {found.outcomes[name] for name in task.pass_to_pass} == {"passed"}, found


@pytest.mark.parametrize("python", PYTHONS)
def test_a_solution_beside_harmless_changes_is_rewarded(
    python: str, rows: dict[str, Row], opened: Open
) -> None:
    """Tests of its own, settings and a conftest of pytest that an agent adds do not matter."""
    sandbox = SETTINGS.sandbox.model_copy(update={"python": python, "memory_mib": 1024})
    workspace = opened(rows["roman"], sandbox=sandbox)
    workspace.edit(*TASKS["roman"].fixed)
    workspace.write("tests/test_mine.py", "def test_it(): assert False")
    workspace.write("conftest.py", "raise SystemExit(3)")
    workspace.write("pytest.ini", "[pytest]\naddopts = --no-such-option\n")
    workspace.bash(
        "mkfifo pipe; ln -s /etc/passwd out; ln -s roman.py in; touch $'odd\\xff'; chmod 0 roman.py"
    )
    judged_now = workspace.judge()
    assert judged_now.reward == 1, judged_now
