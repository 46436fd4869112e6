"""Which tests a text has, by its syntax alone: no line of it runs, and no program is looked at.

What is collected is what pytest and unittest collect: functions test…, classes Test… and subclasses
of TestCase, with their methods test…; else the statements of the text themselves. A test that holds
no check is none: any program would pass it.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Names of functions that fail where something is not so: assertEqual, assert_allclose, fail, raises.
_CHECKS = re.compile(r"_*asserts?(_|[A-Z]|$)|fail(_|[A-Z]|$)|(raises|expect)$")
_NEVER_RUN = ("skip", "xfail", "expectedFailure")  # decorators
# What the stand-in of pytest has (engines/rewards/testing_cases.py).
PYTEST = frozenset(
    {
        "approx",
        "fail",
        "fixture",
        "importorskip",
        "main",
        "mark",
        "param",
        "raises",
        "skip",
        "xfail",
    }
)
# What pytest gives a test by itself, and the stand-in does not.
_FIXTURES = frozenset(
    {
        "caplog",
        "capfd",
        "capsys",
        "mocker",
        "monkeypatch",
        "recwarn",
        "request",
        "tmp_path",
        "tmpdir",
    }
)
# Another process's output, input and names cannot be replaced by a test.
_OUT_OF_REACH = frozenset({"redirect_stdout", "redirect_stderr"})

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """One test of a text; all empty: its statements."""

    function: str = ""  # or method
    group: str = ""  # class of the method; OUTER.INNER where it stands in another
    case: int | None = None  # of a function with parametrize; None: all that there are
    takes_candidate: bool = False  # whether it is called with the function that it tests


def parsed(text: str, what: str) -> ast.Module:
    """The syntax of a text; ValueError where it is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the row's {what} are no Python: {error}") from None


def collected(tree: ast.Module, before: ast.Module, candidate: bool) -> list[Collected]:
    """The tests of a text, in its order; none where it has none.

    Args:
        tree: of the text.
        before: of what is run before it, whose tests are not these.
        candidate: whether a function is named that tests may be called with.

    ValueError where a test needs what there is not.
    """
    return _Collection(tree, before, candidate).tests()


class _Collection:
    def __init__(self, tree: ast.Module, before: ast.Module, candidate: bool) -> None:
        self._tree, self._candidate = tree, candidate
        self._imports = _imports(before) | _imports(tree)
        self._definitions: dict[str, list[_Definition]] = {}
        for node in (*ast.walk(before), *ast.walk(tree)):
            if isinstance(node, _Definition):
                self._definitions.setdefault(node.name, []).append(node)
        top = {node.name: node for node in _top_level(tree.body)}  # the last one counts
        above = {node.name: node for node in _top_level(before.body)} | top
        self._functions = {k: v for k, v in top.items() if isinstance(v, _Function)}
        self._groups = {k: v for k, v in top.items() if isinstance(v, ast.ClassDef)}
        self._classes = {k: v for k, v in above.items() if isinstance(v, ast.ClassDef)}
        self._fixtures = {
            node.name: node
            for nodes in self._definitions.values()
            for node in nodes
            if isinstance(node, _Function)
            and any(self._last_name(decorator) == "fixture" for decorator in node.decorator_list)
        }

    def tests(self) -> list[Collected]:
        if self._all_skipped():
            return []
        tests: list[Collected] = []
        check = self._functions.get("check")
        if check is not None and _required(check) and self._checks(check.body):
            if self._candidate:
                tests.append(Collected(function="check", takes_candidate=True))
        elif check is not None and self._is_test(check):
            tests.append(Collected(function="check"))
        if not tests:
            for function in self._functions.values():
                if function.name.startswith("test") and self._is_test(function):
                    tests += self._cases("", function, function.decorator_list)
            for group in self._groups.values():
                tests += self._of_class(group)
        if not tests and self._checks(self._tree.body):
            tests.append(Collected())
        if not tests and check is not None and _required(check):
            raise ValueError(
                "the row's tests have check(candidate), and no column names the function"
            )
        if tests:
            self._refuse_the_unknown()
        return tests

    def _of_class(self, group: ast.ClassDef, outer: str = "") -> list[Collected]:
        """Of a class, and as pytest has it of those within it; `outer`: those around it, dotted."""
        methods = self._methods(group)
        case = self._is_test_case(group)
        if not case and (not group.name.startswith("Test") or "__init__" in methods):
            return []
        if self._never_runs(group):
            return []
        candidates = [m for m in methods.values() if m.name.startswith("test")]
        if case and not candidates:
            candidates = [m for m in methods.values() if m.name == "runTest"]
        name = f"{outer}{group.name}"
        tests = [
            test
            for method in candidates
            if self._is_test(method)
            for test in self._cases(
                name, method, [*method.decorator_list, *group.decorator_list], case
            )
        ]
        inner = [] if case else [node for node in group.body if isinstance(node, ast.ClassDef)]
        return [*tests, *(test for node in inner for test in self._of_class(node, f"{name}."))]

    def _methods(
        self, group: ast.ClassDef, below: frozenset[str] = frozenset()
    ) -> dict[str, _Function]:
        """Of a class and those of its bases that the text has."""
        methods: dict[str, _Function] = {}
        if group.name not in below:
            for base in reversed(group.bases):
                above = self._classes.get(self._last_name(base))
                if above is not None:
                    methods |= self._methods(above, below | {group.name})
        return methods | {node.name: node for node in group.body if isinstance(node, _Function)}

    def _is_test_case(self, group: ast.ClassDef, below: frozenset[str] = frozenset()) -> bool:
        if group.name in below:
            return False
        names = [self._last_name(base) for base in group.bases]
        return any(
            self._is_test_case(self._classes[name], below | {group.name})
            if name in self._classes
            else name.endswith("TestCase")
            for name in names
        )

    def _is_test(self, function: _Function) -> bool:
        """Whether it is run, and can fail. A generator's body is not run by a call."""
        if function.name in self._fixtures or self._never_runs(function):
            return False
        yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _run(function.body))
        return not yields and self._checks(function.body)

    def _never_runs(self, node: _Definition) -> bool:
        return any(self._last_name(decorator) in _NEVER_RUN for decorator in node.decorator_list)

    def _all_skipped(self) -> bool:
        """Whether the text says that all of its tests are skipped."""
        return any(
            isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)
            and any(
                self._last_name(part) in _NEVER_RUN
                for part in ast.walk(node.value)
                if isinstance(part, ast.Attribute)
            )
            for node in self._tree.body
        )

    def _cases(
        self,
        group: str,
        function: _Function,
        decorators: Sequence[ast.expr],
        unittest: bool = False,
    ) -> list[Collected]:
        """One test for each of its sets of parameters, where those are written out."""
        names: set[str] = set()
        sizes: list[int | None] = []
        for decorator in decorators:
            if isinstance(decorator, ast.Call) and self._last_name(decorator) == "parametrize":
                arguments = {k.arg: k.value for k in decorator.keywords} | dict(
                    zip(("argnames", "argvalues"), decorator.args, strict=False)
                )
                names |= _parameter_names(arguments.get("argnames"))
                sizes.append(self._size(arguments.get("argvalues")))
        needed = [] if unittest else _required(function, method=bool(group))
        unknown = [name for name in needed if name not in names | self._fixtures.keys()]
        if unknown and (len(unknown) > 1 or unknown[0] in _FIXTURES or not self._candidate):
            raise ValueError(
                f"the row's test {function.name} takes {unknown[0]}, which is no fixture of its text"
            )
        base = {"function": function.name, "group": group, "takes_candidate": bool(unknown)}
        if not sizes or None in sizes:
            return [Collected(**base)]  # type: ignore[arg-type]
        every = range(math.prod(size for size in sizes if size is not None))
        return [Collected(**base, case=case) for case in every]  # type: ignore[arg-type]

    def _size(self, values: ast.expr | None) -> int | None:
        """How many a list has that is written out, here or under a name; None: not known."""
        if isinstance(values, ast.Name):
            assigned = [
                node.value
                for node in self._tree.body
                if isinstance(node, ast.Assign)
                and any(isinstance(t, ast.Name) and t.id == values.id for t in node.targets)
            ]
            values = assigned[0] if len(assigned) == 1 else None
        if not isinstance(values, ast.List | ast.Tuple):
            return None
        starred = any(isinstance(value, ast.Starred) for value in values.elts)
        return None if starred else len(values.elts)

    def _checks(self, body: Sequence[ast.stmt], below: frozenset[str] = frozenset()) -> bool:
        """Whether statements that run have a check, or use a function of the text that has one."""
        for node in _run(body):
            if isinstance(node, ast.Assert | ast.Raise) or _exits(node):
                return True
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                name = node.id if isinstance(node, ast.Name) else node.attr
                if name in self._definitions:
                    if name not in below and any(
                        self._checks(_body_of(definition), below | {name})
                        for definition in self._definitions[name]
                    ):
                        return True
                elif _CHECKS.match(self._imports.get(name, name)):
                    return True
        return False

    def _refuse_the_unknown(self) -> None:
        """ValueError where the text needs what cannot be had beside a program's process."""
        self._refuse_fixtures()
        mocks = "patch" if "mock" in self._imports.values() else ""
        for node in ast.walk(self._tree):
            name = ""
            if isinstance(node, ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                name = node.attr
                if self._imports.get(owner) == "pytest" and name not in PYTEST:
                    raise ValueError(f"the row's tests use pytest.{name}, which is not known")
            elif isinstance(node, ast.Name):
                name = self._imports.get(node.id, node.id)
            elif isinstance(node, ast.ImportFrom) and node.module == "pytest":
                for alias in node.names:
                    if alias.name not in PYTEST:
                        raise ValueError(
                            f"the row's tests use pytest.{alias.name}, which is not known"
                        )
            elif isinstance(node, ast.ImportFrom) and node.module in ("mock", "unittest.mock"):
                mocks = "patch"
            if name and (name in _OUT_OF_REACH or name == mocks):
                raise ValueError(
                    f"the row's tests use {name}, which does not reach a program: it runs in a "
                    "process of its own"
                )

    def _refuse_fixtures(self) -> None:
        """ValueError where a fixture of the text needs what the stand-in of pytest does not give."""
        for name, fixture in self._fixtures.items():
            for decorator in fixture.decorator_list:
                keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
                if any(keyword.arg in ("params", "name") for keyword in keywords):
                    raise ValueError(
                        f"the row's tests have the fixture {name} with params or a name of its own, "
                        "which is not known. Use mark.parametrize"
                    )
            unknown = [
                argument for argument in _required(fixture) if argument not in self._fixtures
            ]
            unknown = [argument for argument in unknown if argument not in ("self", "cls")]
            if unknown and (unknown[0] in _FIXTURES or not self._candidate):
                raise ValueError(
                    f"the row's fixture {name} takes {unknown[0]}, which is no fixture of its text"
                )

    def _last_name(self, node: ast.expr) -> str:
        """The name at the end of a decorator or base class, as its module has it."""
        if isinstance(node, ast.Call):
            node = node.func
        if isinstance(node, ast.Attribute):
            return node.attr
        return self._imports.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def _imports(tree: ast.Module) -> dict[str, str]:
    """Name in the text -> last name of what is imported under it."""
    return {
        alias.asname or alias.name.partition(".")[0]: alias.name.rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def _top_level(body: Iterable[ast.stmt]) -> Iterator[_Definition]:
    """Definitions of a module, in the blocks of its statements too."""
    for node in body:
        if isinstance(node, _Definition):
            yield node
        elif not (isinstance(node, ast.If) and _is_main(node.test)):
            for block in _blocks(node):
                yield from _top_level(block)


def _is_main(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks of a statement of which some line may run."""
    if isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.Constant):
        yield node.body if node.test.value else node.orelse
        return
    empty = isinstance(node, ast.For) and isinstance(node.iter, ast.List | ast.Tuple)
    if isinstance(node, ast.For) and empty and not node.iter.elts:  # type: ignore[attr-defined]
        yield node.orelse
        return
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value:
            if isinstance(value[0], ast.stmt):
                yield value
            elif isinstance(value[0], ast.ExceptHandler | ast.match_case):
                yield from (handler.body for handler in value)


def _run(body: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes of statements that may run, without those of the definitions among them."""
    for node in body:
        if isinstance(node, _Definition):
            continue
        yield node
        for _, value in ast.iter_fields(node):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.expr | ast.withitem):
                    yield from ast.walk(part)
        for block in _blocks(node):
            yield from _run(block)
        if isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue):
            return


def _body_of(node: _Definition) -> list[ast.stmt]:
    """What runs where a function is called, or a class is used."""
    if isinstance(node, _Function):
        return node.body
    return [
        line
        for part in node.body
        for line in (part.body if isinstance(part, _Function) else [part])
    ]


def _exits(node: ast.AST) -> bool:
    """Whether it is exit(1) and the like."""
    if not isinstance(node, ast.Call) or len(node.args) != 1:
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    name = node.func.id if isinstance(node.func, ast.Name) else name
    code = node.args[0]
    return name == "exit" and not (isinstance(code, ast.Constant) and not code.value)


def _required(function: _Function, method: bool = False) -> list[str]:
    """Arguments that it cannot be called without."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    static = any(
        isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list
    )
    first = 1 if method and not static else 0
    names = [
        argument.arg for argument in positional[first : len(positional) - len(arguments.defaults)]
    ]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return names + [argument.arg for argument, default in keywords if default is None]


def _parameter_names(names: ast.expr | None) -> set[str]:
    """Of parametrize: a text with commas, or a list of texts."""
    texts = [n.value for n in ast.walk(names) if isinstance(n, ast.Constant)] if names else []
    return {part.strip() for text in texts for part in str(text).split(",")}


def has_statements(tree: ast.Module) -> bool:
    """Whether anything is in it besides comments and texts."""
    return any(
        not (isinstance(node, ast.Pass))
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in tree.body
    )
