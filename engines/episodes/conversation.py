"""What is added to a conversation's tokens between two turns of the model.

Text that is decoded and encoded again need not give the tokens that were sampled, and a policy that
is trained on other tokens than it wrote drifts until training diverges. So nothing that stands is
encoded again: after each turn the template's words and the environment's observation alone are
rendered, encoded and appended (`Conversation.delta`). A template that removes the thoughts of earlier
turns would show the model another past than that; by the settings the past stays as it was sampled,
or each turn is asked for after a rendering of its own (`Conversation.rendered`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.data import DataConfig
from engines.data.chat_template import (
    Message,
    Role,
    TokenizedPrompts,
    Tool,
    first_chat,
    fits_template,
    prompt_of,
    require_template,
    takes_tools,
    template_variables,
    tokenize,
    tools_in_words,
)
from storage.batches.columns import Author
from storage.objects.documents import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION, _ANSWER, _OBSERVED = "question41", "answer52", "result63"  # of dummy conversations
_THOUGHT = "thought74\n</think>\n\n"
_OPENERS = ("<think>\n", "<think>")
_ANOTHER = "Set data.template = plain, or use a model with another chat template."


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens to append after a turn of the model, and who wrote each."""

    ids: list[int]
    authors: list[Author]  # of the same length; ENVIRONMENT or TEMPLATE


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the template writes around an observation that follows a turn of the model."""

    role: str  # of the message, as the template has it
    before: str  # closing words of the turn, and the head of the message
    after: str  # the end of the message, and the generation prompt
    before_ids: list[int]
    after_ids: list[int]
    end: int  # place in before_ids of the token that ends a turn
    special: bool  # whether that token is a special one, which no text of a turn holds

    def written(self, ended: bool, last: int | None) -> int:
        """How many of before_ids the model has written itself."""
        ends = bool(self.before_ids) and self.before_ids[self.end] == last
        return self.end + 1 if ends and (ended or self.special) else 0


class Conversation:
    """How conversations go on, under the template of the settings. It keeps no conversation.

    Args:
        tokenizer: of the model.
        config: template (chat or plain) with its variables, system prompt and prefill.
        tools: what the model may call, as JSON schemas; see `with_tools`.
        variables: of the chat template, in place of those of the settings; see `for_row`.

    Raises:
        ValueError: the template is chat, and the tokenizer has none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(config.chat_template_kwargs if variables is None else variables)
        self._of_variables: dict[str, Conversation] = {}  # by the variables, as JSON
        self._roles: Sequence[Role] | None = None  # that were checked
        self.rewrites = False  # whether the template rewrites earlier turns, seen by `check`
        self._config = config
        self.tools = tuple(tools)
        self._plain = config.template == "plain"
        if not self._plain:
            require_template(tokenizer)
        taken = bool(tools) and not self._plain and takes_tools(tokenizer, tools)
        self._given: list[Any] | None = list(tools) if taken else None  # to the template
        self._words = tools_in_words(tools) if tools and not taken else ""
        self._frames: dict[Role, _Frame] = {}
        added = tokenizer.added_tokens_decoder
        self._special_ids = {number for number, token in added.items() if token.special}
        self._special_ids -= {tokenizer.unk_token_id}
        cut = sorted({token.content for token in added.values() if token.special} - {""})
        self._special = re.compile("(?=" + "|".join(map(re.escape, cut)) + ")") if cut else None

    def with_tools(self, tools: Sequence[Tool]) -> Conversation:
        """The same with these tools: given to a template that shows tools, else put into words.

        The words (`tools_in_words`) are the end of the system message, or, where the template is
        plain, stand before the prompt.
        """
        return Conversation(self._tokenizer, self._config, tools, self._variables)

    def for_row(self, row: Row) -> Conversation:
        """The conversation of a row: this one, or one with the row's own variables of the template.

        Such a one is checked as this one was. ValueError, in a sentence, where it does not pass.
        """
        variables = template_variables(row, self._config)
        if self._plain or variables == self._variables:
            return self
        key = json.dumps(variables, sort_keys=True)
        if key not in self._of_variables:
            other = Conversation(self._tokenizer, self._config, self.tools, variables)
            if self._roles is not None:
                other.check(self._roles)
            self._of_variables[key] = other
        return self._of_variables[key]

    def prompts(
        self,
        rows: Sequence[Row],
        observations: Sequence[str | None] | None = None,
        longest: int | None = None,
    ) -> TokenizedPrompts:
        """The first prompts of conversations with these tools (chat_template.tokenize)."""
        for row in rows:
            self.for_row(row)  # checked before anything is sampled
        return tokenize(rows, self._config, self._tokenizer, self.tools, observations, longest)

    def delta(
        self, observation: str, *, ended: bool, last: int | None, role: Role = "user"
    ) -> Delta:
        """The tokens that follow a turn of the model: the observation in the template's words.

        Under the plain template they are the observation's own, or of nothing a line break's, which
        keeps the turns apart. Under a chat template they are the
        closing words of the turn, a message with the observation, and the generation prompt. The
        closing words are left out up to the token that ends a turn there if the model has written
        that one; a turn that ended with another token, such as an end token that the template does
        not know, gets all of them after it.

        The template's are the tokens at the beginning and the end that its words have alone; a token
        of a bit of both is the environment's. Text of the observation that looks like a special
        token is encoded as text, so that no observation ends its own message.

        Args:
            observation: what the environment answered.
            ended: whether the model ended its turn; False where a limit cut it.
            last: the turn's last token id; None for a turn without tokens.
            role: `tool` for the result of a tool; a template that does not know it gets `user`.

        Raises:
            ValueError: the template fails on this message, or does not show it.
        """
        if self._plain:
            return self._framed(observation or "\n", 0, len(observation), [], [])
        frame = self._frame(role)
        text = self._follows(frame.role, observation)
        stop = len(text) - len(frame.after)
        framed = text.startswith(frame.before) and text.endswith(frame.after)
        if not framed or stop < len(frame.before):
            raise ValueError(
                f"The chat template writes other words around the observation {observation[:40]!r} "
                f"than around others. {_ANOTHER}"
            )
        delta = self._framed(text, len(frame.before), stop, frame.before_ids, frame.after_ids)
        written = frame.written(ended, last)
        if stop > len(frame.before) and written > _common(delta.ids, frame.before_ids):
            written = 0  # it is one token with the observation
        return Delta(delta.ids[written:], delta.authors[written:])

    def opened(self, row: Row, observation: str) -> list[int]:
        """The prompt of a player that waits for its first turn: it goes on with `first`.

        observation: what the environment shows the player first, which stands in the prompt.
        """
        before, _ = self._around(row, observation)
        return self._encode(before) if not self._plain else self._tokenizer(before)["input_ids"]

    def first(self, row: Row, observation: str) -> Delta:
        """The tokens that follow `opened` at the player's first turn.

        What it is told then, in the message of its prompt, and the rest of that prompt.
        """
        _, after = self._around(row, "")
        after_ids = self._encode(after)
        return self._framed(observation + after, 0, len(observation), [], after_ids)

    def _around(self, row: Row, observation: str) -> tuple[str, str]:
        """The text of a prompt before and after what a player is told at its first turn.

        ValueError where the template does not show that.
        """
        shown = f"{observation}\n\n{_OBSERVED}" if observation else _OBSERVED
        prompt = prompt_of(row, self._config, shown)
        fits_template(prompt, self._config)
        if self._plain:
            text = f"{prompt}{self._config.prefill}"
        else:
            text = self.for_row(row)._render(first_chat(prompt, self._config, self._words))
        before, separator, after = text.rpartition(_OBSERVED)
        if not separator:
            raise ValueError(f"The chat template leaves out what a user says. {_ANOTHER}")
        return before, after

    def _framed(
        self, text: str, start: int, stop: int, before_ids: list[int], after_ids: list[int]
    ) -> Delta:
        """A text of which start to stop is an observation; the ids are those of what is around it."""
        ids = self._encode(text, (start, stop))
        if self._plain:
            return Delta(ids, [Author.ENVIRONMENT] * len(ids))
        head = _common(ids, before_ids)
        tail = min(_common(reversed(ids), reversed(after_ids)), len(ids) - head)
        if start == stop:
            head, tail = len(ids), 0  # an empty observation
        authors = [Author.TEMPLATE] * head
        authors += [Author.ENVIRONMENT] * (len(ids) - head - tail)
        authors += [Author.TEMPLATE] * tail
        return Delta(ids, authors)

    def rewritten(
        self, tokens: Sequence[int], turns: Sequence[tuple[str, str]], role: Role
    ) -> float:
        """How much of what the model read before its last turn the template would have written
        otherwise: the share of tokens that its rendering of the same turns lacks, in [0, 1].

        tokens: all that followed the prompt before the last turn. turns: of these, the text of each
        turn of the model, and what it was told then. Tokens are counted wherever they stand.
        """
        if not self.rewrites or not tokens:
            return 0.0
        _, new = self._rendered(turns, role)
        return (Counter(tokens) - Counter(new)).total() / len(tokens)

    def rendered(
        self, prompt: Sequence[int], turns: Sequence[tuple[str, str]], role: Role
    ) -> list[int]:
        """All that the model reads after these turns, as the template has it.

        prompt: token ids of the first one. turns: as in `rewritten`. For templates that rewrite; what
        others add is told by `delta`, without encoding anything again. ValueError, in a sentence, for
        one that then writes the prompt otherwise.
        """
        left_out, new = self._rendered(turns, role)
        asked = self._render(first_chat(_QUESTION, self._config, self._words))
        if left_out > len(self._encode(asked.rpartition(_QUESTION)[2])):
            raise ValueError(
                f"The chat template writes what was asked first otherwise after {len(turns)} turns. "
                "Set episodes.past_turns = as_sampled, or data.template = plain."
            )
        return [*prompt[: len(prompt) - left_out], *new]

    def _rendered(self, turns: Sequence[tuple[str, str]], role: Role) -> tuple[int, list[int]]:
        """What the template writes after a prompt that turns follow, and how much of the prompt's end
        it then leaves out, in tokens."""
        asked = first_chat(_QUESTION, self._config, self._words)
        chat = list(asked)
        for text, observation in turns:
            chat.append({"role": "assistant", "content": text})
            chat.append({"role": self.role_of(role), "content": observation})
        text, place, parts = self._render(chat), 0, []
        for _, observation in turns:
            if (start := text.find(observation.strip(), place)) >= 0:
                parts.append((start, place := start + len(observation.strip())))
        ids, prompt = self._encode(text, *parts), self._encode(self._render(asked))
        common = _common(ids, prompt)
        return len(prompt) - common, ids[common:]

    def check_rendered(self, role: Role) -> None:
        """ValueError, as `rendered` raises it, for a template that cannot be rendered each turn."""
        for turns in (1, 2) if self.rewrites else ():
            self.rendered([], [(_THOUGHT + _ANSWER, _OBSERVED)] * turns, role)

    def role_of(self, role: Role) -> str:
        """The role that an observation's message gets: `user` where the template knows no `tool`.

        A template knows the role if it writes it otherwise than any word in its place.
        """
        if role == "user":
            return role
        try:
            shown = self._follows("tool", _OBSERVED)
        except ValueError:
            return "user"
        if _OBSERVED not in shown:
            return "user"
        try:
            other = self._follows("rolf", _OBSERVED)
        except ValueError:
            return "tool"
        return "user" if other.replace("rolf", "tool") == shown else "tool"

    def check(self, roles: Sequence[Role] = ("user", "tool")) -> None:
        """ValueError, in one sentence and a remedy, unless deltas are what the template writes.

        Seen on dummy conversations of one and two turns, with a system message and without, with a
        thought and without, and with the tools: what stands when the model begins its turn, and then
        what it wrote, may be how the rendering of the longer conversation begins (else `rewrites` is
        true); and what follows there is, token by token, what `delta` appends.

        roles: of the observations that there will be. Some templates keep the thoughts of a turn
        that is followed by results of tools, and remove them once a user has spoken.
        """
        self._roles = roles
        if self._plain:
            self._check_plain()
            return
        own = first_chat(_QUESTION, self._config, self._words)
        chats = [own]
        if own[0]["role"] != "system":
            chats.append([{"role": "system", "content": "Be brief."}, *own])
        for chat, role in itertools.product(chats, roles):
            try:
                self._render(chat)
            except ValueError:
                if chat is own:
                    raise
                continue  # it knows no system message, and only a row could bring one
            for thinking in (False, True):
                self._check_chat(chat, role, thinking)

    def _check_plain(self) -> None:
        """ValueError where the tokenizer changes what is encoded apart from the text before it."""
        ids = [*self._encode(_ANSWER), *self.delta(f"\n{_OBSERVED}", ended=True, last=None).ids]
        text = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if text != f"{_ANSWER}\n{_OBSERVED}":
            raise ValueError(
                f"This model's tokenizer makes {text!r} of {_ANSWER!r} and an observation after it, "
                f"{_OBSERVED!r} on a line of its own. Set data.template = chat, or use a model with "
                "another tokenizer."
            )

    def _check_chat(self, chat: list[Message], role: Role, thinking: bool) -> None:
        """ValueError unless two turns with observations of this role leave all as it stands."""
        begins = self._render(chat)
        for turn in ("one turn", "two turns"):
            opened = next((opener for opener in _OPENERS if begins.endswith(opener)), "")
            if opened and not thinking:
                return  # the model cannot but think
            begun = opened if opened or not thinking else _OPENERS[0]
            written = (begun + _THOUGHT if thinking else "") + _ANSWER
            prefilled = self._config.prefill.removesuffix(opened)  # for it, before what it wrote
            opened, content = prefilled + opened, prefilled + written
            answered: list[Message] = [*chat, {"role": "assistant", "content": content}]
            chat = [*answered, {"role": self.role_of(role), "content": _OBSERVED}]
            before, begins = begins, self._render(chat)
            gap = begins[len(before) :]  # blanks there stand for those that a model writes itself
            blanks = gap[: len(gap) - len(gap.lstrip(" "))]
            stands = before + blanks + content.removeprefix(opened)
            unchanged = begins.startswith(stands)
            self.rewrites = self.rewrites or not unchanged
            delta = self.delta(_OBSERVED, ended=False, last=None, role=role)
            ids = self._encode(begins)
            stood = self._encode(stands) if unchanged else ids[: max(0, len(ids) - len(delta.ids))]
            if ids != [*stood, *delta.ids]:
                raise ValueError(
                    f"The chat template's words after {turn} are not the same, as tokens, as in a "
                    f"dummy conversation: {self._tokenizer.decode(ids[len(stood) :])!r} there, "
                    f"{self._tokenizer.decode(delta.ids)!r} here. {_ANOTHER}"
                )

    def _frame(self, role: Role) -> _Frame:
        """The template's words around an observation of this role, from a dummy conversation."""
        if role not in self._frames:
            named = self.role_of(role)
            before, shown, after = self._follows(named, _OBSERVED).partition(_OBSERVED)
            if not shown:
                raise ValueError(
                    f"The chat template leaves out a message of the role {named} after a turn of "
                    f"the model. {_ANOTHER}"
                )
            ids = self._encode(before)
            special = next((i for i, number in enumerate(ids) if number in self._special_ids), None)
            self._frames[role] = _Frame(
                role=named,
                before=before,
                after=after,
                before_ids=ids,
                after_ids=self._encode(after),
                end=special or 0,
                special=special is not None,
            )
        return self._frames[role]

    def _follows(self, role: str, observation: str) -> str:
        """What the template writes after a turn of the model that this message follows."""
        asked = first_chat(_QUESTION, self._config, self._words)
        turns = [{"role": "assistant", "content": _ANSWER}, {"role": role, "content": observation}]
        _, answer, follows = self._render([*asked, *turns]).partition(_ANSWER)
        if not answer:
            raise ValueError(f"The chat template leaves out what the model said. {_ANOTHER}")
        return follows

    def _render(self, chat: list[Message]) -> str:
        from jinja2.exceptions import TemplateError

        try:
            tools = {} if self._given is None else {"tools": self._given}
            text = self._tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, **{**self._variables, **tools}
            )
            return f"{text}{self._config.prefill}"
        except TemplateError as error:
            raise ValueError(
                f"The chat template fails on messages of the roles "
                f"{', '.join(message['role'] for message in chat)}: {error}. {_ANOTHER}"
            ) from None

    def _encode(self, text: str, *observations: tuple[int, int]) -> list[int]:
        """Token ids of a text. Special tokens in the parts that were said are cut, so they are text.

        A special token of one character cannot be cut and stays one. said: starts and stops.
        """
        cuts = [0, *(cut for part in observations for cut in self._cuts(text, *part)), len(text)]
        parts = [text[a:b] for a, b in itertools.pairwise(cuts) if a < b]
        if not parts:
            return []
        encoded = self._tokenizer(parts, add_special_tokens=False)["input_ids"]
        return [number for ids in encoded for number in ids]

    def _cuts(self, text: str, start: int, stop: int) -> Iterator[int]:
        if self._special is not None:
            for match in self._special.finditer(text, start, stop):
                yield match.start() + 1


def _common(first: Iterable[object], second: Iterable[object]) -> int:
    """With how many equal items two sequences begin."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
