"""Rows to prompt tokens, with a real tokenizer made on the spot."""

from __future__ import annotations

import copy
import json

import pytest
from transformers import PreTrainedTokenizerFast

from configs.data import DataConfig, FileSource
from engines.data.chat_template import (
    EMPTY,
    TOO_LONG,
    first_chat,
    prompt_of,
    prompts_of,
    state_number,
    takes_tools,
    tokenize,
    tools_in_words,
)
from engines.episodes.task_environment import chat_of, said_by
from storage.objects.documents import JsonValue, Row

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if not loop.last or add_generation_prompt %}~{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEM: JsonValue = {"role": "system", "content": "Be brief."}


def user(content: str) -> JsonValue:
    return {"role": "user", "content": content}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; ~ is special."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {chr(code): code - 32 for code in range(32, 127)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="~", unk_token="?")
    made.chat_template = CHAT
    return made


def config(**settings: object) -> DataConfig:
    return DataConfig(source=FileSource(path="rows.jsonl"), **settings)  # type: ignore[arg-type]


def text_of(ids: list[int]) -> str:
    return "".join(chr(i + 32) for i in ids)


def only(row: Row, tokenizer: PreTrainedTokenizerFast, **settings: object) -> str:
    tokenized = tokenize([row], config(**settings), tokenizer)
    assert tokenized.kept == [0]
    return text_of(tokenized.prompt_ids[0])


def test_a_question_becomes_a_chat(tokenizer: PreTrainedTokenizerFast) -> None:
    assert only({"question": "1+1?"}, tokenizer) == "<user>1+1?~<assistant>"
    assert (
        only({"question": "1+1?"}, tokenizer, system_prompt="Be brief.", prompt_suffix=" Go.")
        == "<system>Be brief.~<user>1+1? Go.~<assistant>"
    )


def test_messages_become_a_chat(tokenizer: PreTrainedTokenizerFast) -> None:
    messages: list[JsonValue] = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    row: Row = {"question": messages}
    assert (
        only(row, tokenizer, system_prompt="Be brief.", prompt_suffix="!")
        == "<system>Be brief.~<user>a~<assistant>b~<user>c!~<assistant>"
    )
    assert messages[2] == user("c"), "rows are not changed"


def test_messages_keep_their_own_system_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    row: Row = {"question": [SYSTEM, user("a")]}
    chat = only(row, tokenizer, system_prompt="Talk a lot.")
    assert chat == "<system>Be brief.~<user>a~<assistant>"


def test_a_begun_answer_is_continued(tokenizer: PreTrainedTokenizerFast) -> None:
    row: Row = {"question": [user("a"), {"role": "assistant", "content": "Well,"}]}
    assert only(row, tokenizer) == "<user>a~<assistant>Well,"


def test_plain_text(tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"problem": "1+1="}
    plain = {"template": "plain", "prompt_column": "problem"}
    assert only(row, tokenizer, **plain) == "1+1="
    assert only(row, tokenizer, prompt_suffix=" ", **plain) == "1+1= "


def test_long_and_empty_prompts_are_dropped_with_a_reason(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rows = [{"question": text} for text in ("12345", "123456", "", "1", "1234567")]
    tokenized = tokenize(rows, config(template="plain", max_prompt_tokens=5), tokenizer)
    assert [text_of(ids) for ids in tokenized.prompt_ids] == ["12345", "1"]
    assert tokenized.kept == [0, 3]
    assert tokenized.dropped == [(1, TOO_LONG), (2, EMPTY), (4, TOO_LONG)]
    assert tokenize([], config(template="plain"), tokenizer).prompt_ids == []


def test_what_rewards_see(tokenizer: PreTrainedTokenizerFast) -> None:
    settings = config(system_prompt="Be brief.", prompt_suffix="!")
    assert prompts_of([{"question": "a"}], settings) == ["a!"]
    assert prompts_of([{"question": [user("a")]}], settings) == [[SYSTEM, user("a!")]]


@pytest.mark.parametrize(
    "value", [None, 3, [], ["a"], [{"role": "user"}], [{"role": "user", "content": [1]}]]
)
def test_other_values_are_no_prompts(value: object) -> None:
    with pytest.raises(ValueError, match="a prompt is a string, or a list of messages"):
        prompt_of({"question": value}, config())  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="Prompt 1 of the batch: Column 'question' holds"):
        prompts_of([{"question": "fine"}, {"question": value}], config())  # type: ignore[dict-item]


def test_templates_that_do_not_fit(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"holds chat messages. Set data.template = chat"):
        tokenize([{"question": [user("a")]}], config(template="plain"), tokenizer)
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match=r"no chat template. Set data.template = plain"):
        tokenize([{"question": "a"}], config(), bare)


def test_what_an_environment_shows_first(tokenizer: PreTrainedTokenizerFast) -> None:
    settings = config(prompt_suffix="!", system_prompt="Be brief.")
    answer: JsonValue = {"role": "assistant", "content": "b"}
    rows: list[Row] = [
        {"question": "a"},
        {"question": [user("a"), answer]},
        {"question": [SYSTEM]},
        {"other": 1},
        {"question": None},
        {"question": "a"},
        {"question": "a"},
    ]
    shown = ["dark", "dark", "dark", "dark", "dark", "", None]
    assert prompts_of(rows, settings, shown) == [
        "a\n\ndark!",
        [SYSTEM, user("a\n\ndark!"), answer],
        [SYSTEM, user("dark!")],
        "dark!",
        "dark!",
        "a!",
        "a!",
    ]
    assert rows[1]["question"] == [user("a"), answer], "rows are not changed"
    made = tokenize(rows[3:4], settings, tokenizer, observations=["dark"])
    assert text_of(made.prompt_ids[0]) == "<system>Be brief.~<user>dark!~<assistant>"
    for nothing in ("", None):
        with pytest.raises(ValueError, match="Prompt 0 of the batch: Column 'question' holds"):
            tokenize([{"other": 1}], settings, tokenizer, observations=[nothing])
    with pytest.raises(ValueError, match="argument"):
        tokenize(rows, settings, tokenizer, observations=["dark"])


def test_tools_that_the_template_does_not_show_are_words(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert not takes_tools(tokenizer, [tool])
    rows: list[Row] = [{"question": "a"}, {"question": [SYSTEM, user("a")]}]
    words = tools_in_words([tool])
    assert json.dumps(tool) in words.splitlines()
    chats = [first_chat(prompt, config(), words) for prompt in prompts_of(rows, config())]
    assert chats == [
        [{"role": "system", "content": words}, user("a")],
        [{"role": "system", "content": f"Be brief.\n\n{words}"}, user("a")],
    ]
    settings = config(max_prompt_tokens=2000)
    made = tokenize(rows, settings, tokenizer, [tool])
    for ids, chat in zip(made.prompt_ids, chats, strict=True):
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ids == tokenizer(rendered)["input_ids"]


def test_tools_go_to_a_template_that_shows_them(tokenizer: PreTrainedTokenizerFast) -> None:
    showing = copy.deepcopy(tokenizer)
    showing.chat_template = "{% if tools %}{{ tools[0].function.name }}~{% endif %}" + CHAT
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert takes_tools(showing, [tool])
    made = tokenize([{"question": "a"}], config(), showing, [tool])
    assert text_of(made.prompt_ids[0]) == "add~<user>a~<assistant>"
    failing = copy.deepcopy(tokenizer)
    failing.chat_template = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + CHAT
    assert not takes_tools(failing, [tool])


def test_equal_states_have_equal_numbers() -> None:
    board = {"cells": [1, 2], "turn": "x"}
    assert state_number(board) == state_number({"turn": "x", "cells": [1, 2]})
    found = [state_number(value) for value in (board, "x", 1, "1", None, [1], [2])]
    assert len(set(found)) == len(found)
    assert all(0 <= number < 2**63 for number in found)


def test_calls_that_an_agent_brings_stand_as_templates_take_them() -> None:
    function = {"name": "add", "arguments": '{"of": [2, 3]}'}
    broken = {"name": "add", "arguments": "{"}
    calls = [{"id": "a", "function": function}, {"id": "b", "function": broken}]
    told = {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}
    (message,) = chat_of(json.dumps(told)).messages
    assert message["content"] == ""
    assert message["tool_calls"] == [
        {"id": "a", "function": {"name": "add", "arguments": {"of": [2, 3]}}},
        calls[1],
    ]


def test_what_a_user_says_after_results_is_part_of_them() -> None:
    def messages(*roles: str) -> list[dict[str, str]]:
        return [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]

    assert said_by(messages("user", "user")) == ("user 0\n\nuser 1", "user")
    assert said_by(messages("tool", "tool")) == ("tool 0\ntool 1", "tool")
    assert said_by(messages("tool", "tool", "user")) == ("tool 0\ntool 1\n\nuser 2", "tool")
    with pytest.raises(ValueError, match="of the roles user, tool"):
        said_by(messages("user", "tool"))
