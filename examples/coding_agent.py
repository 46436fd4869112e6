"""A minimal agent for coding tasks: each answer of the model is a command, or has one in a block.

python coding_tasks.py tasks
refrain grpo coding.yaml
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import openai

if TYPE_CHECKING:
    from engines.environments.coding.workspace import Workspace

ASKED = "{problem}\nAnswer with one command for bash at a time. The command done ends it."
BLOCK = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
SECONDS = 600.0  # that it waits for a turn


def solve(base_url: str, api_key: str, model: str, problem: str, workspace: Workspace) -> float:
    """Work until the model says done, or a limit ends it; the reward is what the tests come to."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, timeout=SECONDS)
    chat = [{"role": "user", "content": ASKED.format(problem=problem)}]
    while True:
        try:
            answer = client.chat.completions.create(model=model, messages=chat)  # type: ignore[arg-type]
        except openai.BadRequestError as error:
            if "the episode is over" not in str(error):
                raise
            return workspace.reward()
        text = answer.choices[0].message.content or ""
        found = BLOCK.search(text)
        command = (found[1] if found else text).strip()
        if command == "done":
            return workspace.reward()
        chat.append({"role": "assistant", "content": text})
        chat.append({"role": "user", "content": workspace.bash(command)})


def choose(
    base_url: str,
    api_key: str,
    model: str,
    problem: str,
    edits: list[list[str]],
    workspace: Workspace,
) -> float:
    """The model's last letter chooses among two edits: a to m the first, n to z the other.

    For a model that writes no commands, to see that what the tests say is learned.
    """
    client = openai.OpenAI(base_url=base_url, api_key=api_key, timeout=SECONDS)
    asked = [{"role": "user", "content": problem}]
    answer = client.chat.completions.create(model=model, messages=asked)  # type: ignore[arg-type]
    text = answer.choices[0].message.content or ""
    workspace.edit(*edits[text[-1:] >= "n"])
    return workspace.reward()
