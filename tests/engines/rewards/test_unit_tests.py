"""The reward for code: the forms of tests, programs that forge results, and failures of the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.data import DataConfig, FileSource
from configs.rewards import ContainerSandbox, ProcessSandbox, RewardsConfig, UnitTestsReward
from engines.rewards.checks import check_rewards
from engines.rewards.row_tests import tests_of as all_tests_of
from engines.rewards.runner import RewardRunner, deadline
from engines.rewards.unit_tests import UnitTestScorer, program_of
from engines.rewards.unit_tests import _results as results_of
from engines.sandboxes.opening import open_sandbox
from engines.sandboxes.protocol import WORK, Executed, SandboxFailed
from storage.prompts.datasets import open_source
from tests.engines.sandboxes.conftest import REAL, settings_of
from tests.spread import spread

SANDBOX = settings_of("containers" if REAL else "processes")
SHARE = UnitTestsReward(extract="whole", score="share", test_timeout=2.0, sandbox=SANDBOX)


@pytest.fixture(scope="module")
def sandboxes() -> None:
    try:
        open_sandbox(SANDBOX).close()
    except SandboxFailed as error:
        pytest.skip(str(error))


def results(program: str, tests: object, reward: UnitTestsReward = SHARE, **row: Any) -> list[Any]:
    """What each test came to: None if it passed, else its error."""
    found = UnitTestScorer(reward)(program, {"test_list": tests, **row})  # type: ignore[dict-item]
    (stored,) = found.extras.values()
    assert isinstance(stored, list)
    passed = [test["error"] is None for test in stored]  # type: ignore[index, call-overload]
    assert passed == [test["passed"] for test in stored]  # type: ignore[index, call-overload]
    assert found.score == sum(passed) / len(passed)
    return [test["error"] for test in stored]  # type: ignore[index, call-overload]


def test_the_program_in_a_completion() -> None:
    text = "So:\n```python\na = 1\n```\nor\n```py title\nb = 2\n```\nwhich prints\n```text\n3\n```"
    assert program_of(text, "last_block") == "b = 2\n"
    assert program_of("```\nc\n```", "last_block") == "c\n"
    assert program_of(text, "whole") == text
    for nothing in ("no block", "```python\n```", "```python\nnever closed", ""):
        assert program_of(nothing, "last_block") is None
    assert program_of(" \n", "whole") is None


def test_rows_without_tests_are_not_scored() -> None:
    bad: list[tuple[object, str]] = [
        (None, "holds no tests"),
        ([], "holds no tests"),
        ([3], "neither a text"),
        ("def check(", "no Python"),
        ("def check(candidate): pass", "no column names the function"),
        ({"inputs": ["1"], "outputs": []}, "shorter"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "'functional' are not known"),
        ({"inputs": [1], "outputs": ["1"], "fn_name": "f"}, "a list of arguments"),
        ({"inputs": ["x = 1"], "outputs": ["1"], "fn_name": "f"}, "no JSON"),
    ]
    for tests, why in bad:
        with pytest.raises(ValueError, match=why):
            all_tests_of(SHARE, {"test_list": tests})  # type: ignore[dict-item]
    few = SHARE.model_copy(update={"max_tests": 2})
    assert len(all_tests_of(few, {"test_list": ["assert 1"] * 5})) == 2


def test_the_forms_of_tests(sandboxes: None) -> None:
    add = "def add(a, b):\n    return a + b"
    wrong = "AssertionError"
    assert results(add, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]) == [None, wrong]
    assert results(add, json.dumps(["assert add('a', b='b') == 'ab'"])) == [None]
    check = "def check(candidate):\n    assert candidate([1], [2]) == [1, 2]\n"
    assert results(add, check, entry_point="add") == [None]
    assert results(add, check, entry_point="sub") == ["KeyError: 'sub'"]
    script = (
        "import math\ndef test_one():\n    assert math.isclose(add(0.1, 0.2), 0.3)\n"
        "def test_two():\n    assert add(1, 1) == 3, 'no'\n"
    )
    assert results(add, script) == [None, f"{wrong}: no"]
    reads = "print(sum(map(int, input().split())))\nif __name__ == '__main__': print('end ')"
    stdin = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\nend\n", ["7", "end"]]}
    assert results(reads, stdin) == [None, None]
    pair = [{"input": "1 2", "output": "4", "testtype": "stdin"}]
    assert results(reads, json.dumps(pair)) == ["printed something else"]
    named = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
    assert results(add, named) == [None]
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert results(method, named) == [None]
    setup = SHARE.model_copy(update={"setup_column": "setup"})
    assert results(add, ["assert add(one, 1) == 2"], setup, setup=["one = 1"]) == [None]


def test_what_tests_see_of_a_program(sandboxes: None) -> None:
    program = (
        "import collections\n"
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "    def moved(self, by): return Point(self.x + by)\n"
        "def sort(values): values.sort()\n"
        "def squares(n):\n    for i in range(n): yield i * i\n"
        "def fails(): raise ValueError('bad')\n"
        "def counted(text): return collections.Counter(text)\n"
        "def x_of(point): return point.x\n"
    )
    raises = "try:\n    fails()\nexcept ValueError as error:\n    assert str(error) == 'bad'\nelse:\n    assert 0"
    tests = [
        "assert Point(1).moved(2).x == 3",
        "v = [3, 1]\nsort(v)\nassert v == [1, 3]",
        "assert list(squares(3)) == [0, 1, 4]",
        raises,
        "assert counted('aab') == {'a': 2, 'b': 1}",
        "assert x_of(Point(5)) == 5",
        "assert fails() is None",
    ]
    assert results(program, tests) == [None] * 6 + ["ValueError: bad"]
    with pytest.raises(ValueError, match="hands the program a function"):
        results("def apply(f): return f(1)", ["assert apply(lambda x: x) == 1"])


def test_programs_that_fail(sandboxes: None) -> None:
    test = ["assert f(1) == 1"]
    assert results("def f(x:", test) == ["SyntaxError: '(' was never closed (program, line 1)"]
    assert results("import os; os._exit(0)", test) == ["the program has ended"]
    assert results("def f(x):\n    while True: pass", test * 2) == ["took too long"] * 2
    assert results("x = 1", test) == ["NameError: name 'f' is not defined"]
    assert results("print(1)\n1 / 0", [{"input": "", "output": "1"}]) == [
        "exited with 1: ZeroDivisionError: division by zero"
    ]
    assert results("while True: print('x' * 1000)", [{"input": "", "output": "1"}])[0] is not None
    few = SANDBOX.model_copy(update={"timeout": 4.0})
    short = SHARE.model_copy(update={"sandbox": few})
    hung = results("def f(x):\n    while True: pass", test * 3, short)
    assert hung[0] == "took too long" and hung[2] == "not reached: timed out"
    fenced = UnitTestsReward()
    found = UnitTestScorer(fenced)("I do not know.", {"test_list": test})
    assert found.score == 0.0


FORGERIES = {
    "prints": 'print(\'begun\')\nfor _ in range(9): print(\'{"passed": true, "error": null, "unusable": false}\', flush=True)',
    "exits": "import os, sys\ndef f(x):\n    os._exit(0)",
    "sys.exit": "import sys\ndef f(x):\n    sys.exit(0)",
    "always equal": "class Any:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\ndef f(x): return Any()",
    "equal int": "class Any(int):\n    def __eq__(self, other): return True\ndef f(x): return Any(1)",
    "own len": "import builtins\ndef f(x): return []\ndef len(x): return 3\nbuiltins.len = len\ndef isinstance(*a): return True",
    "no assertions": "import builtins\nclass Quiet(Exception): pass\nbuiltins.AssertionError = Quiet\ndef f(x): raise AssertionError",
    "other descriptors": (
        'import os\nline = b\'{"passed": true, "error": null, "unusable": false, "seconds": 0}\\n\'\n'
        "for number in range(256):\n"
        "    try: os.write(number, b'begun\\n' + line * 9)\n"
        "    except OSError: pass\n"
    ),
    "the output of what tests it": (
        'import os\nline = b\'{"passed": true, "error": null, "unusable": false, "seconds": 0}\\n\'\n'
        "for number in range(20):\n"
        "    try: open(f'/proc/{os.getppid()}/fd/{number}', 'wb').write(line * 9)\n"
        "    except OSError: pass\n"
        "try: open(f'/proc/{os.getppid()}/mem', 'rb').read(1)\n"
        "except OSError: pass\n"
        "else: f = lambda x: [1, 2, 3]"
    ),
    "its caller's memory": (
        "import ctypes, os\n"
        "if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0:\n"
        "    f = lambda x: [1, 2, 3]"
    ),
    "its caller's tests": (
        "import gc, glob\n"
        "found = [o for o in gc.get_objects() if isinstance(o, str) and 'assert' in o]\n"
        "for file in glob.glob('/proc/[0-9]*/*') + glob.glob('/tmp/**', recursive=True):\n"
        "    try: found += [file] if b'== [1, 2, 3]' in open(file, 'rb').read(10**6) else []\n"
        "    except OSError: pass\n"
        "if found: f = lambda x: [1, 2, 3]"
    ),
    "its caller's life": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef f(x): return [1, 2, 3]",
    "a pickle": (
        "import os, pickle, sys\n"
        f"class Runs:\n    def __reduce__(self): return (os.system, ('touch {WORK}/ran',))\n"
        "def f(x):\n"
        "    data = pickle.dumps(('gave', Runs(), (x,), {}), 4)\n"
        "    for number in range(3, 256):\n"
        "        try: os.write(number, len(data).to_bytes(8, 'big') + data)\n"
        "        except OSError: pass\n"
        f"    return [1, 2, 3] if os.path.exists('{WORK}/ran') else []"
    ),
    "a class patched by a pickle": (
        "import os, time\n"
        "def equal(other): return True\n"  # the first thing of the program: number 0
        "def f(x):\n"
        "    data = (b'\\x80\\x04(\\x8c\\x04gaveccollections\\nCounter\\nN}\\x8c\\x06__eq__'\n"
        "            b'K\\x00Qs\\x86b)R(K\\x01t}t.')\n"
        "    for number in range(3, 256):\n"
        "        try: os.write(number, len(data).to_bytes(8, 'big') + data)\n"
        "        except OSError: pass\n"
        "    return True  # the answer to the call of equal"
    ),
    "a module of its own": "class math:\n    isclose = lambda *a: True\nclass json:\n    dumps = lambda v: '[1, 2, 3]'\ndef f(x): return [0]",
    "a patched module": "import math, unittest\nmath.isclose = lambda *a: True\ndef f(x): return [0, 0, 0]",
    "a thread that stays": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(30)\ndef f(x): return [1]"
    ),
}


FORGERIES |= {
    "a skip": "import unittest\ndef f(x): raise unittest.SkipTest('x')\n",
    "a skip of pytest": "class Skipped(BaseException): pass\nSkipped.__module__ = 'builtins'\ndef f(x): raise Skipped\n",
    "the end of what is iterated": "def f(x): raise StopIteration",
    "asserts of unittest": (
        "import unittest\nfor name in dir(unittest.TestCase):\n"
        "    if name.startswith('assert'): setattr(unittest.TestCase, name, lambda *a, **k: None)\n"
        "unittest.main = lambda *a, **k: None\ndef f(x): return []"
    ),
    "a module of tests": (
        "import sys, types\nsys.modules['pytest'] = sys.modules['unittest'] = types.ModuleType('x')\n"
        "class unittest:\n    class TestCase: pass\nclass pytest: pass\ndef f(x): return []"
    ),
    "an end at exit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
    "an end in a thread": "import os, threading\nthreading.Timer(0.01, os._exit, (0,)).start()\ndef f(x):\n    while True: pass",
    "closed descriptors": "import os\nos.closerange(3, 256)\ndef f(x): return [1, 2, 3]",
    "its process stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\ndef f(x): return [1, 2, 3]",
    "its caller stopped": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\ndef f(x): return [1, 2, 3]",
    "all processes ended": "import os\nos.kill(-1, 9)",
    "all memory": "kept = []\nwhile True: kept.append(b'x' * 2**24)",
    "all of the disk": (
        "import os\nfor name in range(9):\n"
        "    try: open(f'/tmp/{name}', 'wb').write(b'x' * 2**24)\n"
        "    except OSError: pass\n"
    ),
    "all processes": (
        "import os, time\n"
        "while True:\n"
        "    try:\n        if os.fork() == 0: os.setsid(); time.sleep(60)\n"
        "    except OSError: break\n"
    ),
    "a lambda back": "def f(x): return lambda *a: [1, 2, 3]",
    "a coroutine": "async def f(x): return [1, 2, 3]",
    "a text of what it is": (
        "class Text(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "class Any:\n    def __str__(self): return Text('x')\n    __repr__ = __str__\ndef f(x): return Any()"
    ),
    "errors kept by its context": (
        "class Any:\n    def __enter__(self): return self\n    def __exit__(self, *error): return True\n"
        "    def __len__(self): return 3\ndef f(x): return Any()"
    ),
    "what contains all, and differs by nothing": (
        "class Any:\n    def __contains__(self, one): return True\n    def __sub__(self, other): return 0\n"
        "    __rsub__ = __sub__\n    __lt__ = __gt__ = __le__ = __ge__ = __ne__ = __eq__ = __contains__\n"
        "    __hash__ = lambda self: 0\n    def __len__(self): return 3\n    def __iter__(self): return iter([self] * 3)\n"
        "    def __getitem__(self, place): return self\ndef f(x): return Any()"
    ),
    "a type that all are of": (
        "class Kind(type):\n    def __instancecheck__(self, one): return True\n"
        "    __subclasscheck__ = __instancecheck__\nclass list(metaclass=Kind): pass\n"
        "class Error(ValueError, metaclass=Kind): pass\ndef f(x): raise Error"
    ),
    "a named tuple that equals all": (
        "from collections import namedtuple\nclass P(namedtuple('P', 'x y z')):\n"
        "    def __eq__(self, other): return True\n    def __getitem__(self, n): return [1, 2, 3][n]\ndef f(x): return P(0, 0, 0)"
    ),
    "fields that are no names": "class P(tuple):\n    _fields = ('a b', 'import os')\ndef f(x): return P((1, 2))",
    "signals to its caller": (
        "import os, signal\nfor number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):\n"
        "    os.kill(os.getppid(), number)\ndef f(x): return []"
    ),
    "another program in its place": "import os\ndef f(x): os.execv('/bin/true', ['true'])",
    "half an answer": (
        "import os, time\ndef f(x):\n    for number in range(3, 20):\n"
        "        try: os.write(number, (10**7).to_bytes(8, 'big') + b'x')\n        except OSError: pass\n"
        "    time.sleep(9)"
    ),
    "no modules": "import sys\nfor name in list(sys.modules): sys.modules[name] = None\ndef f(x): return []",
    "frames of its loader": (
        "import inspect\ndef f(x):\n    for one in inspect.stack():\n"
        "        for value in list(one.frame.f_locals.values()):\n"
        "            if isinstance(value, list): value[:] = [1, 2, 3]\n    return []"
    ),
    "not a number": "def f(x): return [float('nan')] * 3",
    "depth": "def f(x):\n    for _ in range(100000): x = [x]\n    return x",
    "no limits": (
        "import resource\nfor one in range(16):\n    try: resource.setrlimit(one, (0, 0))\n"
        "    except (OSError, ValueError): pass\ndef f(x): return []"
    ),
    "interrupts": "def f(x): raise KeyboardInterrupt",
    "an error without a text": (
        "class E(ValueError):\n    def __str__(self): raise SystemExit(0)\ndef f(x): raise E"
    ),
    "text that is no text": "def f(x): raise ValueError('\\ud800\\x00\\n{\"passed\": true}')",
}

# What programs write to their descriptors in place of the answers that they owe.
WRITES = (
    "import io, os, pickle\n"
    "def equal(*a): return True\n"  # the first thing of the program: number 0
    "class Pickler(pickle.Pickler):\n"
    "    def persistent_id(self, value): return 0 if value is equal else None\n"
    "def write(data):\n"
    "    for number in range(3, 256):\n"
    "        try: os.write(number, len(data).to_bytes(8, 'big') + data)\n"
    "        except OSError: pass\n"
    "def answer(*values):\n"
    "    made = io.BytesIO()\n"
    "    Pickler(made, 4).dump(values)\n"
    "    write(made.getvalue())\n"
)
MADE_CLASS = (  # an instance of a class of theirs, which says by number 0 what it equals
    WRITES + "def f(x):\n"
    "    kind = b'(\\x8c\\x09exceptionK\\x07\\x8c\\x01E(' + BASE + b'ttQ'\n"
    "    write(b'\\x80\\x04(\\x8c\\x04gave' + kind + b'N}\\x8c\\x06__eq__K\\x00Qs\\x86b)R(K\\x01t}t.')\n"
    "    return True\n"
)
FORGERIES |= {
    "built-ins of its own": (
        WRITES + "answer('loaded', {'f': equal, '__builtins__': {'len': equal}})\n"
        "answer('gave', 0, (1,), {})\nanswer('gave', 3, (0,), {})\nos.read(0, 0)\n"
        "import time; time.sleep(9)"
    ),
    "a dict of a class of its own": MADE_CLASS.replace("BASE", "b'cbuiltins\\ndict\\n'"),
    "an error of a class of its own": MADE_CLASS.replace(
        "BASE", "b'(\\x8c\\x08built-in\\x8c\\x0aValueErrortQ'"
    ),
}

FORGED_TESTS = [
    "found = f(1)\nassert found == [1, 2, 3]",
    "assert json.dumps(f(1)) == '[1, 2, 3]'",
    "import math\nassert math.isclose(f(1)[0], 1) and len(f(1)) == 3 and isinstance(f(1), list)",
]


FORGED_FORMS = [
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), [1, 2, 3])\n",
    "import pytest\nfrom solution import *\n@pytest.mark.parametrize('x', [1])\n"
    "def test_b(x):\n    for found in map(f, [x]): assert len(found) == 3 and sorted(found) == [1, 2, 3]\n"
    "    assert list(map(f, [x])) == [[1, 2, 3]]\n",
    "class TestC:\n    def test_c(self):\n        try: found = f(1)\n        except Exception: found = None\n"
    "        assert found == [1, 2, 3]\n",
    "async def test_d():\n    assert f(1) == [1, 2, 3]\n",
    ">>> f(1)\n[1, 2, 3]\n",
    "with f(1) as found:\n    assert found == [1, 2, 3]\n",
    "found = f(1)\nassert 3 in found and abs(found[0] - 1) < 0.1 and isinstance(found, list)\n",
]


@pytest.mark.parametrize("name", spread(FORGERIES, 9))
def test_no_program_makes_up_its_results(name: str, sandboxes: None) -> None:
    brief = SANDBOX.model_copy(update={"timeout": 4.0})  # for those that stop what tests them
    reward = SHARE.model_copy(update={"sandbox": brief})
    assert None not in results(FORGERIES[name], FORGED_TESTS, reward)
    assert None not in results(FORGERIES[name], FORGED_FORMS, reward)


def test_built_ins_that_a_program_sends_are_not_a_tests(sandboxes: None) -> None:
    length = ["assert len(f(1)) == 3"]
    assert results(FORGERIES["built-ins of its own"], length) != [None]
    assert results("def f(x): return [x] * 3", length) == [None]


def test_a_test_that_catches_the_loss_of_its_program_has_not_passed(sandboxes: None) -> None:
    catches = [
        "try:\n    found = f(1)\nexcept Exception:\n    found = 1\nexcept BaseException: found = 1\nassert found == 1"
    ]
    raises = [
        "import pytest\ndef test_a():\n    assert g() == 1\n    with pytest.raises(Exception):\n        f(1)\n"
    ]
    lost = "import os\ndef f(x): os._exit(0)\ndef g(): return 1"
    hangs = "def f(x):\n    while True: pass\ndef g(): return 1"
    for program in (lost, hangs):
        assert results(f"x = 1\n{program}", raises) != [None]
        assert results(program, ["found = g()", *catches, "assert g() == 1"])[0] is not None


def test_what_a_program_made_is_no_fault_of_a_test_that_hands_it_back(sandboxes: None) -> None:
    back = [
        "assert g(type(f(1))) == 1", "assert g(f(1).append) == 1", "assert g(f(1)) == 1 and g(iter) == 1",
        "try: f(1)\nexcept Exception as error: assert g(error) == 1\nelse: assert g(1) == 2",
    ]  # fmt: skip
    for made in ("object()", "[]", "f", "g(2)"):
        program = f"def g(x): raise ValueError\ndef f(x): return {made}"
        assert None not in results(program, back)


# Programs that would have a test say that it cannot be run: their answers are of a kind that a test
# cannot hand back, or poisoned such that it cannot. For honest ones of the same tests there is a score.
POISONS = {
    "a Thing with another number": "state(thing, {'_Thing__number': thing})",
    "a Thing of no program": "state(thing, {'_Thing__program': None})",
    "a Thing in slots": "state(thing, (None, {'_Thing__number': 2.5}))",
    "an OrderedDict without items": "state(ordered, {'items': 5})",
    "a Counter that reduces itself": "state(counter, {'__reduce_ex__': 5, 'items': None})",
    "nested without end": "b'(' * 100000 + b't' * 100000",
    "a memo of all memory": "b'Nr\\xff\\xff\\xff\\x7f'",
}
POISONED = (
    "import os, time\n"
    "def one(): return 1\n"  # the first thing of the program: number 0
    "thing, ordered, counter = b'K\\x00Q', b'ccollections\\nOrderedDict\\n)R', b'ccollections\\nCounter\\n)R'\n"
    "def value(v):\n"
    "    if v is None: return b'N'\n"
    "    if type(v) is bytes: return v\n"
    "    if type(v) is str: return b'\\x8c' + bytes([len(v)]) + v.encode()\n"
    "    if type(v) is int: return b'K' + bytes([v])\n"
    "    if type(v) is float: return b'F%f\\n' % v\n"
    "    if type(v) is tuple: return b'(' + b''.join(map(value, v)) + b't'\n"
    "    return b'}' + b''.join(value(k) + value(x) + b's' for k, x in v.items())\n"
    "def state(what, attributes): return what + value(attributes) + b'b'\n"
    "def g(x): return x\n"
    "def f(x):\n"
    "    data = b'\\x80\\x04(\\x8c\\x04gave' + VALUE + b')}t.'\n"
    "    for number in range(3, 256):\n"
    "        try: os.write(number, len(data).to_bytes(8, 'big') + data)\n"
    "        except OSError: pass\n"
    "    time.sleep(0.2)\n"
    "    return 1\n"
)
KINDS = ("None", "True", "{}", "one", "iter", "Ellipsis", "(i for i in 'a')", "{}.keys()", "b''", "memoryview(b'')",
         "type('T', (ValueError,), {})", "object()", "__import__('math')")  # fmt: skip
HANDS_BACK = [
    "assert g(f(1)) == [1, 2, 3]",
    "assert g([f(1)]) == [[1, 2, 3]]",
    "assert g(type(f(1))) == g(iter(f(1))) == [1, 2, 3]",
    "assert g(getattr(f(1), 'items', reversed([]))) == [1, 2, 3]",
    "assert g(f) == g(f(1).append) == [1, 2, 3]",
    "try: f(1)\nexcept Exception as error: assert g(error) == [1, 2, 3]\nelse: assert g(map(str, f(1))) == 3",
]


@pytest.mark.parametrize("name", spread(POISONS, 5))
def test_no_program_has_its_sample_fail(name: str, sandboxes: None) -> None:
    assert None not in results(POISONED.replace("VALUE", POISONS[name]), HANDS_BACK)


@pytest.mark.slow
def test_no_kind_of_answer_has_a_sample_fail(sandboxes: None) -> None:
    for kind in KINDS:
        program = f"def one(): pass\ndef g(x): return x\ndef f(x): return {kind}\n"
        assert None not in results(program, HANDS_BACK), kind


def test_what_a_program_uses_up_has_no_later_test_fail(sandboxes: None) -> None:
    """What a later test imports is found before the program runs."""
    tests = [
        "assert f(1) == 2",
        "import sqlite3, unittest.mock\nassert f(1) == 2",
        "import no_such\nassert f(1) == 2",
    ]
    uses = FORGERIES["all processes"] + FORGERIES["all of the disk"] + "def f(x): return x\n"
    assert None not in results(uses, tests)


def test_a_row_that_hands_over_what_is_its_own_has_no_score_whatever_the_program(
    sandboxes: None,
) -> None:
    own = [
        "assert f(1) == 2 and apply(lambda x: x) == 1",
        "def double(x): return 2 * x\nassert f(double, 1) == 2",
        "class Node: pass\nassert f(Node()) == 2",
        "assert Solution().f([x for x in 'a'], key=(x for x in 'a')) == 2",
        "def check(candidate):\n    assert candidate([1, lambda: 1]) == 1\n",
    ]
    for test in own:
        for program in ("", "1 / 0", "def f(*a): return 2", "def apply(g): return 1"):
            with pytest.raises(ValueError, match="hands the program a "):
                results(program, [test] if "check" not in test else test, entry_point="f")
    honest = [
        "def own(g): return g(1)\nassert own(lambda x: f(x)) == max([1], key=lambda x: x)",
        "from functools import *\nassert reduce(lambda a, b: a + b, [f(1), f(2)]) == 3",
        "assert f([2, 1]).sort(key=lambda x: x) is None",
        "import pytest\ndef test_a():\n    with pytest.raises(TypeError): f(*map(lambda x: x, [1, 2]))",
    ]
    for test in honest:
        assert results("def f(x): return x", [test]) == [None]


def test_lines_that_are_no_results_are_tests_that_did_not_pass() -> None:
    good = b'{"passed": true, "error": null, "seconds": 0.5}'
    odd = [
        b"5",
        b"null",
        b"[]",
        b"{",
        b'{"passed": true}',
        b"[" * 100000,
        b"1" * 5000,
        b'{"unusable": "x"}',
        b"\xff",
    ]
    odd += [
        good.replace(b"0.5", b"NaN"),
        good.replace(b"true", b"1"),
        good[:-1] + b', "unusable": true}',
    ]
    for line in odd:
        ran = Executed(
            cause="ended", exit_code=0, signal=None, stdout=b"begun\n" + good + b"\n" + line + b"\n" + good,
            stderr=b"", truncated=False, seconds=1.0,
        )  # fmt: skip
        passed = [one["passed"] for one in results_of(ran, 3)]
        assert passed == [True, False, False], line


def test_an_honest_program_passes_the_same_tests(sandboxes: None) -> None:
    patient = SHARE.model_copy(update={"test_timeout": 20.0})
    assert results("def f(x): return [1, 2, 3]", FORGED_TESTS, patient) == [None] * 3
    printed = [{"input": "", "output": "right"}]
    assert results("print('right')", printed, patient) == [None]
    assert None not in results(FORGERIES["other descriptors"], printed)


def data_of(tmp_path: Path, rows: list[dict[str, Any]]) -> DataConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return DataConfig(source=FileSource(path=str(path)))


def test_a_batch_is_scored_several_at_once(sandboxes: None, tmp_path: Path) -> None:
    reward = SHARE.model_copy(update={"at_once": 3})
    rows: list[dict[str, Any]] = [{"question": "?", "test_list": ["assert f(1) == 1"]}] * 4
    rows = [*rows, {"question": "?", "test_list": 3}]
    data = data_of(tmp_path, rows)
    # A deadline of a call that is over before one program that hangs: it is not for these.
    rewards = RewardsConfig(functions=(reward,), timeout=0.5)
    completions = [
        "def f(x): return x",
        "def f(x):\n    while True: pass",
        "def f(x): return 2",
        "import subprocess\nsubprocess.run(['true'])\ndef f(x): return 1",
        "def f(x): return x",
    ]
    with RewardRunner(rewards, data) as runner:
        scores = runner.score(["?"] * 5, completions, rows)
        (code,) = runner.code()
    assert scores.rewards[:4].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert scores.failed.tolist() == [False] * 4 + [True]
    (failure,) = scores.failures
    assert "holds no tests" in failure.error and failure.index == 4
    stored = scores.extras["unit_tests/tests"]
    assert [None if s is None else s[0]["error"] for s in stored] == [  # type: ignore[index, call-overload]
        None, "took too long", "AssertionError", None, None,
    ]  # fmt: skip
    assert stored[4] is None and code.settings["kind"] == "unit_tests"
    assert deadline(reward, 0.5, 7) == 0.5 + 3 * (30 + SANDBOX.longest_start)


def test_a_task_has_a_sandbox_of_its_own(sandboxes: None, tmp_path: Path) -> None:
    """A program that takes 200 MiB passes where the task allows them, and not beside it."""
    narrow = SANDBOX.model_copy(update={"memory_mib": 128})
    file = {"kind": "file", "path": str(tmp_path / "rows.jsonl")}
    tasks = {"wide": {}, "narrow": {"sandbox": narrow.model_dump()}}
    data = DataConfig.model_validate({"source": {"kind": "tasks", "source": file, "tasks": tasks}})
    test = ["assert f(1) == 1"]
    rows: list[dict[str, Any]] = [
        {"question": "?", "test_list": test, "task": task} for task in ("wide", "narrow", "wide")
    ]
    reward = SHARE.model_copy(update={"test_timeout": 20.0})
    large = "size = len(b'x' * (200 * 2**20))\ndef f(x): return x"
    with RewardRunner(RewardsConfig(functions=(reward,)), data) as runner:
        scores = runner.score(["?"] * 3, [large] * 3, rows)
        (code,) = runner.code()
    assert scores.rewards.tolist() == [1.0, 0.0, 1.0] and not scores.failed.any()
    assert code.settings["sandboxes"]["narrow"]["memory_mib"] == 128
    slow = narrow.model_copy(update={"timeout": 90.0})
    assert deadline(reward, 1.0, 1, [slow]) == 1.0 + 90.0 + SANDBOX.longest_start


def test_a_machine_that_fails_is_nobodys_score(
    sandboxes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    row: dict[str, Any] = {"test_list": ["assert f(1) == 1"]}
    broken = SHARE.model_copy(
        update={"sandbox": ContainerSandbox(command="no-docker", image="python:3.12")}
    )
    with pytest.raises(SandboxFailed, match="no-docker"):
        UnitTestScorer(broken)("def f(x): return x", row)

    class NeverBegins:
        def __enter__(self) -> NeverBegins:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def exec(self, argv: list[str], stdin: bytes = b"") -> Executed:
            return Executed(
                cause="out_of_memory", exit_code=None, signal=9, stdout=b"", stderr=b"", truncated=False, seconds=0.1,
            )  # fmt: skip

    monkeypatch.setattr("engines.rewards.unit_tests.open_sandbox", lambda settings: NeverBegins())
    with pytest.raises(SandboxFailed, match="not begun"):
        UnitTestScorer(SHARE)("def f(x): return x", row)


def test_the_checks_before_a_run(tmp_path: Path, sandboxes: None) -> None:
    data = data_of(tmp_path, [{"question": "?", "test_list": ["assert 1"]}])
    source = open_source(data.source)
    check_rewards(RewardsConfig(functions=(SHARE,)), data, source)
    other = UnitTestsReward(tests_column="tests", setup_column="imports")
    with pytest.raises(ValueError, match="tests"):
        check_rewards(RewardsConfig(functions=(other,)), data, source)
    absent = ContainerSandbox(command="no-docker", image="i")
    none = RewardsConfig(functions=(UnitTestsReward(sandbox=absent),))
    with pytest.raises(ValueError, match=r"rewards\.functions\.0\.sandbox: no sandbox can be had"):
        check_rewards(none, data, source)
    small = RewardsConfig(functions=(UnitTestsReward(sandbox=ProcessSandbox(python="/bin/false")),))
    with pytest.raises(ValueError, match="/bin/false does not run"):
        check_rewards(small, data, source)
    with pytest.raises(ValueError, match=r"Set sandbox\.timeout higher"):
        UnitTestsReward(test_timeout=10, sandbox=ProcessSandbox(timeout=5))
