"""Checkpoints made here: a random Llama of characters, and packed weights as plain ones."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.model import RandomModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def draw(config: RandomModel, target: Path) -> None:
    """A Llama with weights drawn from `config.seed` and the character tokenizer.

    With config.vision a policy in the form of OpenVLA.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vision = config.vision
    characters = character_tokenizer(0 if vision is None else vision.actions)
    llama = LlamaConfig(
        vocab_size=len(characters),
        hidden_size=config.hidden_size,
        intermediate_size=2 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=vision is None,
        bos_token_id=characters.bos_token_id,
        eos_token_id=characters.eos_token_id,
        pad_token_id=characters.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if vision is None:
            model: PreTrainedModel = LlamaForCausalLM(llama)
        else:
            from engines.models.vla.openvla import OpenVLA, tiny_config

            model = OpenVLA(tiny_config(text=llama, **vision.model_dump()))
    save(model, target)
    characters.save_pretrained(target)


def character_tokenizer(actions: int = 0) -> PreTrainedTokenizerBase:
    """A token for each printable character, <pad>, <bos>, <eos>, <unk>; a plain chat template.

    actions: so many action tokens come last, <0> after the others.
    """
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<bos>", "<eos>", "<unk>")
    printable = [character for character in string.printable if character not in "\r\x0b\x0c"]
    acting = [f"<{number}>" for number in reversed(range(actions))]
    vocabulary = {token: number for number, token in enumerate((*special, *printable, *acting))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    characters = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    characters.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    return characters


def convert_gguf(source: Path, target: Path) -> None:
    """Save `source` as an ordinary float32 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, trust_remote_code=False
    ).save_pretrained(target)
    # transformers' progress bar there heeds no setting (not reported).
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            trust_remote_code=False,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    save(model, target)


def unpack_mxfp4(source: Path, target: Path) -> None:
    """Save a checkpoint whose experts are in mxfp4 as an ordinary bfloat16 one.

    Source: OCP Microscaling Formats 1.0: blocks of 32 4-bit numbers with a power of two each.
    """
    import torch
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source,
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.bfloat16,
        quantization_config=Mxfp4Config(dequantize=True),
        output_loading_info=True,
    )
    model, info = loaded
    for name in sorted(info["missing_keys"]):
        raise ValueError(f"{source} has no tensor {name}. Set model.path to a complete checkpoint.")
    # save_pretrained of transformers 5.19 leaves the experts out of such a model (not reported).
    save_torch_state_dict(dict(model.state_dict()), target)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=1))


def save(model: PreTrainedModel, target: Path) -> None:
    # Else transformers 5.19 writes nothing in a process that is not rank 0 of a group (not reported).
    model.should_save_on_this_rank = bool  # type: ignore[assignment]
    model.save_pretrained(target)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' and the hub's progress bars and chatter."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
