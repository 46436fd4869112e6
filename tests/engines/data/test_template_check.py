"""Chat templates rendered for checks: as transformers renders them, and what is said of a bad one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.data import DataConfig, FunctionSource
from configs.grpo import GRPOConfig
from configs.model import RandomModel
from configs.recipe import load_recipe
from engines.data.chat_template import Prompt, first_chat
from engines.data.template_check import chat_template, rendered
from engines.models.checkpoints import load_tokenizer, materialize
from tasks.run.preflight_data import answers_not_begun

PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
GENERATION = "{% if add_generation_prompt %}assistant: {% endif %}"
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
)
ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
STRIP = (
    "{% for m in messages %}{{ (m['content'].split('</think>')[-1] if m['role'] == 'assistant' "
    "else m['content']) + '\n' }}{% endfor %}"
)
TRIM = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] | trim + '\n' }}{% endfor %}"
GOOD = {
    "plain": PLAIN,
    "generation": PLAIN + GENERATION,
    "trim": TRIM + GENERATION,
    "bos": "{{ bos_token }}" + PLAIN + "{{ eos_token }}",
    "json": "{{ messages[0].content | tojson }}{{ messages | tojson }}{{ messages | tojson(indent=1) }}",
    "marked": "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
    "controls": "{% for m in messages %}{% if loop.index0 > 1 %}{% break %}{% endif %}{{ m.content }}"
    "\n  {% if tools %}x{% endif %}\n{% endfor %}",
    "named": [
        {"name": "tool_use", "template": "{{ tools }}"},
        {"name": "default", "template": PLAIN + GENERATION},
    ],
}
PROMPTS: list[Prompt] = [
    "1+1=",
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é <b> 1?"}],
    [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": " It is "}],
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialize(RandomModel(), tmp_path_factory.mktemp("models"))


def model(tiny: Path, tmp_path: Path, template: Any) -> Path:
    """The tiny model with another template."""
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def data(**changes: Any) -> DataConfig:
    return DataConfig(source=FunctionSource(path="rows.py:rows"), **changes)


@pytest.mark.parametrize("name", GOOD)
def test_prompts_are_rendered_as_by_their_tokenizer(name: str, tiny: Path, tmp_path: Path) -> None:
    folder = model(tiny, tmp_path, GOOD[name])
    tokenizer, template = load_tokenizer(folder), chat_template(folder)
    assert template is not None
    for prompt in PROMPTS:
        chat = first_chat(prompt, data())
        going_on = chat[-1]["role"] == "assistant"
        if going_on and name == "controls":
            continue
        known = tokenizer.apply_chat_template(
            chat,
            tokenize=False,
            add_generation_prompt=not going_on,
            continue_final_message=going_on,
        )
        assert template.text(chat) == known


def test_the_tiny_models_own_template(tiny: Path) -> None:
    template = chat_template(tiny)
    assert template is not None
    chat = first_chat("1+1=", data(system_prompt="Be brief."))
    known = load_tokenizer(tiny).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert template.text(chat) == known


def test_a_file_goes_before_the_settings(tiny: Path, tmp_path: Path) -> None:
    folder = model(tiny, tmp_path, "{{ 'settings' }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    (folder / "chat_template.jinja").write_text("file")
    template = chat_template(folder)
    assert template is not None and template.text([{"role": "user", "content": ""}]) == "file"
    tokenizer = load_tokenizer(folder)
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == "file"
    )


SYSTEM = [{"role": "system", "content": "S"}, {"role": "user", "content": "1"}]
TWICE = [{"role": "user", "content": "1"}, {"role": "user", "content": "2"}]
THINK = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "<think>a</think>\nb"}]
OPEN = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "<think>\n"}]


@pytest.mark.parametrize(
    ("template", "prompts", "changes", "said"),
    [
        (
            NO_SYSTEM + PLAIN,
            ["1"],
            {"system_prompt": "S"},
            "Row 0 of rows: the model's chat template refuses it: System role not supported. "
            "Set data.system_prompt = null, or write it into the prompts.",
        ),
        (
            NO_SYSTEM + PLAIN,
            ["1", SYSTEM],
            {},
            "Row 1 of rows: the model's chat template refuses it: System role not supported. "
            "Put the row's system message into its first user message.",
        ),
        (
            ALTERNATE + PLAIN,
            ["1", "2", TWICE],
            {},
            "Row 2 of rows: the model's chat template refuses it: roles must alternate. "
            "Set data.template = plain, or change the model's chat template.",
        ),
        (
            STRIP,
            [THINK],
            {},
            "Row 0 of rows: the model's chat template takes away from its last message, "
            "'<think>a</think>\\nb', with which the model is to go on. Let the message begin otherwise. "
            "Set data.template = plain, or change the model's chat template.",
        ),
        (
            "{{ messages[0]['content'] + 1 }}",
            ["1"],
            {},
            "Row 0 of rows: the model's chat template refuses it: can only concatenate str (not "
            '"int") to str. Set data.template = plain, or change the model\'s chat template.',
        ),
        (
            "{% if false %}x{% endif %}",
            ["1", "2"],
            {},
            "The model's chat template makes no text of the first 2 rows of rows. "
            "Set data.template = plain, or change the model's chat template.",
        ),
    ],
)
def test_a_row_that_a_template_refuses_is_named(
    template: str,
    prompts: list[Prompt],
    changes: dict[str, Any],
    said: str,
    tiny: Path,
    tmp_path: Path,
) -> None:
    read = chat_template(model(tiny, tmp_path, template))
    assert read is not None
    with pytest.raises(ValueError) as refused:
        rendered(read, prompts, [{}] * len(prompts), data(**changes), "rows")
    assert str(refused.value) == said


def test_a_beginning_that_the_template_leaves_is_gone_on_with(tiny: Path, tmp_path: Path) -> None:
    template = chat_template(model(tiny, tmp_path, STRIP))
    assert template is not None
    assert rendered(template, [OPEN], [{}], data(), "rows") == ["1\n<think>\n"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}", r"cannot be read: Unexpected end of template.* \(line 1\)"),
        ("a\n{{ b | no_such_filter }}", r"No filter named 'no_such_filter'. \(line 2\)"),
        (
            [{"name": "tool_use", "template": "x"}, {"name": "rag", "template": "x"}],
            r"are named rag, tool_use, and none is the default. Put .*chat_template.jinja",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(
    template: Any, said: str, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        chat_template(model(tiny, tmp_path, template))


def test_no_template(tiny: Path, tmp_path: Path) -> None:
    assert chat_template(model(tiny, tmp_path, None)) is None


@pytest.mark.parametrize(
    ("template", "begins"),
    [(PLAIN, False), (PLAIN + GENERATION, True), (TRIM, False), (NO_SYSTEM, False)],
)
def test_a_template_that_does_not_begin_answers_is_told(
    template: str, begins: bool, tiny: Path, tmp_path: Path
) -> None:
    folder = model(tiny, tmp_path, template)
    found = chat_template(folder)
    assert found is not None
    assert found.begins_answers == begins
    config = load_recipe(
        GRPOConfig, "tiny", [f"model={{kind: pretrained, path: {folder}}}", "data.template=chat"]
    )
    said = answers_not_begun(config)
    assert (said is None) == begins
    if said is not None:
        assert "writes nothing where an answer begins (add_generation_prompt)" in said
