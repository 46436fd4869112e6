"""A calculator as a tool, for problems of reasoning-gym.

refrain grpo calculator.yaml          # in this folder
refrain grpo calculator.yaml episodes.environment.params.wrong=true  # no tool to learn from
"""

from __future__ import annotations

import ast
import operator
import random
import re

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_MOST = 10**12  # beyond which no number is worked on: a product of long ones takes for ever


class Calculator:
    """An environment whose only tool works out sums and products; or, wrong, says any number."""

    def __init__(self, wrong: bool = False) -> None:
        self._wrong = wrong

    def reset(self, seed: int = 0, **row: object) -> str:
        """Begin; the row's question says all."""
        self._drawn = random.Random(seed)
        return ""

    def calculate(self, expression: str) -> str:
        """Work out an expression of whole numbers with +, - and *.

        Args:
            expression: such as 12 + 30.
        """
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(self._drawn.randint(-999, 999) if self._wrong else value)


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


_PROBLEM = "State the final answer to the following arithmetic problem: {} ="  # as chain_sum asks
_CALL = '<tool_call>{{"name": "calculate", "arguments": {{"expression": "{}"}}}}</tool_call>'


def rows(size: int = 2000, seed: int = 7, digits: int = 3) -> list[dict[str, object]]:
    """Sums of reasoning-gym, each after two that were worked out with the calculator.

    SmolLM2-135M hardly writes a call that it was only told of; of two that it was shown, it copies
    the form.
    """
    import reasoning_gym

    problems = reasoning_gym.create_dataset(
        "chain_sum",
        seed=seed,
        size=size,
        min_terms=2,
        max_terms=2,
        min_digits=2,
        max_digits=digits,
    )
    shown = [*_shown("12 + 30", "42"), *_shown("507 - 86", "421")]
    return [
        {
            "question": [*shown, {"role": "user", "content": problem["question"]}],
            "answer": problem["answer"],
        }
        for problem in problems
    ]


def _shown(expression: str, result: str) -> list[dict[str, str]]:
    said = [_PROBLEM.format(expression), _CALL.format(expression), result, result]
    return [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * 2, said, strict=True)
    ]


def right(
    prompts: list[object],
    completions: list[list[dict[str, str]]],
    answer: list[str],
    **columns: object,
) -> list[float]:
    """1 where the last turn of the model has the answer as its last number, else 0."""
    episodes = [messages[-1]["content"] for messages in completions]
    last_turns = [text.rpartition("\nassistant\n")[2] for text in episodes]
    numbers = [re.findall(r"-?\d+", text)[-1:] for text in last_turns]
    return [float(found == [one]) for found, one in zip(numbers, answer, strict=True)]
