"""Every form of unit tests: the right program passes, another does not, and no form pays for nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from configs.rewards import UnitTestsReward
from engines.rewards.row_tests import tests_of as row_tests_of
from engines.rewards.unit_tests import UnitTestScorer
from engines.sandboxes.opening import open_sandbox, python_of
from engines.sandboxes.protocol import SandboxFailed
from tests.engines.rewards.test_unit_tests import SANDBOX
from tests.spread import spread

ADD = "def add(a, b):\n    return a + b\n"
ASYNC_ADD = "async def add(a, b):\n    return a + b\n"
OTHERS = ("x = 1", "def add(a, b):\n    return None", "import sys\nsys.exit(0)")
REWARD = UnitTestsReward(
    tests_column="tests", setup_column=None, extract="whole", test_timeout=4.0, sandbox=SANDBOX
)
CALCULATOR = (
    "class Negative(ValueError):\n    pass\n"
    "class Account:\n"
    "    def __init__(self, balance=0): self.balance = balance\n"
    "    def take(self, sum):\n"
    "        if sum > self.balance: raise Negative('too much')\n"
    "        self.balance -= sum\n"
    "        return self.balance\n"
)

FORMS: dict[str, Any] = {
    "TestCase": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(add(1, 2), 3)\n",
    "TestCase with setUp and main": (
        "import unittest\nfrom unittest import TestCase as Case\n"
        "class Base(Case):\n"
        "    @classmethod\n    def setUpClass(cls): cls.one = 1\n"
        "    def setUp(self): self.two = 2\n"
        "class Adding(Base):\n"
        "    def test_sum(self):\n"
        "        for b in (2, 3):\n"
        "            with self.subTest(b=b): self.assertEqual(add(self.one, b), self.one + b)\n"
        "if __name__ == '__main__':\n    unittest.main()\n"
    ),
    "TestCase of coroutines": (
        "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n"
        "    async def test_a(self): self.assertEqual(add(1, 2), 3)\n"
    ),
    "coroutine in a plain TestCase": "import unittest\nclass T(unittest.TestCase):\n    async def test_a(self): assert add(1, 2) == 3\n",
    "runTest": "import unittest\nclass T(unittest.TestCase):\n    def runTest(self): self.assertTrue(add(1, 2) == 3)\n",
    "class of pytest": "class TestAdd:\n    def setup_method(self): self.two = 2\n    def test_a(self):\n        assert add(1, self.two) == 3\n",
    "class within a class of pytest": "class TestAdd:\n    class TestTwo:\n        def setup_method(self): self.two = 2\n        def test_a(self):\n            assert add(1, self.two) == 3\n",
    "inherited class of pytest": "class Cases:\n    def test_a(self):\n        assert add(1, 2) == 3\nclass TestAdd(Cases):\n    pass\n",
    "async test": "async def test_a():\n    assert add(1, 2) == 3\n",
    "async check": ("async def check(candidate):\n    assert candidate(1, 2) == 3\n", "add"),
    "list of functions": ["def test_a():\n    assert add(1, 2) == 3\n", "def test_b():\n    assert add(1, 1) == 2\n"],
    "list of texts of check": (["def check(candidate):\n    assert candidate(1, 2) == 3\n"], "add"),
    "list of classes": ["class TestA:\n    def test_a(self): assert add(1, 2) == 3\n"],
    "list as Python's text": "['assert add(1, 2) == 3', \"assert add('a', 'b') == 'ab'\"]",
    "tuple as Python's text": "('assert add(1, 2) == 3',)",
    "a JSON text of a JSON text": json.dumps(json.dumps(["assert add(1, 2) == 3"])),
    "a script as a JSON text": json.dumps("assert add(1, 2) == 3"),
    "list with imports and comments": ["# first", "import math", "", "assert math.isclose(add(1, 2), 3)"],
    "list whose helper comes first": ["def same(a, b):\n    assert a == b\n", "same(add(1, 2), 3)"],
    "parametrize": (
        "import pytest\n@pytest.mark.parametrize('a, b, c', [(1, 2, 3), pytest.param(2, 2, 4, id='x')])\n"
        "def test_a(a, b, c):\n    assert add(a, b) == c\n"
    ),
    "parametrize twice, by names": (
        "import pytest\nfrom pytest import mark\nBS = [1, 2]\n"
        "@mark.parametrize('a', range(2))\n@pytest.mark.parametrize(['b'], [[b] for b in BS])\n"
        "def test_a(a, b):\n    assert add(a, b) == a + b\n"
    ),
    "parametrize of a class": (
        "import pytest\n@pytest.mark.parametrize('b', [1, 2])\nclass TestAdd:\n"
        "    def test_a(self, b): assert add(1, b) == 1 + b\n"
    ),
    "fixtures": (
        "import pytest\n@pytest.fixture\ndef one():\n    yield 1\n"
        "@pytest.fixture(autouse=True)\ndef every(): pass\n"
        "@pytest.fixture\ndef two(one):\n    return one + 1\n"
        "def test_a(one, two):\n    assert add(one, two) == pytest.approx(3)\n"
    ),
    "from solution": "from solution import add\ndef test_a():\n    assert add(1, 2) == 3\n",
    "all of solution": "from solution import *\ndef test_a():\n    assert add(1, 2) == 3\n",
    "import solution": "import solution\nassert solution.add(1, 2) == 3\n",
    "from another module": "import unittest\nfrom my_code.adding import add as plus\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(plus(1, 2), 3)\n",
    "relative import": "from .solution import add\ndef test_a():\n    assert add(1, 2) == 3\n",
    "from __main__": "from __main__ import add\nassert add(1, 2) == 3\n",
    "candidate as an argument": ("def test_a(candidate):\n    assert candidate(1, 2) == 3\n", "add"),
    "check called by the text": "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)\n",
    "method of Solution": (
        "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        "Solution().add",
        "class Solution:\n    def add(self, a, b): return a + b",
    ),
    "main of a script": "def main():\n    assert add(1, 2) == 3\nif __name__ == '__main__':\n    main()\n",
    "loop of a script": "for a, b, c in [(1, 2, 3)]:\n    if add(a, b) != c:\n        raise ValueError('no')\n",
    "exit of a script": "import sys\nif add(1, 2) != 3:\n    sys.exit(1)\n",
    "helper with the check": "def same(a, b):\n    assert a == b\ndef test_a():\n    same(add(1, 2), 3)\n",
    "raises of unittest": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(TypeError): add(1, 'a')\n",
    "awaited": ("async def test_a():\n    assert await add(1, 2) == 3\n", None, ASYNC_ADD),
    "asyncio.run": ("import asyncio\ndef test_a():\n    assert asyncio.run(add(1, 2)) == 3\n", None, ASYNC_ADD),
    "gathered": ("import asyncio\nasync def test_a():\n    assert await asyncio.gather(add(1, 2), add(1, 1)) == [3, 2]\n", None, ASYNC_ADD),
    "exceptions of the program": (
        "import pytest\nfrom bank import Account, Negative\n"
        "def test_a():\n    with pytest.raises(Negative, match='too much'):\n        Account(1).take(2)\n"
        "def test_b():\n    with pytest.raises(ValueError) as raised:\n        Account(1).take(2)\n"
        "    assert str(raised.value) == 'too much'\n"
        "def test_c():\n    assert Account(3).take(1) == 2\n",
        None,
        CALCULATOR,
    ),
    "exit of the program": (
        "import pytest\ndef test_a():\n    with pytest.raises(SystemExit) as end:\n        main()\n    assert end.value.code == 3\n",
        None,
        "import sys\ndef main(): sys.exit(3)",
    ),
    "iterator": ("numbers = count()\nassert next(numbers) == 0 and next(numbers) == 1\n", None, "import itertools\ndef count(): return itertools.count()"),
    "fn_name, outputs in lists": {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [[3], [4]]},
    "fn_name of Solution, as text": (
        json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}),
        None,
        "class Solution:\n    def add(self, a, b): return a + b",
    ),
    "fn_name, lists returned": ({"fn_name": "both", "inputs": [[1, 2], [1, 1]], "outputs": [[1, 2], [1]]}, None, "def both(a, b): return sorted({a, b})"),
    "fn_name, lists of one returned": ({"fn_name": "pair", "inputs": [[1]], "outputs": [[1]]}, None, "def pair(a): return (a,)"),
    "fn_name, not finite": ({"fn_name": "inf", "inputs": [[1]], "outputs": [float("inf")]}, None, "def inf(a): return float('inf')"),
    "pairs of CodeContests": ({"input": ["1 2"], "output": ["3\n"]}, None, "print(sum(map(int, input().split())))"),
    "functional pairs of LiveCodeBench": (
        json.dumps([{"input": "[1]\n[2]", "output": "[1, 2]", "testtype": "functional"}]),
        "add",
        "class Solution:\n    def add(self, a, b): return a + b",
    ),
    "functional pair of a method": (
        [{"input": '"a"\n"b"', "output": '"ab"', "testtype": "functional"}],
        "Solution().add",
        "class Solution:\n    def add(self, a, b): return a + b",
    ),
    "fenced": "```python\nassert add(1, 2) == 3\n```",
    "list of fenced": ["```\nassert add(1, 2) == 3\n```"],
    "byte order mark": "\ufeffassert add(1, 2) == 3\n",
    "indented": "\n    def test_a():\n        assert add(1, 2) == 3\n",
    "list of indented": [" assert add(1, 2) == 3", "\tassert add(1, 1) == 2"],
    "one pair": ({"input": "1 2", "output": "3\n"}, None, "print(sum(map(int, input().split())))"),
    "doctest": ">>> add(1, 2)\n3\n\nTexts too:\n>>> print(add('a', 'b'))\nab\n>>> add(1, 'a')\nTraceback (most recent call last):\nTypeError: unsupported operand type(s) for +: 'int' and 'str'\n",
    "doctest in a docstring of stubs": (
        "import doctest\ndef add(a, b):\n    \"\"\"Add.\n\n    >>> add(1, 2)\n    3\n    \"\"\"\n"
        "if __name__ == '__main__':\n    doctest.testmod()\n"
    ),
    "list of doctest texts": [">>> add(1, 2)\n3", ">>> two = add(1, 1)\n>>> {two: [two]}\n{2: [2]}\n"],
    "doctest of what it is": (">>> color()\n<Color.RED: 1>\n>>> color() is Color.RED\nTrue\n", None, "import enum\nclass Color(enum.Enum):\n    RED = 1\ndef color(): return Color.RED"),
    "fn_name, lines of JSON": {"fn_name": "add", "inputs": ["1\n2", "2\n2"], "outputs": ["3", "4"]},
    "fn_name, arguments as JSON": {"fn_name": "add", "inputs": ["[1, 2]"], "outputs": ["3"]},
    "fn_name, a list as JSON": ({"fn_name": "most", "inputs": ["[1, 2]"], "outputs": ["2"]}, None, "def most(numbers): return max(numbers)"),
    "function calls of SYNTHETIC-1": [
        {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]},
        {"type": "function_call", "fn_name": "add", "input": [1, 1], "output": 2},
    ],
    "test_cases beside a language": (
        json.dumps({"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}]}),
        None,
        "print(sum(map(int, input().split())))",
    ),
    "functional, named in its metadata": [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}],
    "functional, named in the row's metadata": (
        [{"input": "1\n2", "output": "3", "testtype": "functional"}],
        json.dumps({"func_name": "add"}),
    ),
    "annotations that the program looks at": (
        "assert add(1, 2) == 3",
        None,
        "def typed(f):\n    def g(*a):\n        assert all(map(isinstance, a, f.__annotations__.values()))\n        return f(*a)\n    return g\n"
        "@typed\ndef add(a: int, b: int): return a + b",
    ),
    "annotations without the import": (
        "assert Solution().first([3]) == 3",
        None,
        "class Solution:\n    def first(self, a: List[int]) -> Optional[int]: return a[0]",
    ),
    "named tuples": (
        "p = add(1, 2)\nassert p == (1, 2) and p.y == 2 and p.total() == total(p) == 3 and [p] == [(1, 2)]",
        None,
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int\n    def total(self): return self.x + self.y\n"
        "def add(a, b): return P(a, b)\ndef total(p): return p.total()",
    ),
    "objects of the program": (
        "box = Box(1)\nbox.x = 3\nbox['a'] = 4\nbox['b'] = 5\ndel box['b']\n"
        "assert box.get() == 3 and box['a'] == 4 and str(box) == 'Box of 3' and f'{box}' == repr(box) + ' of 3'\n"
        "assert isinstance(box, Box) and not isinstance(3, Box) and not isinstance(box, Other) and box.me() is box\n"
        "with box as opened:\n    assert opened == 3\nassert box.closed and Box.__name__ == 'Box'\n",
        None,
        "class Other: pass\n"
        "class Box:\n    closed = False\n"
        "    def __init__(self, x): self.x, self.items = x, {}\n"
        "    def get(self): return self.x\n    def me(self): return self\n"
        "    def __setitem__(self, k, v): self.items[k] = v\n    def __getitem__(self, k): return self.items[k]\n"
        "    def __delitem__(self, k): del self.items[k]\n"
        "    def __str__(self): return f'Box of {self.x}'\n    def __repr__(self): return 'Box'\n"
        "    def __enter__(self): return self.x\n    def __exit__(self, *error): self.closed = error == (None,) * 3\n",
    ),
}  # fmt: skip

NO_TESTS: dict[str, Any] = {
    "nothing but a comment": "# none yet",
    "blanks": " \n",
    "list with an empty text": [""],
    "list of a comment": ["# none"],
    "empty list as text": "[]",
    "null as text": "null",
    "none": "None",
    "docstring": '"""Tests of add."""',
    "pass": "pass",
    "only imports": "import unittest\nfrom solution import add\n",
    "only a call": "add(1, 2)",
    "only a comparison": "add(1, 2) == 3",
    "print": "print(add(1, 2) == 3)",
    "check that does nothing": "def check(candidate):\n    pass\n",
    "check without a check": "def check(candidate):\n    candidate(1, 2) == 3\n",
    "test that does nothing": "def test_a():\n    ...\n",
    "test that returns": "def test_a():\n    return add(1, 2) == 3\n    assert 0\n",
    "generator": "def test_a():\n    assert add(1, 2) == 3\n    yield\n",
    "helper that nobody calls": "def verify():\n    assert add(1, 2) == 3\n",
    "inner function that nobody calls": "def test_a():\n    def inner():\n        assert add(1, 2) == 3\n",
    "class that is not collected": "class Adding:\n    def test_a(self):\n        assert add(1, 2) == 3\n",
    "class with an __init__": "class TestAdd:\n    def __init__(self): pass\n    def test_a(self):\n        assert add(1, 2) == 3\n",
    "method of another name": "import unittest\nclass T(unittest.TestCase):\n    def verify(self):\n        self.assertEqual(add(1, 2), 3)\n",
    "TestCase without methods": "import unittest\nclass T(unittest.TestCase):\n    pass\nunittest.main()\n",
    "skipped": "import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('later')\n    def test_a(self):\n        self.assertEqual(add(1, 2), 3)\n",
    "class skipped by pytest": "import pytest\n@pytest.mark.skip\nclass TestA:\n    def test_a(self): assert add(1, 2) == 3\n",
    "module skipped by pytest": "import pytest\npytestmark = pytest.mark.skip(reason='x')\ndef test_a(): assert add(1, 2) == 3\n",
    "expected to fail": "import unittest\nclass T(unittest.TestCase):\n    @unittest.expectedFailure\n    def test_a(self):\n        self.assertEqual(add(1, 2), 3)\n",
    "parametrize without cases": "import pytest\n@pytest.mark.parametrize('a', [])\ndef test_a(a):\n    assert add(a, 2) == 3\n",
    "dead code": "if False:\n    assert add(1, 2) == 3\n",
    "loop over nothing": "for a in []:\n    assert add(a, 2) == 3\n",
    "loop over nothing, at its run": "cases = []\nfor a in cases:\n    assert add(a, 2) == 3\n",
    "errors that are let pass": "def test_a():\n    try:\n        assert add(1, 2) == 3\n    except Exception:\n        pass\n",
    "any error will do": "import pytest\ndef test_a():\n    with pytest.raises(Exception):\n        add(1, 'a')\n",
    "checks of nothing of the program": "def test_a():\n    assert 1 + 1 == 2\n",
    "empty pairs": {"inputs": [], "outputs": []},
    "pairs that expect no output": [{"input": "1", "output": ""}, {"input": "2", "output": "\n"}],
    "another dict": {"tests": ["assert add(1, 2) == 3"]},
    "a number": 3,
    "list of lists": [["assert add(1, 2) == 3"]],
    "no Python": "assert add(1, 2) = 3",
    "doctest that says nothing": ">>> add(1, 2)\n>>> add(2, 2)\n",
    "doctest of what a program prints": ">>> add(1, 2)\n3\n>>> show(3)\nthe sum is 3\n",
    "doctest that is not one": ">>>add(1, 2)\n3\n",
    "doctest of nothing of the program": ">>> 1 + 1\n2\n",
    "test cases of another language": {"language": "cpp", "test_cases": [{"input": "1 2\n", "output": "3\n"}]},
    "function calls that name none": [{"type": "function_call", "input": [1, 2]}],
    "inputs that are no JSON": {"fn_name": "add", "inputs": ["one\ntwo"], "outputs": ["3"]},
    "list with no Python": ["assert add(1, 2) == 3", "assert add("],
    "a missing library": "import freezegun\nassert add(1, 2) == 3\n",
    "a missing name": "from math import nothing\nassert add(1, 2) == 3\n",
    "a fixture with params": "import pytest\n@pytest.fixture(params=[1])\ndef n(): return 1\ndef test_a(n):\n    assert add(n, 2) == 3\n",
    "a fixture with a name": "import pytest\n@pytest.fixture(name='n')\ndef make(): return 1\ndef test_a(make):\n    assert add(make, 2) == 3\n",
    "a fixture of an unknown one": "import pytest\n@pytest.fixture\ndef n(tmp_path): return 1\ndef test_a(n):\n    assert add(n, 2) == 3\n",
    "a functional pair that is no JSON": [{"input": "one", "output": "3", "testtype": "functional"}],
    "an unknown fixture": "def test_a(capsys):\n    add(1, 2)\n    assert capsys.readouterr().out == '3'\n",
    "an unknown part of pytest": "import pytest\ndef test_a():\n    with pytest.warns(UserWarning):\n        add(1, 2)\n",
    "a patch of the program": "from unittest.mock import patch\ndef test_a():\n    with patch('builtins.input', return_value='1'):\n        assert add(1, 2) == 3\n",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def sandboxes() -> None:
    try:
        open_sandbox(SANDBOX).close()
    except SandboxFailed as error:
        pytest.skip(str(error))


def parts(form: Any) -> tuple[dict[str, Any], str]:
    """A row, and the right program."""
    tests, function, program = form, None, ADD
    if isinstance(form, tuple):
        tests, function, program = (*form, ADD)[:3]
    return {"tests": tests, "entry_point": function}, program


@pytest.mark.parametrize("name", spread(FORMS, 12))
def test_the_right_program_passes_and_others_do_not(name: str) -> None:
    row, right = parts(FORMS[name])
    scorer = UnitTestScorer(REWARD)
    assert scorer(right, row).score == 1.0, scorer(right, row).extras
    for other in OTHERS:
        if "raises of unittest" in name and "return None" in other:
            continue
        assert scorer(other, row).score == 0.0, other


@pytest.mark.parametrize("name", spread(NO_TESTS, 6))
def test_a_row_without_tests_scores_no_program(name: str) -> None:
    scorer = UnitTestScorer(REWARD)
    for function in (None, "add"):
        row = {"tests": NO_TESTS[name], "entry_point": function}
        for program in (ADD, *OTHERS, "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"):
            with pytest.raises(ValueError):
                scorer(program, row)


def has_numpy() -> bool:
    with open_sandbox(SANDBOX) as sandbox:
        return sandbox.exec([python_of(SANDBOX), "-I", "-c", "import numpy"]).exit_code == 0


def test_asserts_and_arrays_of_numpy() -> None:
    if not has_numpy():
        pytest.skip("the interpreter of sandboxes has no numpy")
    numbers = {"tests": "import numpy as np\nnp.testing.assert_allclose(add(1, 2), 3)\n"}
    arrays = {
        "tests": "import numpy as np\nfrom numpy.testing import assert_array_equal as same\n"
        "def test_a():\n    same(add(np.array([1, 2]), np.float32(1)), np.array([2.0, 3.0]))\n"
    }
    scorer = UnitTestScorer(REWARD)
    forged = "class Any:\n    def __eq__(self, other): return True\n    def __array__(self, *a): raise 1\ndef add(a, b): return Any()"
    for row in (numbers, arrays):
        assert scorer(ADD, row).score == 1.0, scorer(ADD, row).extras
        for other in (*OTHERS, forged):
            assert scorer(other, row).score == 0.0, other


def test_a_case_of_parametrize_is_a_test() -> None:
    share = REWARD.model_copy(update={"score": "share"})
    text = (
        "import pytest\n@pytest.mark.parametrize('a', [1, 2])\n@pytest.mark.parametrize('b', [0, 5])\n"
        "def test_a(a, b):\n    assert add(a, b) == a + b\n"
    )
    assert len(row_tests_of(share, {"tests": text})) == 4
    assert UnitTestScorer(share)("def add(a, b): return a", {"tests": text}).score == 0.5


def test_an_output_in_a_list_is_also_itself_only_where_all_are() -> None:
    wrapped = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]}
    lists = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2, 2]]}
    scorer = UnitTestScorer(REWARD.model_copy(update={"score": "share"}))
    number, listed = "def f(x): return x", "def f(x): return [x] * x"
    assert scorer(number, {"tests": wrapped}).score == 1.0
    assert scorer(listed, {"tests": lists}).score == 1.0
    assert scorer(number, {"tests": lists}).score == 0.0
