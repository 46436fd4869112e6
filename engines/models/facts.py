"""What a model's own files say about it, read without torch, transformers or the weights.

The checks before a run look at it (tasks/run/preflight.py). A directory says it in config.json, a
GGUF file in the header before its tensors.
"""

from __future__ import annotations

import json
import mmap
import string
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.model import PretrainedModel, RandomModel
from engines.models.checkpoints import DEFAULT_CACHE, gguf_file, present, quantisation
from engines.models.vla.shapes import VisionShape, tiny_towers, vision_of

_ARRAY, _STRING = 9, 8
# GGUF's types of values: number -> struct's letter.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


# Of the random model's tokenizer: four special tokens and what can be printed, less three.
_CHARACTERS = 4 + len(string.printable) - 3


# What LlamaConfig has where config.json does not say it, as OpenVLA's do not.
LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}

_GEMMA = {"head_dim": 256}
# By model_type, what transformers' config has where config.json does not say it. Where a class makes
# the size of a head of the width and the number of heads, it is not here.
UNSAID: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 4096},
    "gemma": {**_GEMMA, "vocab_size": 256000},
    "gemma2": {**_GEMMA, "vocab_size": 256000, "sliding_window": 4096},
    "gemma3_text": {**_GEMMA, "vocab_size": 262208, "sliding_window": 4096},
    "gemma4_text": {**_GEMMA, "vocab_size": 262144, "sliding_window": 512},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {"head_dim": 128},
    "qwen3_5_text": {"head_dim": 256, "num_key_value_heads": 4, "vocab_size": 248320},
    "seed_oss": {"head_dim": 128, "num_key_value_heads": 8},
    "smollm3": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "starcoder2": {"num_key_value_heads": 2},
}
# Decoders whose sizes follow from config.json as Llama's do, and whether their queries and keys are
# normed. What others keep is seen by going through their code (engines/train/tracing.py).
LIKE_LLAMA = {
    "granite": False,
    "llama": False,
    "ministral3": False,
    "mistral": False,
    "qwen2": False,
    "qwen3": True,
    "seed_oss": False,
    "smollm3": False,
}
# What layers are called that carry a state from token to token, in layer_types.
_STATES = ("linear_attention", "conv", "mamba", "mamba2", "recurrent")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder like Llama's."""

    hidden: int  # width of the residual stream
    layers: int
    intermediate: int  # width of a feed-forward layer
    heads: int  # of queries
    kv_heads: int
    head_size: int
    vocabulary: int  # tokens
    tied: bool  # whether the output head is the embedding
    vision: VisionShape | None = None  # of a policy that looks at images
    head_norms: bool = False  # whether queries and keys are normed, as Qwen3's are

    @property
    def divisible(self) -> bool:
        """Ranks that share samples may divide the heads."""
        return True

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer, without biases."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def inside(self) -> int:
        """Weights of all layers."""
        return self.layers * self.layer_parameters

    @property
    def parameters(self) -> int:
        """Weights in all; a head that is tied counts once."""
        tables = (1 if self.tied else 2) * self.vocabulary * self.hidden
        vision = 0 if self.vision is None else self.vision.parameters
        return self.inside + tables + self.hidden + vision

    @property
    def largest(self) -> int:
        """Numbers in the largest weight."""
        return self.vocabulary * self.hidden

    @property
    def state(self) -> int:
        """Numbers that decoding keeps of a sequence, however long it is."""
        return 0

    def cached_numbers(self, parts: int = 1) -> int:
        """Numbers that decoding keeps of a token, on each of so many devices.

        Where there are more of them than heads of keys, each has one.
        """
        return 2 * self.layers * max(1, self.kv_heads // parts) * self.head_size


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What is known of a model before it is loaded; None: its files do not say.

    The recipe `tiny`: ModelFacts(positions=256, window=None, layers=2, heads=2, kv_heads=2,
    head_size=32, chat_template=True).
    """

    positions: int | None  # longest sequence, in tokens; None also where positions are stretched
    window: int | None  # tokens that a token attends to at most; None: all before it
    layers: int | None  # decoder layers
    heads: int | None  # heads of queries
    kv_heads: int | None  # heads of keys and values; None also where a layer keeps others
    head_size: int | None  # numbers in one head's key
    chat_template: bool  # whether its tokenizer has one
    shape: ModelShape | None = None  # None also where its code has to be gone through for them
    states: bool = False  # whether layers carry a state from token to token
    kind: str | None = None  # model_type, of its text model
    rope_limit: int | None = None  # tokens from which on sequences have other rotary positions
    vision: VisionShape | None = None  # None: it looks at no images
    rows: int | None = None  # of the embedding: ids below it can be read
    quantised: str | None = None  # how its weights are packed, where they are
    plain_head: bool = True  # whether its logits are a product alone: no scale, cap or bias


def model_facts(
    config: PretrainedModel | RandomModel, cache: Path = DEFAULT_CACHE
) -> ModelFacts | None:
    """What the model's files say; None for a hub model that was not downloaded yet.

    cache: directory for models that are converted. Raises ValueError as `check_model` does.
    """
    if isinstance(config, RandomModel):
        vision = made_vision(config)
        return ModelFacts(
            positions=config.max_positions,
            window=None,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.heads,
            head_size=config.hidden_size // config.heads,
            chat_template=True,
            shape=ModelShape(
                hidden=config.hidden_size,
                layers=config.layers,
                intermediate=2 * config.hidden_size,
                heads=config.heads,
                kv_heads=config.heads,
                head_size=config.hidden_size // config.heads,
                vocabulary=_CHARACTERS + (0 if config.vision is None else config.vision.actions),
                tied=vision is None,
                vision=vision,
            ),
            vision=vision,
        )
    directory = present(config, cache)
    if directory is not None:
        return _of_directory(directory)
    file = gguf_file(config)
    return None if file is None else _of_gguf(*_gguf_header(file))


def token_ids(
    config: PretrainedModel | RandomModel, texts: Iterable[str]
) -> list[list[int]] | None:
    """Of each text, none added; None while the model's tokenizer.json is not here."""
    directory = present(config, DEFAULT_CACHE)
    file = directory / "tokenizer.json" if directory is not None else None
    if file is None or not file.exists():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    # One by one: encode_batch starts threads, which this process may fork beside.
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def _of_directory(directory: Path) -> ModelFacts:
    try:
        whole = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{directory / 'config.json'} cannot be read: {error}. Set model.path to a complete "
            "transformers checkpoint."
        ) from error
    vision = vision_of(whole)
    text = {**whole, **(LLAMA if vision else {}), **whole.get("text_config", {})}
    text = {**UNSAID.get(str(text.get("model_type")), {}), **text}
    heads = text.get("num_attention_heads")
    head_size = text.get("head_dim") or (
        text["hidden_size"] // heads if heads and text.get("hidden_size") else None
    )
    compressed = text.get("kv_lora_rank") is not None
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    return ModelFacts(
        positions=_positions(text),
        window=window,
        layers=text.get("num_hidden_layers"),
        heads=heads,
        kv_heads=None if compressed else text.get("num_key_value_heads") or heads,
        head_size=head_size,
        chat_template=_has_chat_template(directory),
        shape=_shape(text, head_size, vision) if window is None else None,
        states=_has_states(text),
        kind=text.get("model_type"),
        rope_limit=_rope_limit(text),
        vision=vision,
        rows=text.get("vocab_size"),
        quantised=quantisation(whole),
        plain_head=_plain_head(text),
    )


def made_vision(config: RandomModel) -> VisionShape | None:
    """The vision part of a random model; None: it has none."""
    if config.vision is None:
        return None
    sizes = config.vision.model_dump(exclude={"actions"})
    return VisionShape(towers=tiny_towers(**sizes), language=config.hidden_size)


def _shape(
    text: dict[str, Any], head_size: int | None, vision: VisionShape | None
) -> ModelShape | None:
    """By config.json; None where it does not say all, or its model is another one than Llama's."""
    kind = str(text.get("model_type"))
    if vision is None and kind not in LIKE_LLAMA:
        return None
    heads = text.get("num_attention_heads")
    sizes = {
        "hidden": text.get("hidden_size"),
        "layers": text.get("num_hidden_layers"),
        "intermediate": text.get("intermediate_size"),
        "heads": heads,
        "kv_heads": text.get("num_key_value_heads") or heads,
        "head_size": head_size,
        "vocabulary": text.get("vocab_size"),
    }
    tied = bool(text.get("tie_word_embeddings", False))
    return _whole_shape(sizes, tied, LIKE_LLAMA.get(kind, False), vision)


def _plain_head(text: dict[str, Any]) -> bool:
    """Whether config.json says nothing else of the logits; by its words and, of a bias, families."""
    scales = (
        text.get(name, 1) or 1 for name in ("logits_scaling", "logit_scale", "lm_head_multiplier")
    )
    capped = bool(text.get("final_logit_softcapping"))
    divided = text.get("dim_model_base") not in (None, text.get("hidden_size"))
    biased = text.get("model_type") in ("phi", "gptj", "codegen")
    return not (capped or divided or biased) and all(scale == 1 for scale in scales)


def _whole_shape(
    sizes: dict[str, int | None], tied: bool, head_norms: bool, vision: VisionShape | None = None
) -> ModelShape | None:
    if not all(isinstance(size, int) for size in sizes.values()):  # a list has one for each layer
        return None
    return ModelShape(**sizes, tied=tied, head_norms=head_norms, vision=vision)  # type: ignore[arg-type]


def _positions(text: dict[str, Any]) -> int | None:
    """The stated limit; None where rotary positions are stretched (linear, dynamic, yarn).

    The number may then be the limit before or after the stretching.
    """
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    as_stated = rope.get("rope_type", rope.get("type")) in ("llama3", "longrope", "su")
    if not as_stated and rope.get("factor", 1.0) != 1.0:
        return None
    limit = text.get("max_position_embeddings", text.get("n_positions"))
    return None if limit is None else int(limit)


def _rope_limit(text: dict[str, Any]) -> int | None:
    """Of rotary positions with two tables (longrope)."""
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return None
    name = "original_max_position_embeddings"
    limit = rope.get(name) or text.get(name)
    return None if limit is None else int(limit)


def _has_states(text: dict[str, Any]) -> bool:
    """Whether config.json says that layers carry a state, by their kinds or their sizes."""
    kinds = {str(each) for each in text.get("layer_types") or ()}
    sizes = ("linear_key_head_dim", "mamba_d_state", "ssm_state_size", "conv_L_cache", "state_size")
    return bool(kinds & set(_STATES)) or any(name in text for name in sizes)


def _has_chat_template(directory: Path) -> bool:
    if any((directory / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = directory / "tokenizer_config.json"
    return settings.exists() and bool(json.loads(settings.read_text()).get("chat_template"))


def _of_gguf(values: dict[str, Any], tensors: set[str]) -> ModelFacts:
    kind = values.get("general.architecture", "")
    heads = values.get(f"{kind}.attention.head_count")
    width = values.get(f"{kind}.embedding_length")
    return ModelFacts(
        positions=values.get(f"{kind}.context_length"),
        window=values.get(f"{kind}.attention.sliding_window"),
        layers=values.get(f"{kind}.block_count"),
        heads=heads,
        kv_heads=values.get(f"{kind}.attention.head_count_kv", heads),
        head_size=values.get(f"{kind}.attention.key_length")
        or (width // heads if width and heads else None),
        chat_template="tokenizer.chat_template" in values,
        shape=_gguf_shape(values, kind, tensors),
    )


def _gguf_shape(values: dict[str, Any], kind: str, tensors: set[str]) -> ModelShape | None:
    """By the header's sizes; None where it does not say all, or has experts."""
    heads, width = (
        values.get(f"{kind}.attention.head_count"),
        values.get(f"{kind}.embedding_length"),
    )
    window = values.get(f"{kind}.attention.sliding_window")
    if f"{kind}.expert_count" in values or kind not in LIKE_LLAMA or window is not None:
        return None
    sizes = {
        "hidden": width,
        "layers": values.get(f"{kind}.block_count"),
        "intermediate": values.get(f"{kind}.feed_forward_length"),
        "heads": heads,
        "kv_heads": values.get(f"{kind}.attention.head_count_kv", heads),
        "head_size": values.get(f"{kind}.attention.key_length")
        or (width // heads if width and heads else None),
        "vocabulary": values.get(f"{kind}.vocab_size"),
    }
    normed = any(".attn_q_norm." in name for name in tensors)
    return _whole_shape(sizes, "output.weight" not in tensors, normed)


def _gguf_header(path: Path) -> tuple[dict[str, Any], set[str]]:
    """Metadata values of a GGUF file but the arrays, and the names of its tensors.

    Source: the GGUF specification, versions 2 and 3 (little-endian).
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            magic, version, tensors, count = struct.unpack_from("<4sIQQ", data, 0)
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"it begins with {magic!r}, version {version}")
            values, names, at = {}, set(), 24
            for _ in range(count):
                key, at = _gguf_value(data, at, _STRING)
                (kind,) = struct.unpack_from("<I", data, at)
                value, at = _gguf_value(data, at + 4, kind)
                if kind != _ARRAY:
                    values[key] = value
            for _ in range(tensors):
                name, at = _gguf_value(data, at, _STRING)
                names.add(name)
                (dimensions,) = struct.unpack_from("<I", data, at)
                at += 4 + 8 * dimensions + 4 + 8  # each size, the type, the place
        except (ValueError, KeyError, struct.error) as error:
            raise ValueError(
                f"model.path = {path} is no GGUF file that can be read: {error}. Set model.path to "
                "another one."
            ) from None
    return values, names


def _gguf_value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    """The value of a type at an offset, and the offset after it; arrays are passed over."""
    if kind == _STRING:
        (length,) = struct.unpack_from("<Q", data, at)
        return data[at + 8 : at + 8 + length].decode(), at + 8 + length
    if kind != _ARRAY:
        letter = _SCALARS[kind]
        return struct.unpack_from(f"<{letter}", data, at)[0], at + struct.calcsize(letter)
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in _SCALARS:
        return None, at + count * struct.calcsize(_SCALARS[inner])
    for _ in range(count):
        _, at = _gguf_value(data, at, inner)
    return None, at
