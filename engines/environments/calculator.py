"""A calculator that a model may call: the tool of the recipe `calculator`."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST = 200  # characters; products of so short a text stay small


def calculate(expression: str) -> str:
    """Work out an expression of numbers with +, -, *, / and brackets.

    Args:
        expression: such as (12.5 + 30) / 4.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression has at most {_LONGEST} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(value) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.expr) -> Fraction:
    """Of an expression; ValueError, which the model is shown, where it is none."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        result: Fraction = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
        return result
    raise ValueError("only numbers with +, -, *, / and brackets can be worked out")
