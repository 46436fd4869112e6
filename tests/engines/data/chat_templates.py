"""Chat templates in the manner of published ones, and tokenizers to put them on."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from engines.models.checkpoints import character_tokenizer

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|header|>",
    "<|/header|>",
    "<|eot|>",
    "[INST]",
    "[/INST]",
    "</s>",
)

PLAIN = character_tokenizer().chat_template

# SmolLM2: ChatML, and a system message where the chat brings none.
DEFAULT_SYSTEM = """
{%- for m in messages -%}
{%- if loop.first and m.role != 'system' -%}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{%- endif -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

# Qwen2.5: ChatML, tools in the system message, their results in a user's message.
TOOLS = """
{%- if tools or messages[0].role == 'system' -%}
{{- '<|im_start|>system\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}
{%- for tool in tools or [] -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' or m.role == 'assistant' -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

# Qwen3: as above, and thoughts before the last message of a user are removed.
THINKING = """
{%- set last = namespace(asked=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set said = m.content -%}
{%- if m.role == 'assistant' and '</think>' in said and loop.index0 < last.asked -%}
{%- set said = said.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + said + '\n</tool_response><|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
# Its thinking variants, and DeepSeek-R1: the generation prompt begins the thought.
OPENED = THINKING.replace(
    "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}"
)

# Qwen3's hybrids: without thinking the generation prompt has an empty thought.
SWITCHED = THINKING.replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)

# Llama 3.1: heads of messages, contents without blanks around them, results of tools as JSON.
HEADERS = """
{{- '<|begin|>' -}}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{- '<|header|>ipython<|/header|>\n\n' + m.content | tojson + '<|eot|>' -}}
{%- else -%}
{{- '<|header|>' + m.role + '<|/header|>\n\n' + m.content | trim + '<|eot|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|header|>assistant<|/header|>\n\n' -}}{%- endif -%}
"""

# Mistral: no generation prompt, roles that alternate, tools before the last question.
INST = """
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{%- if m.role == 'user' -%}
{%- if tools and loop.last -%}{{- '[TOOLS]' + tools | tojson -}}{%- endif -%}
{{- '[INST] ' + m.content + ' [/INST]' -}}
{%- else -%}{{- ' ' + m.content + '</s>' -}}{%- endif -%}
{%- endfor -%}
"""


@cache
def characters(template: str | None) -> PreTrainedTokenizerFast:
    """A token for each printable character and for each of SPECIAL."""
    made: Any = copy.deepcopy(character_tokenizer())
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    made.chat_template = template
    return made


@cache
def merging(template: str) -> PreTrainedTokenizerFast:
    """Byte pairs, trained so that breaks of lines and words are tokens of several characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    text = ["user\n\n\nthe result of a tool\n\n\n", "assistant says\n\n, and the user asks\n\n"]
    core.train_from_iterator(text * 20, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    made.chat_template = template
    return made
