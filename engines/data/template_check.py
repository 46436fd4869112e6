"""What a model's chat template makes of prompts, from its files alone: for checks before a run.

Neither the tokenizer nor transformers is loaded, which takes seconds. The environment of templates is
transformers' (utils/chat_template_utils.py of 5.17); a test compares the texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from configs.data import DataConfig
from engines.data.chat_template import Message, Prompt, first_chat

DEFAULT = "default"
FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"
ELSEWHERE = "Set data.template = plain, or change the model's chat template."
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # its last space shows whether a template trims messages


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """A model's chat template, ready to be filled."""

    source: str
    template: Template
    special: Mapping[str, str]  # bos_token and the like -> its text

    def text(self, chat: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """The text of a prompt, as its tokenizer would be given it; `variables`: of the template.

        ValueError where the template refuses the messages, or takes away what is to be gone on with.
        """
        going_on = chat[-1]["role"] == "assistant"
        last = chat[-1]["content"]
        messages = [dict(message) for message in chat]
        if going_on:
            messages[-1]["content"] = last + _CONTINUED
        try:
            text = self.template.render(
                {
                    "tools": None,
                    "documents": None,
                    **self.special,
                    **(variables or {}),
                    "messages": messages,
                    "add_generation_prompt": not going_on,
                }
            )
        # A template's own lines run, which may index, add and compare as they like.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ValueError(f"the model's chat template refuses it: {_said(error)}") from None
        if not going_on:
            return text
        tag = _CONTINUED.strip()
        # transformers wants the word in the template, too.
        if tag not in text or last.strip() not in text or "content" not in self.source:
            raise ValueError(
                f"the model's chat template takes away from its last message, {last[:80]!r}, with "
                "which the model is to go on. Let the message begin otherwise. "
                f"{ELSEWHERE}"
            )
        end = text.rindex(tag)
        return text[:end] if text[end:].startswith(_CONTINUED) else text[:end].rstrip()

    @property
    def begins_answers(self) -> bool:
        """Whether it writes something where an answer begins; also of one that refuses to tell."""
        asked = [{"role": "user", "content": "1 + 1 = ?"}]
        try:
            with_beginning, without = (
                self.template.render(messages=asked, add_generation_prompt=wanted, **self.special)
                for wanted in (True, False)
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError):
            return True
        return with_beginning != without


def chat_template(directory: Path) -> ChatTemplate | None:
    """The chat template of a model directory; None where it has none.

    ValueError for one that cannot be read, and for several with names of which none is the default.
    """
    settings = _json(directory / "tokenizer_config.json")
    templates = _templates(directory, settings)
    if not templates:
        return None
    if DEFAULT not in templates:
        raise ValueError(
            f"The model's chat templates are named {', '.join(sorted(templates))}, and none is the "
            f"{DEFAULT}. Put the one that prompts shall have into {directory / FILE}."
        )
    special = {**_json(directory / "special_tokens_map.json"), **settings}
    texts = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in special.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    try:
        template = _environment().from_string(templates[DEFAULT])
    except TemplateSyntaxError as error:
        raise ValueError(
            f"The model's chat template cannot be read: {error.message} (line {error.lineno}). "
            f"{ELSEWHERE}"
        ) from None
    return ChatTemplate(source=templates[DEFAULT], template=template, special=texts)


def rendered(
    template: ChatTemplate,
    prompts: Sequence[Prompt],
    variables: Sequence[Mapping[str, Any]],
    data: DataConfig,
    source: str,
) -> list[str]:
    """Each prompt's text. ValueError, in one sentence, that names the row and what to set.

    variables: of the template, by prompt. source: what people call the rows, of which these are the
    first.
    """
    texts = []
    for number, (prompt, own) in enumerate(zip(prompts, variables, strict=True)):
        chat = first_chat(prompt, data)
        try:
            texts.append(template.text(chat, own))
        except ValueError as error:
            remedy = _remedy(template, chat, data)
            raise ValueError(f"Row {number} of {source}: {error} {remedy}".strip()) from None
    if texts and not any(texts):
        raise ValueError(
            f"The model's chat template makes no text of the first {len(texts)} rows of {source}. "
            f"{ELSEWHERE}"
        )
    return texts


def _remedy(template: ChatTemplate, chat: Sequence[Message], data: DataConfig) -> str:
    """What to set where a template refuses a chat."""
    if chat[-1]["role"] == "assistant" and _passes(template, chat[:-1]):
        return ""  # said already
    if chat[0]["role"] == "system" and _passes(template, chat[1:]):
        if chat[0]["content"] == data.system_prompt:
            return "Set data.system_prompt = null, or write it into the prompts."
        return "Put the row's system message into its first user message."
    return ELSEWHERE


def _passes(template: ChatTemplate, chat: Sequence[Message]) -> bool:
    try:
        return bool(chat) and template.text(chat) is not None
    except ValueError:
        return False


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template; files go before tokenizer_config.json, as transformers has it."""
    stored = settings.get("chat_template")
    if isinstance(stored, list):
        stored = {entry["name"]: entry["template"] for entry in stored}
    templates = dict(stored) if isinstance(stored, dict) else {DEFAULT: stored} if stored else {}
    files = {path.stem: path for path in directory.glob(f"{FOLDER}/*.jinja")}
    if (directory / FILE).exists():
        files[DEFAULT] = directory / FILE
    if files:
        templates = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return templates


def _said(error: Exception) -> str:
    """An error of a template, as the end of a sentence."""
    return f"{' '.join(str(error).split()).rstrip('.') or type(error).__name__}."


class _Generation(Extension):
    """{% generation %} marks what a model said; here it is as if it were not there."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _json(file: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return settings
