"""Examples of doctest in a row's tests: `>>> add(1, 2)` and the line that it gives."""

from __future__ import annotations

import ast
import doctest

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
    wanted = [example for example in examples if example.want]
    if not wanted:
        raise ValueError("the row's examples of doctest do not say what they give")
    for example in wanted:
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
