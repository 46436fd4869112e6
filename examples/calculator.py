"""A calculator as a tool, for problems of reasoning-gym: see calculator.yaml."""

from __future__ import annotations

import ast
import operator

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_MOST = 10**12  # beyond which no number is worked on: a product of long ones takes for ever


class Calculator:
    """An environment whose only tool works out sums and products."""

    def reset(self, **row: object) -> str:
        """Begin; the row's question says all."""
        return ""

    def calculate(self, expression: str) -> str:
        """Work out an expression of whole numbers with +, - and *.

        Args:
            expression: such as 12 + 30.
        """
        return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.expr) -> int:
    """Of an expression; ValueError, which the model is shown, where it is no such expression."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        found = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        found = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("only whole numbers with +, - and * can be worked out")
    if abs(found) > _MOST:
        raise ValueError(f"numbers beyond {_MOST} are too large")
    return found
