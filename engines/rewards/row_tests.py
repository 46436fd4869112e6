"""The tests of a row of the data set, in whichever form its column holds them.

Whether a row has tests is decided here, before any program is looked at: a row without tests judges
no program, and its samples have no reward. Examples of doctest (`>>> add(1, 2)` and the line that it
gives) are one form.
"""

from __future__ import annotations

import ast
import doctest
import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from configs.rewards import UnitTestsReward
from engines.rewards.collection import Collected, collected, has_statements, parsed
from storage.objects.documents import Row

_FENCED = re.compile(r"\s*```\w*[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL)
_LITERAL = ("[", "{", "(", '"', "'")  # how JSON, or Python's text of a value, begins
DOCTEST = "test_examples"  # the function that runs them
_NUMBERS = ("inf", "nan")  # as repr writes them


def is_doctest(text: str) -> bool:
    """Whether a text is examples, with prose around them perhaps, and so no Python."""
    if not any(line.lstrip().startswith(">>> ") for line in text.splitlines()):
        return False
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return False


def docstrings_with_examples(tree: ast.Module) -> list[str]:
    """Docstrings of a module, its functions and classes that hold examples."""
    documented = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return [text for text in texts if text and ">>> " in text]


def doctest_code(text: str) -> str:
    """A test that runs the examples of a text, each of which has to give what stands below it.

    ValueError where they cannot be read, where none of them says what it gives, or where one expects
    what the program prints, which no test sees: it runs in a process of its own.
    """
    try:
        examples = doctest.DocTestParser().get_examples(text)
    except ValueError as error:
        raise ValueError(f"the row's examples of doctest cannot be read: {error}") from None
    checks = [example for example in examples if example.want]
    if not checks:
        raise ValueError("the row's examples of doctest do not say what they give")
    for example in checks:
        if example.exc_msg is None and not _told_by_the_test(example):
            raise ValueError(
                f"the row's example of doctest {example.source.strip()!r:.60} expects printed text, "
                "which a test does not see: the program runs in a process of its own"
            )
    return (
        "import doctest\n"
        f"def {DOCTEST}():\n"
        "    parser, said = doctest.DocTestParser(), []\n"
        f"    found = parser.get_doctest({text!r}, globals(), 'row', None, 0)\n"
        "    runner = doctest.DocTestRunner(verbose=False)\n"
        "    runner.run(found, out=said.append)\n"
        "    assert not runner.failures and runner.tries, ''.join(said)[-150:]\n"
    )


def _told_by_the_test(example: doctest.Example) -> bool:
    """Whether the output is of a print in the example itself, or the value of an expression."""
    called = {
        node.func.id
        for node in ast.walk(ast.parse(example.source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    if "print" in called or any(example.options.values()):  # as ELLIPSIS
        return True
    try:
        value = ast.parse(example.want.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return example.want.lstrip().startswith("<")  # <Point object>
    classes = {
        id(part)
        for node in ast.walk(value)
        if isinstance(node, ast.Call)
        for part in ast.walk(node.func)
    }
    names = [node for node in ast.walk(value) if isinstance(node, ast.Name)]
    return all(id(name) in classes or name.id in _NUMBERS for name in names)  # Counter({1: 2})


def tests_of(reward: UnitTestsReward, row: Row) -> list[dict[str, Any]]:
    """A row's tests, as engines/rewards/testing_program.py takes them; ValueError if it has none.

    Six forms, as text of JSON or of Python or as they are:

        "def test_one(): …", a class Test… or TestCase, or asserts      a test for each function
        "def check(candidate): …"                                      the function
        ">>> add(1, 2)\n3\n", or such examples in docstrings           a text of doctest
        ["assert add(1, 2) == 3", …]                                   those of each text
        {"inputs": ["1 2\\n", …], "outputs": ["3\\n", …]}                standard input and output
        [{"input": "1 2\\n", "output": "3\\n"}, …]                       the same

    With "fn_name" beside inputs and outputs, a test calls that function with the values of an input.
    A pair of the testtype functional (LiveCodeBench), or of the type function_call (SYNTHETIC-1),
    calls the function that it or the row names; text as input has a value of JSON in each line. Pairs
    may be a dict's test_cases.
    """
    column = _value(row.get(reward.tests_column))
    setup = row.get(reward.setup_column) if reward.setup_column is not None else None
    before = "\n".join(map(str, setup)) if isinstance(setup, list) else str(setup or "")
    function = row.get(reward.function_column)
    name = _function_name(_value(function))
    tests: list[dict[str, Any]] = []
    if isinstance(column, str):
        tests = _of_texts([column], before, name)
    elif isinstance(column, Mapping):
        tests = _of_dict(column, before, name)
    elif isinstance(column, list):
        tests = _of_list(column, before, name)
    # A program that prints nothing passes a test that expects nothing.
    if not any(test["kind"] == "calls" or test["output"] for test in tests):
        raise ValueError(
            f"the row's column {reward.tests_column!r} holds no tests: no check of it would run, "
            "whatever the program"
        )
    return tests[: reward.max_tests]


def _value(value: object) -> object:
    """What a text of JSON, or of Python's literals, holds; other values and texts as they are."""
    while isinstance(value, str) and value.lstrip().startswith(_LITERAL):
        text = value
        try:
            value = json.loads(text)
        except ValueError:
            try:
                value = ast.literal_eval(text.strip())
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return text
        if isinstance(value, tuple):
            value = list(value)
        if not isinstance(value, (str, list, dict)):
            return text
    return value


def _of_list(entries: list[Any], before: str, function: str | None) -> list[dict[str, Any]]:
    entries = [entry for entry in map(_value, entries) if entry is not None]
    if all(isinstance(entry, str) for entry in entries):
        return _of_texts(entries, before, function)
    tests: list[dict[str, Any]] = []
    for entry in entries:
        if not isinstance(entry, Mapping) or not {"input", "output"} <= entry.keys():
            raise ValueError(
                f"a row's test is neither a text nor has it input and output: {entry!r:.100}"
            )
        kind = entry.get("testtype", "stdin")
        called = kind == "functional" or entry.get("type") == "function_call"
        name = _function_name(entry) or _function_name(_value(entry.get("metadata"))) or function
        if (called or entry.get("fn_name")) and name is not None:
            output = entry["output"]
            wrapped = kind != "functional" and isinstance(output, list) and len(output) == 1
            tests.append(_call(name, entry["input"], output, wrapped))
        elif kind == "stdin" and not called:
            tests.append(_printing(entry["input"], entry["output"]))
        else:
            kind = "function_call" if kind == "stdin" else kind
            raise ValueError(
                f"tests of the kind {kind!r} are not known: stdin is, and functional where "
                "function_column names a column with the function's name"
            )
    return tests


def _function_name(value: object) -> str | None:
    """The function that a value names: itself as a text, or its fn_name or func_name."""
    if isinstance(value, Mapping):
        value = value.get("fn_name") or value.get("func_name")
    return value if isinstance(value, str) and value.strip() else None


def _values_of(values: object) -> list[list[Any]]:
    """The arguments of a call, as each way to read its input has them."""
    if not isinstance(values, str):
        return [values] if isinstance(values, list) else []
    lines = [_json(line) for line in values.split("\n") if line.strip()]
    # A list by itself is the only argument, or the arguments.
    return [lines, *lines] if len(lines) == 1 and isinstance(lines[0], list) else [lines]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"a functional test has input or output that is no JSON: {error}"
        ) from None


def _bare(text: str) -> str:
    """A text without the fences, the byte order mark or the indentation of all of it."""
    text = text.removeprefix("\ufeff")
    if fenced := _FENCED.fullmatch(text):
        text = fenced[1]
    first = next((line for line in text.splitlines() if line.strip()), "")
    return textwrap.dedent(text) if first[:1] in (" ", "\t") else text


def _of_texts(texts: list[str], before: str, function: str | None) -> list[dict[str, Any]]:
    """The tests of each text. One without tests, such as imports, comes before those that follow."""
    tests: list[dict[str, Any]] = []
    for text in map(_bare, texts):
        if is_doctest(text):
            tests.append(_calling(doctest_code(text), before, Collected(function=DOCTEST), None))
            continue
        tree = parsed(text, "tests")
        cases = collected(tree, parsed(before, "setup statements"), function is not None)
        if not cases and (examples := docstrings_with_examples(tree)):
            test = Collected(function=DOCTEST)
            tests += [_calling(doctest_code(text), before, test, None) for text in examples]
        elif not cases and has_statements(tree):
            before = f"{before}\n{text}"
        tests += [_calling(text, before, test, function) for test in cases]
    return tests


def _calling(code: str, setup: str, test: Collected, function: str | None) -> dict[str, Any]:
    return {
        "kind": "calls",
        "code": code,
        "setup": setup,
        "function": test.function,
        "group": test.group,
        "case": test.case,
        "argument": function if test.takes_candidate else "",
    }


def _of_dict(column: Mapping[str, Any], before: str, function: str | None) -> list[dict[str, Any]]:
    cases = _value(column.get("test_cases"))
    if not isinstance(cases, list):
        return _of_pairs(column)
    language = column.get("language") or "python"
    if str(language).lower() not in ("python", "python3", "py"):
        raise ValueError(f"a row's tests are of programs in {language}, and Python is run")
    return _of_list(cases, before, _function_name(column) or function)


def _of_pairs(column: Mapping[str, Any]) -> list[dict[str, Any]]:
    for names in (("inputs", "outputs"), ("input", "output")):
        if column.keys() >= set(names):
            inputs, outputs = (_value(column[name]) for name in names)
            break
    else:
        raise ValueError(
            f"a row's tests are a dict with {', '.join(map(str, column)) or 'nothing'}, and not with "
            "inputs and outputs"
        )
    if names[0] == "input" and not isinstance(inputs, list) and not isinstance(outputs, list):
        inputs, outputs = [inputs], [outputs]
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("inputs and outputs of a row's tests are no lists")
    if len(inputs) != len(outputs):
        more = "inputs than outputs" if len(inputs) > len(outputs) else "outputs than inputs"
        raise ValueError(f"a row's tests have more {more}: one list is shorter than the other")
    name = column.get("fn_name")
    if not name:
        return [_printing(*pair) for pair in zip(inputs, outputs, strict=True)]
    # APPS and TACO wrap each returned value in a list of one, and other sets do not. Where every
    # output is such a list, either may be meant.
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    return [_call(name, *pair, wrapped) for pair in zip(inputs, outputs, strict=True)]


def _call(name: object, arguments: object, expected: object, wrapped: bool) -> dict[str, Any]:
    identifier = isinstance(name, str) and name.removeprefix("Solution().").isidentifier()
    ways = _values_of(arguments)
    if not isinstance(name, str) or not identifier or not ways:
        raise ValueError(f"tests of the function {name!r} do not give it a list of arguments")
    if isinstance(arguments, str) and isinstance(expected, str):
        expected = _json(expected)
    either = " or _found == _expected[0]" if wrapped else ""
    code = (
        "def _listed(value):\n"
        "    return [*map(_listed, value)] if type(value) in (list, tuple) else value\n"
        "def check(candidate):\n"
        "    inf, nan = float('inf'), float('nan')\n"  # as JSON has them
        f"    _ways, _expected = {ways!r}, {expected!r}\n"
        "    for _number, _given in enumerate(_ways, 1):\n"
        "        try:\n"
        "            _found = _listed(candidate(*_given))\n"
        f"            assert _found == _expected{either}\n"
        "            return\n"
        "        except Exception:\n"
        "            if _number == len(_ways):\n"
        "                raise\n"
    )
    return _calling(code, "", Collected(function="check", takes_candidate=True), name)


def _printing(text: object, expected: object) -> dict[str, Any]:
    lines = ["\n".join(map(str, v)) if isinstance(v, list) else str(v) for v in (text, expected)]
    return {"kind": "output", "input": lines[0], "output": lines[1].strip() and lines[1]}
