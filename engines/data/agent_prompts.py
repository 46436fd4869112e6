"""The prompts of agents, programs that ask the model by themselves: all that is asked they ask."""

from __future__ import annotations

import json
from typing import cast

from configs.data import DataConfig
from engines.data.chat_template import (
    TOO_LONG,
    TokenizedPrompts,
    chat_of,
    ids_of,
    with_variables,
)
from engines.data.conversation import Conversation
from storage.objects.documents import Row


class AgentPrompts:
    """Makes them, with a conversation for each set of tools."""

    def __init__(self, conversation: Conversation, data: DataConfig) -> None:
        """conversation: of agents without tools."""
        self._conversation = conversation
        self._data = data
        self._with_tools: dict[str, Conversation] = {}  # by the tools, as JSON

    def made(
        self, rows: list[Row], requests: list[str], longest: int | None = None
    ) -> TokenizedPrompts:
        """What the model reads of requests (JSON) of rows' agents, as prompts.

        Those of different tools are rendered one after the other; token ids are taken as they are.
        longest: as in chat_template.tokenize.
        """
        given = {n: there for n, one in enumerate(requests) if (there := ids_of(one))}
        asked = {n: chat_of(one) for n, one in enumerate(requests) if n not in given}
        most = longest or self._data.max_prompt_tokens
        by_tools: dict[str, list[int]] = {}
        for number, chat in asked.items():
            by_tools.setdefault(json.dumps(chat.tools), []).append(number)
        ids = {n: there for n, there in given.items() if len(there) <= most}
        dropped = dict.fromkeys(given.keys() - ids.keys(), TOO_LONG)
        for tools, numbers in by_tools.items():
            conversation = self._conversation_with(tools)
            asking = []
            for n in numbers:
                data, messages = self._data, asked[n].messages
                plain = data.template == "plain"
                prompt = "".join(one["content"] for one in messages) if plain else messages
                row = with_variables(rows[n], asked[n].variables)
                asking.append(cast("Row", {**row, data.prompt_column: prompt}))
            made = conversation.prompts(asking, longest=longest)
            ids |= {numbers[p]: one for p, one in zip(made.kept, made.prompt_ids, strict=True)}
            dropped |= {numbers[p]: reason for p, reason in made.dropped}
        kept = sorted(ids)
        return TokenizedPrompts(
            prompt_ids=[ids[number] for number in kept],
            kept=kept,
            dropped=sorted(dropped.items()),
        )

    def _conversation_with(self, tools: str) -> Conversation:
        """The conversation of agents with these tools, whose template was checked with them."""
        if tools not in self._with_tools:
            given = json.loads(tools)
            conversation = self._conversation.with_tools(given)
            conversation.check(["user", "tool"] if given else ["user"])
            self._with_tools[tools] = conversation
        return self._with_tools[tools]
