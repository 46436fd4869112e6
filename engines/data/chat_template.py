"""How a data row becomes a prompt.

The tokenizer is the caller's: this module loads none. Which rows are drawn is in
storage/prompts/cursor.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from configs.data import DataConfig, refuse_own_variables
from storage.batches.columns import TASK
from storage.objects.documents import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Message: TypeAlias = dict[str, str]  # role, content
Prompt: TypeAlias = "str | list[Message]"
Role: TypeAlias = Literal["user", "tool"]  # of an observation; tool: the result of a tool
Tool: TypeAlias = dict[str, Any]  # JSON schema, as transformers.utils.get_json_schema gives it

TOO_LONG = "prompt_too_long"
EMPTY = "prompt_empty"
VARIABLES = "chat_template_kwargs"  # a row's column


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPrompts:
    """Prompts ready for sampling. `kept` and `dropped` hold positions in the rows given."""

    prompt_ids: list[list[int]]  # one list of token ids per kept row
    kept: list[int]  # positions of the kept rows, ascending
    dropped: list[tuple[int, str]]  # position and reason (TOO_LONG or EMPTY) of each other row


def template_variables(row: Row, config: DataConfig) -> dict[str, Any]:
    """What a row's prompt is rendered with beside its messages; none where the template is plain.

    The settings' variables (data.chat_template_kwargs), and before them those of the row's column of
    that name. ValueError where that is no object, or names what Refrain sets itself.
    """
    if config.template == "plain":
        return {}
    own = row.get(VARIABLES)
    if own is None:
        return dict(config.chat_template_kwargs)
    if not isinstance(own, dict):
        raise ValueError(
            f"Column '{VARIABLES}' holds {str(own)[:80]!r}: it takes an object, the variables of the "
            "chat template by name. Mend the row, or give the column another name."
        )
    refuse_own_variables(f"Column '{VARIABLES}'", own)
    return {**config.chat_template_kwargs, **own}


def prompt_of(row: Row, config: DataConfig, observation: str | None = None) -> Prompt:
    """What the model is asked, before any template: a string, or a list of chat messages.

    An observation, what an environment shows first, comes after the string or the last user message
    and a blank line; it is the whole string where the row has no value in the prompt column. The
    suffix is appended last. A system prompt is put before messages that bring none; a string has no
    place for it. ValueError for another kind of value.
    """
    value = row.get(config.prompt_column)
    if value is None and observation:
        value, observation = observation, None
    shown = f"\n\n{observation}" if observation else ""
    if isinstance(value, str):
        return _text(value + shown + config.prompt_suffix)
    messages = _messages(value, config.prompt_column)
    if added := shown + config.prompt_suffix:
        asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if asked:
            last = messages[asked[-1]]
            messages[asked[-1]] = {**last, "content": last["content"] + added}
        elif observation:
            messages.append({"role": "user", "content": observation + config.prompt_suffix})
    for message in messages:
        _text(message["content"])
    return _with_system_prompt(messages, config)


def _text(text: str) -> str:
    """The text; ValueError for one that no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The prompt has half of a surrogate pair, {text[error.start]!r}, at character "
            f"{error.start}: it was cut within one character. Mend the row."
        ) from None
    return text


def _messages(value: object, column: str) -> list[Message]:
    """A copy of a list of chat messages; ValueError when `value` is none."""
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return [dict(cast("Message", message)) for message in value]
    raise ValueError(
        f"Column '{column}' holds {str(value)[:80]!r}: a prompt is a string, or a list of messages "
        "that each have a role and a content in text. Set data.prompt_column to another column."
    )


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(part), str) for part in ("role", "content")
    )


def _with_system_prompt(messages: list[Message], config: DataConfig) -> list[Message]:
    if config.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def prompts_of(
    rows: Sequence[Row], config: DataConfig, observations: Sequence[str | None] | None = None
) -> list[Prompt]:
    """`prompt_of` each row; ValueError naming the position of a row that holds no prompt."""
    prompts = []
    shown = [None] * len(rows) if observations is None else observations
    tasks = config.tasks
    for position, (row, observation) in enumerate(zip(rows, shown, strict=True)):
        own = tasks[str(row[TASK])] if tasks else config
        try:
            prompts.append(prompt_of(row, own, observation))
        except ValueError as error:
            raise ValueError(f"Prompt {position} of the batch: {error}") from None
    return prompts


def tokenize(
    rows: Sequence[Row],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Tool] = (),
    observations: Sequence[str | None] | None = None,
    longest: int | None = None,
) -> TokenizedPrompts:
    """Token ids of each row's prompt under the template of the settings.

    tools: what the model may call; given to a template that knows of tools, else put into words
    (`tools_in_words`): at the end of the system message, or, where the template is plain, before the
    prompt. observations: what the environment of each row shows first (see `prompt_of`).

    A prompt of more than `longest` tokens (default: data.max_prompt_tokens), or without any, is
    dropped with its reason.
    ValueError when the prompts do not fit the template, or the tokenizer has none.
    """
    if tasks := config.tasks:
        return _tokenized_by_task(rows, tasks, tokenizer, tools, observations, longest)
    prompts = prompts_of(rows, config, observations)
    if config.template == "chat":
        variables = [template_variables(row, config) for row in rows]
        encoded = _encode_chats(prompts, variables, config, tokenizer, tools)
    else:
        encoded = _encode_texts(prompts, config, tokenizer, tools)
    kept, dropped, prompt_ids = [], [], []
    for position, ids in enumerate(encoded):
        if not ids:
            dropped.append((position, EMPTY))
        elif len(ids) > (longest or config.max_prompt_tokens):
            dropped.append((position, TOO_LONG))
        else:
            kept.append(position)
            prompt_ids.append(list(ids))
    return TokenizedPrompts(prompt_ids=prompt_ids, kept=kept, dropped=dropped)


def _tokenized_by_task(
    rows: Sequence[Row],
    tasks: Mapping[str, DataConfig],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Tool],
    observations: Sequence[str | None] | None,
    longest: int | None,
) -> TokenizedPrompts:
    """`tokenize`, each row as its task has it."""
    parts = []
    for name, config in tasks.items():
        places = [place for place, row in enumerate(rows) if row[TASK] == name]
        shown = None if observations is None else [observations[place] for place in places]
        own = [rows[place] for place in places]
        prompts = tokenize(own, config, tokenizer, tools, shown, longest)
        parts.append((places, prompts))
    return put_together(parts)


def put_together(parts: Iterable[tuple[Sequence[int], TokenizedPrompts]]) -> TokenizedPrompts:
    """The prompts of parts of some rows, each with the positions of its rows, as those of all."""
    ids: dict[int, list[int]] = {}
    dropped: list[tuple[int, str]] = []
    for places, prompts in parts:
        ids |= {
            places[at]: tokens for at, tokens in zip(prompts.kept, prompts.prompt_ids, strict=True)
        }
        dropped += [(places[at], reason) for at, reason in prompts.dropped]
    kept = sorted(ids)
    return TokenizedPrompts(
        prompt_ids=[ids[place] for place in kept], kept=kept, dropped=sorted(dropped)
    )


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """ValueError for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise ValueError(
            "data.template is chat, and this model's tokenizer has no chat template. "
            "Set data.template = plain, or use a model with a chat template."
        )


def takes_tools(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool]) -> bool:
    """Whether the tokenizer's chat template shows these tools to the model."""
    from jinja2.exceptions import TemplateError

    chat = [{"role": "user", "content": "question"}]
    try:
        shown = tokenizer.apply_chat_template(chat, tools=list(tools), tokenize=False)
    except TemplateError:  # some say so by failing
        return False
    return shown != tokenizer.apply_chat_template(chat, tokenize=False)


def tools_in_words(tools: Sequence[Tool]) -> str:
    """What tells the model of its tools where its template does not: a schema a line, and the form
    of a call, which is the one that engines/episodes/tool_calls.py reads first."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call these tools, each described by a JSON schema:\n{schemas}\n"
        "To call a tool, write a JSON object with its name and arguments between tags:\n"
        '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
    )


def first_chat(prompt: Prompt, config: DataConfig, words: str = "") -> list[Message]:
    """The messages of a prompt, system prompt included; `words` end the system message."""
    if isinstance(prompt, str):
        chat = _with_system_prompt([{"role": "user", "content": prompt}], config)
    else:
        chat = list(prompt)
    if not words:
        return chat
    if chat[0]["role"] != "system":
        return [{"role": "system", "content": words}, *chat]
    system = {**chat[0], "content": f"{chat[0]['content']}\n\n{words}"}
    return [system, *chat[1:]]


def _encode_chats(
    prompts: Sequence[Prompt],
    variables: Sequence[Mapping[str, Any]],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Tool],
) -> list[list[int]]:
    from jinja2.exceptions import TemplateError

    require_template(tokenizer)
    taken = bool(tools) and takes_tools(tokenizer, tools)
    words = tools_in_words(tools) if tools and not taken else ""
    shown = {"tools": list(tools)} if taken else {}
    encoded: list[list[int]] = []
    for prompt, own in zip(prompts, variables, strict=True):
        chat = first_chat(prompt, config, words)
        answering = chat[-1]["role"] == "assistant"  # the model goes on with a message begun for it
        try:
            text = tokenizer.apply_chat_template(
                chat,
                tokenize=False,
                add_generation_prompt=not answering,
                continue_final_message=answering,
                **{**own, **shown},
            )
        except (TemplateError, TypeError, ValueError) as error:
            cause = " ".join(str(error).split())
            raise ValueError(
                f"Prompt {len(encoded)} of the batch: the model's chat template refuses it: {cause}"
            ) from None
        ids = tokenizer(f"{text}{config.prefill}", add_special_tokens=False)["input_ids"]
        encoded.append(cast("list[int]", ids))
    return encoded


def fits_template(prompt: Prompt, config: DataConfig) -> None:
    """ValueError for chat messages where the template is plain."""
    if config.template == "plain" and not isinstance(prompt, str):
        raise ValueError(
            f"data.template is plain, and column '{config.prompt_column}' holds chat messages. "
            "Set data.template = chat."
        )


def _encode_texts(
    prompts: Sequence[Prompt],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Tool],
) -> list[list[int]]:
    for prompt in prompts:
        fits_template(prompt, config)
    words = f"{tools_in_words(tools)}\n\n" if tools else ""
    texts = [f"{words}{prompt}{config.prefill}" for prompt in prompts]
    return tokenizer(texts)["input_ids"] if texts else []


def state_number(value: object) -> int:
    """A number for a row's state, in [0, 2**63): equal for equal values, whatever run or worker."""
    text = json.dumps(value, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
