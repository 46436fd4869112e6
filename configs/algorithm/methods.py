"""The base of a choice by name: a model whose `kind` is the name and whose fields its parameters."""

import ast
import importlib.util
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from configs.base import FunctionPath, Settings

OWN = {"configs", "engines", "flows", "storage", "tasks"}  # Refrain's packages


class Method(Settings):
    """A choice by name; `arguments` are the keyword arguments of the function of that name."""

    def arguments(self) -> dict[str, Any]:
        """Field name -> value, without the name of the method."""
        return self.model_dump(exclude={"kind"})


class UserFunction(Method):
    """A user's own function, by import path; it has the signature of the built-in ones."""

    kind: Literal["function"] = "function"
    path: FunctionPath
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
    place, _, name = path.rpartition(":")
    file = place if place.endswith(".py") else _file_of(place, path)
    if file is None or not file.endswith(".py"):
        return path
    try:
        with open(file, encoding="utf-8") as source:
            tree = ast.parse(source.read(), file)
    except FileNotFoundError:
        raise ValueError(f"there is no file '{file}'. Check '{path}'.") from None
    except SyntaxError as error:
        raise ValueError(f"'{file}' is not Python: {error}.") from None
    names = _names(tree)
    first = name.split(".")[0]
    if first not in names and "*" not in names:
        kind = "file" if file == place else "module"
        raise ValueError(f"{kind} '{place}' has no '{first}'. Check '{path}'.")
    if file == place:
        _refuse_taken_names(tree, Path(file))
    return path


def _file_of(module: str, path: str) -> str | None:
    """The file of a module; None where it has none, ValueError where there is no module."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise ValueError(
            f"no module '{module}' is found for '{path}'. Install it, start from its folder, or "
            "name its file: path/to/file.py:NAME."
        )
    return spec.origin


def _refuse_taken_names(tree: ast.Module, file: Path) -> None:
    """ValueError where a file imports a neighbour whose name is one of Refrain's own packages.

    Such a file is loaded into processes that have those packages, so it would get them.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            modules = [node.module]
        else:
            continue
        for name in {module.partition(".")[0] for module in modules} & OWN:
            beside = (file.with_name(name), file.with_name(f"{name}.py"))
            if any(one.exists() for one in beside):
                raise ValueError(
                    f"'{file}' imports '{name}', which is a package of Refrain's and a neighbour of "
                    "the file: it would get Refrain's. Give the neighbour another name."
                )


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
