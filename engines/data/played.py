"""How the rows of a task are played."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.data import DataConfig
from configs.episodes import EpisodesConfig
from engines.data.agent_prompts import AgentPrompts
from engines.data.chat_template import Role
from engines.data.conversation import Conversation
from engines.environments.one_turn import OneTurn
from engines.environments.protocol import EnvironmentReady
from engines.environments.sessions import Environments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
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
    ) -> Played:
        """Raises as `Environments.start` and `Conversation.check` do."""
        code = environments.start()
        tools = [dict(tool) for tool in code.tools]
        conversation = Conversation(tokenizer, data, tools)
        found = cls(
            settings=settings,
            data=data,
            environments=environments,
            code=code,
            conversation=conversation,
            agents=AgentPrompts(conversation, data),
            max_new_tokens=max_new_tokens,
        )
        if not isinstance(environments, OneTurn):
            conversation.check([found.answers_as])
            if settings.past_turns == "as_rendered" and not code.chats:
                conversation.check_rendered(found.answers_as)
        return found

    @property
    def answers_as(self) -> Role:
        """As whom an environment speaks."""
        return "tool" if self.code.tools else "user"
