"""The environments of a task's rows, and what the model reads of what they and their agents say.

Agents are programs that ask the model by themselves: all that is asked they ask.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from configs.data import DataConfig
from configs.episodes import EpisodesConfig
from engines.data.chat_template import TOO_LONG, VARIABLES, Message, Role, TokenizedPrompts, Tool
from engines.environments.one_turn import OneTurn
from engines.environments.protocol import EnvironmentReady
from engines.environments.sessions import Environments
from engines.episodes.conversation import Conversation
from storage.objects.documents import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Chat:
    """What an agent asks."""

    messages: list[Message]
    tools: list[Tool]
    variables: dict[str, Any]  # of the chat template


def chat_of(observation: str) -> Chat:
    """The messages and tools of an agent's request, which is JSON.

    Calls of tools that it gives as said before stand as templates take them, with their arguments as
    objects.
    """
    request = json.loads(observation)
    messages = []
    for entry in request["messages"]:
        message = {"role": entry["role"], "content": entry.get("content") or ""}
        if calls := entry.get("tool_calls"):
            message["tool_calls"] = [_template_call(call) for call in calls]
        messages.append(message)
    return Chat(messages, request.get("tools") or [], request.get(VARIABLES) or {})


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def with_variables(row: Row, variables: Mapping[str, Any]) -> Row:
    """A row with what its agent asks of the chat template, before the row's own variables."""
    if not variables:
        return row
    own = row.get(VARIABLES)
    return {**row, VARIABLES: {**(own if isinstance(own, dict) else {}), **variables}}


def ids_of(observation: str) -> list[int] | None:
    """The token ids of an agent's request; None where it gives messages."""
    ids: list[int] | None = json.loads(observation).get("ids")
    return ids


def said_by(messages: Sequence[Message]) -> tuple[str, Role]:
    """New messages of an agent as one, and its role; ValueError, in one sentence, for a mixture.

    What a user says after results of tools is part of these.
    """
    roles = [message["role"] for message in messages]
    results = roles.count("tool")
    if roles == ["tool"] * results + ["user"] * (len(roles) - results):
        texts = [message["content"] for message in messages]
        told = ["\n".join(texts[:results])] if results else []
        return "\n\n".join([*told, *texts[results:]]), "tool" if results else "user"
    raise ValueError(
        f"the agent's new messages are of the roles {', '.join(dict.fromkeys(roles))}; between two "
        "turns of the model they have to be results of tools, a user's, or both in this order"
    )


class AgentPrompts:
    """Makes the prompts of agents, with a conversation for each set of tools."""

    def __init__(self, conversation: Conversation, data: DataConfig) -> None:
        """conversation: of agents without tools."""
        self._conversation = conversation
        self._data = data
        self._with_tools: dict[str, Conversation] = {}  # by the tools, as JSON

    def prompts(
        self, rows: list[Row], requests: list[str], longest: int | None = None
    ) -> TokenizedPrompts:
        """What the model reads of requests (JSON) of rows' agents, as prompts.

        Those of different tools are rendered one after the other; token ids are taken as they are.
        longest: as in chat_template.tokenize.
        """
        with_ids = {n: ids for n, text in enumerate(requests) if (ids := ids_of(text))}
        chats = {n: chat_of(text) for n, text in enumerate(requests) if n not in with_ids}
        most = longest or self._data.max_prompt_tokens
        by_tools: dict[str, list[int]] = {}
        for number, chat in chats.items():
            by_tools.setdefault(json.dumps(chat.tools), []).append(number)
        prompt_ids = {n: ids for n, ids in with_ids.items() if len(ids) <= most}
        dropped = dict.fromkeys(with_ids.keys() - prompt_ids.keys(), TOO_LONG)
        for tools, numbers in by_tools.items():
            conversation = self._conversation_with(tools)
            rows_of_prompts = []
            for n in numbers:
                data, messages = self._data, chats[n].messages
                plain = data.template == "plain"
                prompt = "".join(message["content"] for message in messages) if plain else messages
                row = with_variables(rows[n], chats[n].variables)
                rows_of_prompts.append(cast("Row", {**row, data.prompt_column: prompt}))
            tokenized = conversation.prompts(rows_of_prompts, longest=longest)
            prompt_ids |= {
                numbers[place]: ids
                for place, ids in zip(tokenized.kept, tokenized.prompt_ids, strict=True)
            }
            dropped |= {numbers[place]: reason for place, reason in tokenized.dropped}
        numbers_kept = sorted(prompt_ids)
        return TokenizedPrompts(
            prompt_ids=[prompt_ids[number] for number in numbers_kept],
            kept=numbers_kept,
            dropped=sorted(dropped.items()),
        )

    def _conversation_with(self, tools: str) -> Conversation:
        """The conversation of agents with these tools, whose template was checked with them."""
        if tools not in self._with_tools:
            schemas = json.loads(tools)
            conversation = self._conversation.with_tools(schemas)
            conversation.check(["user", "tool"] if schemas else ["user"])
            self._with_tools[tools] = conversation
        return self._with_tools[tools]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnvironment:
    """How the rows of a task are played, or all rows of a run with one."""

    settings: EpisodesConfig
    data: DataConfig  # of the task
    environments: Environments | OneTurn
    code: EnvironmentReady
    conversation: Conversation
    agents: AgentPrompts
    max_new_tokens: int  # longest conversation, in tokens

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        settings: EpisodesConfig,
        environments: Environments | OneTurn,
        max_new_tokens: int,
    ) -> TaskEnvironment:
        """Raises as `Environments.start` and `Conversation.check` do."""
        code = environments.start()
        tools = [dict(tool) for tool in code.tools]
        conversation = Conversation(tokenizer, data, tools)
        task = cls(
            settings=settings,
            data=data,
            environments=environments,
            code=code,
            conversation=conversation,
            agents=AgentPrompts(conversation, data),
            max_new_tokens=max_new_tokens,
        )
        if not isinstance(environments, OneTurn):
            conversation.check([task.answers_as])
            if settings.past_turns == "as_rendered" and not code.chats:
                conversation.check_rendered(task.answers_as)
        return task

    @property
    def answers_as(self) -> Role:
        """As whom an environment speaks."""
        return "tool" if self.code.tools else "user"

    def read_request(
        self,
        row: Row,
        request: Mapping[str, Any],
        past: Sequence[int],
        ended: bool,
        longest: int | None,
    ) -> tuple[list[int], Sequence[int]]:
        """The ids that a turn reads which an agent asks for by messages, and the authors of its end.

        past: all up to the end of the turn that it goes on from; nothing where it goes on from none.
        ended: whether the model ended that turn. longest: as in AgentPrompts.prompts; nothing is read
        of a longer one. ValueError, in a sentence, for messages that cannot be rendered.
        """
        text = json.dumps(request)
        chat = chat_of(text)
        talk = self.conversation.for_row(with_variables(row, chat.variables))
        rendered = self.settings.past_turns == "as_rendered" and talk.rewrites
        if past and not rendered:
            message, role = said_by(chat.messages[-request["new"] :])
            delta = talk.delta(message, ended=ended, last=past[-1], role=role)
            return [*past, *delta.ids], delta.authors
        prompts = self.agents.prompts([row], [text], longest)
        return (prompts.prompt_ids[0], ()) if prompts.kept else ([], ())
