"""The base of a choice by name: a model whose `kind` is the name and whose fields its parameters."""

import ast
import importlib.util
from typing import Any, Literal

from pydantic import Field, field_validator

from configs.base import Settings


class Method(Settings):
    """A choice by name; `arguments` are the keyword arguments of the function of that name."""

    def arguments(self) -> dict[str, Any]:
        """Field name -> value, without the name of the method."""
        return self.model_dump(exclude={"kind"})


class UserFunction(Method):
    """A user's own function, by import path; it has the signature of the built-in ones."""

    kind: Literal["function"] = "function"
    path: str = Field(
        pattern=r"^[\w.]+:[\w.]+$", description="Import path of the function, package.module:name."
    )
    params: dict[str, int | float | bool | str] = Field(
        default_factory=dict, description="Keyword arguments passed on every call."
    )

    def arguments(self) -> dict[str, Any]:
        """The user's own keyword arguments."""
        return dict(self.params)

    @field_validator("path")
    @classmethod
    def _exists(cls, path: str) -> str:
        return found_path(path)


def found_path(path: str) -> str:
    """The import path, if there is such a name; ValueError else.

    The module's text is read, not run: the process that loads a config stays free of torch.
    """
    module, _, name = path.partition(":")
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise ValueError(
            f"no module '{module}' is found for '{path}'. Install it, or start from its folder."
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return path
    with open(spec.origin, encoding="utf-8") as source:
        names = _names(ast.parse(source.read()))
    first = name.split(".")[0]
    if first not in names and "*" not in names:
        raise ValueError(f"module '{module}' has no '{first}'. Check '{path}'.")
    return path


def _names(tree: ast.Module) -> set[str]:
    """Names that the module's text defines or imports anywhere outside functions and classes."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                names.add(node.id)
        else:
            pending += list(ast.iter_child_nodes(node))
    return names
