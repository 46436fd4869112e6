"""The public methods of an environment, or functions, as tools: JSON schemas, and calls of them.

A schema has the form that chat templates take: {"type": "function", "function": {"name",
"description", "parameters"}}, made of a method's type hints and of its docstring, whose section
"Args:" describes the arguments. Runs in the process of the environments: only the standard library
is imported.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engines.environments.protocol import ToolCall
from engines.processes.user_code import shortened

NO_TOOLS = ("reset", "step", "get_reward", "close")  # methods that Refrain calls itself
_ERROR_CHARACTERS = 2000  # of a tool's error that the model is shown

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")

Tools = Mapping[str, Callable[..., Any]]


def tools_of(environment: Any, besides: str = "") -> dict[str, Callable[..., Any]]:
    """Name -> bound method, of the methods that are tools; `besides`: one that is none.

    The class is asked, so that no property is computed.
    """
    kind = type(environment)
    return {
        name: getattr(environment, name)
        for name in dir(kind)
        if not name.startswith("_")
        and name not in (*NO_TOOLS, besides)
        and isinstance(inspect.getattr_static(kind, name), (types.FunctionType, classmethod))
    }


def schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a tool; ValueError, in one sentence, where it says too little of itself."""
    text = inspect.getdoc(tool)
    if not text:
        raise ValueError(
            f"{name} has no docstring, and is a tool, as every public method is. Write what it "
            f"does, or, of a method, call it _{name}"
        )
    description, arguments = _docstring(text)
    hints = typing.get_type_hints(tool)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"the tool {name} takes *{parameter.name}, which no schema describes")
        if parameter.name not in hints:
            raise ValueError(f"the argument {parameter.name} of the tool {name} has no type hint")
        properties[parameter.name] = _of_type(hints[parameter.name], f"{parameter.name} of {name}")
        if parameter.name in arguments:
            properties[parameter.name]["description"] = arguments[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def called(tools: Tools, call: ToolCall, finish: Callable[[Any], Any]) -> str:
    """What a tool answers to a call, as text: JSON where it gives none.

    An exception is an answer too, since the model's arguments may be at fault; only MemoryError,
    which says nothing about them, is raised. `finish` awaits what is awaitable.
    """
    name, arguments = call["name"], call["arguments"]
    if name not in tools:
        return f"Error: there is no tool {name!r}; there are: {', '.join(tools)}"
    if not isinstance(arguments, dict):
        return f"Error: the arguments of {name} are no JSON object"
    try:
        result = finish(tools[name](**arguments))
        if isinstance(result, str):
            return result
        return json.dumps(result, ensure_ascii=False, default=str)
    except MemoryError:
        raise
    except Exception as error:  # any, of a user's code
        return shortened(f"Error: {type(error).__name__}: {error}", _ERROR_CHARACTERS)


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What it says before its sections, and of each argument."""
    before: list[str] = []
    arguments: dict[str, str] = {}
    section, indent, last = "", 0, ""
    for line in text.splitlines():
        if found := _SECTION.match(line):
            section, indent, last = found[1], 0, ""
        elif not section:
            before.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            entry = _ARGUMENT.match(line.strip())
            if entry and depth == indent:
                last = entry[1]
                arguments[last] = entry[2]
            elif last:
                arguments[last] = f"{arguments[last]} {line.strip()}".strip()
    return "\n".join(before).strip(), arguments


def _of_type(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint."""
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if hint is Any:
        return {}
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is typing.Annotated:
        return _of_type(inner[0], where)
    if origin is typing.Literal:
        kinds = {_SCALARS[type(value)] for value in inner}
        return (
            {"type": kinds.pop(), "enum": list(inner)} if len(kinds) == 1 else {"enum": list(inner)}
        )
    if origin in (typing.Union, types.UnionType):
        return _of_union(inner, where)
    if origin is tuple and inner and inner[-1] is not ...:
        items = [_of_type(one, where) for one in inner]
        return {
            "type": "array",
            "prefixItems": items,
            "minItems": len(items),
            "maxItems": len(items),
        }
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        values = {"additionalProperties": _of_type(inner[1], where)} if len(inner) == 2 else {}
        return {"type": "object", **values}
    if inspect.isclass(origin) and issubclass(origin, (Sequence, set)):
        return {"type": "array", **({"items": _of_type(inner[0], where)} if inner else {})}
    raise ValueError(f"the type {hint} of the argument {where} has no JSON schema")


def _of_union(kinds: Sequence[Any], where: str) -> dict[str, Any]:
    some = [_of_type(kind, where) for kind in kinds if kind is not type(None)]
    found = some[0] if len(some) == 1 else {"anyOf": some}
    return {**found, "nullable": True} if type(None) in kinds else found
