"""A small model of the same kind as a large one: its config shrunken, weights drawn anew.

What a family computes is kept (kinds of layers, heads' size, experts, windows, scales, caps) and what
only makes it large is cut: layers, heads, width, vocabulary. Lengths from which a model computes
otherwise, such as a window, shrink with the samples.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engines.models.checkpoints import quiet

LONGEST = 48  # tokens of the twin's longest sample
WORDS = 256  # of its vocabulary
PLAIN_WORDS = 32  # from here on they have no meaning of their own, such as an image's place

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_global_key_value_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "lru_width", "word_embed_proj_dim", "embed_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
_INNER = re.compile(
    r"intermediate_size|^(n_inner|ffn_dim|ffn_hidden_size|mlp_dim|decoder_ffn_dim)$"
)
_EXPERTS = re.compile(r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$")
_CHOSEN = re.compile(r"experts_per_tok|^(moe_k|moe_topk|top_k_experts|num_selected_experts)$")
_EVERY = re.compile(r"interval|period|pattern|(^|_)(step|freq)$|every|start_index|first_k_dense")
_QUERY_NORM = re.compile(r"(q|k|query|key)_?(layer)?norm", re.I)
_TOKEN = re.compile(r"token_(id|index)$")
# From so many tokens on, models compute otherwise.
LENGTHS = (
    "sliding_window",
    "attention_chunk_size",
    "index_topk",
    "window_size",
    "attention_window_size",
    "local_attention",
    "original_max_position_embeddings",
)
_OF_WEIGHTS = ("id2label", "label2id", "quantization_config")  # and of nothing that is computed
_MOST_LAYERS, _MOST_EXPERTS, _INNER_SIZE, _MOST_HEADS = 12, 8, 64, 2


def shrunken(config: PretrainedConfig, longest: int) -> PretrainedConfig:
    """A small config of the same kind; longest: tokens of the longest sample of the run."""
    shrunk: PretrainedConfig = type(config).from_dict(_shrunken(config.to_dict(), longest))
    return shrunk


def shorter_than(config: PretrainedConfig, longest: int) -> list[str]:
    """The lengths of a config, as `name = value`, that samples of so many tokens are longer than."""
    text = config.get_text_config().to_dict()
    rope = text.get("rope_parameters") or {}
    values = {**(rope if isinstance(rope.get("rope_type"), str) else {}), **text}
    lengths = {name: _length(values, name) for name in LENGTHS}
    return [f"{n} = {value}" for n, value in lengths.items() if value and value < longest]


def _length(values: dict[str, Any], name: str) -> int | None:
    """A length that is in force."""
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if name == "sliding_window" and values.get("use_sliding_window") is False:
        return None
    return value


def _shrunken(values: dict[str, Any], longest: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: _shrunken(value, longest) if isinstance(value, dict) else value
        for name, value in values.items()
        if name not in _OF_WEIGHTS
    }
    _fewer_heads(fields)
    _fewer_layers(fields)
    for name, value in list(fields.items()):
        if isinstance(value, bool) or value is None or not isinstance(name, str):
            continue
        if _INNER.search(name):
            fields[name] = _least(value, _INNER_SIZE)
        elif _EXPERTS.search(name):
            fields[name] = _least(value, _MOST_EXPERTS)
        elif _CHOSEN.search(name):
            fields[name] = _least(value, 2)
        elif name in ("n_group", "topk_group", "n_groups"):
            fields[name] = _least(value, 1 if name == "n_groups" else 2)
        elif name.startswith("vocab_size"):
            fields[name] = WORDS
        elif name in LENGTHS and isinstance(value, int):
            fields[name] = _scaled(value, longest)
        elif name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            fields[name] = max(int(value), 2 * LONGEST)
    _own_tokens(fields)
    groups, chosen = fields.get("n_group"), fields.get("topk_group")
    if isinstance(groups, int) and isinstance(chosen, int):
        fields["topk_group"] = min(chosen, groups)
    return fields


def _scaled(value: int, longest: int) -> int:
    """A length beside the twin's samples as it is beside the run's."""
    if value >= longest:
        return max(value, LONGEST)
    return min(LONGEST - 8, max(4, value * LONGEST // longest))


def _least(value: Any, most: int) -> Any:
    if isinstance(value, list):
        return [_least(each, most) for each in value]
    return min(value, most) if isinstance(value, int) else value


def _own_tokens(values: dict[str, Any]) -> None:
    """Give tokens with a meaning numbers below PLAIN_WORDS."""
    number = 0
    for name, value in values.items():
        if isinstance(name, str) and _TOKEN.search(name) and value is not None:
            number = number % (PLAIN_WORDS - 1) + 1
            values[name] = [number] if isinstance(value, list) else number


def _fewer_heads(values: dict[str, Any]) -> None:
    """Heads and the width that is made of them, by one factor: each head keeps its size."""
    heads_by = next((name for name in _HEADS if isinstance(values.get(name), int)), None)
    if heads_by is None:
        return
    heads: int = values[heads_by]
    kv_by = [name for name in _KV_HEADS if isinstance(values.get(name), int)]
    groups: int = min([int(values[name]) for name in kv_by], default=heads)
    share = heads // groups if groups and heads % groups == 0 else 1
    least = 2 if groups > 1 else 1
    fewer = min(heads, least * min(share, _MOST_HEADS) if share > 1 else _MOST_HEADS)
    if values.get("model_type") == "codegen":  # whose weights are cut for four TPU cores
        fewer = min(heads, 4)
    if any(values.get(name, 0) % heads for name in _WIDTHS if isinstance(values.get(name), int)):
        return
    for name in kv_by:
        values[name] = fewer if values[name] == heads else min(values[name], least)
    for name in ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "mamba_d_ssm"):
        if isinstance(values.get(name), int) and values[name] * fewer % heads == 0:
            values[name] = values[name] * fewer // heads
    values[heads_by] = fewer
    for name in _WIDTHS:
        if isinstance(values.get(name), int):
            values[name] = values[name] * fewer // heads


def _fewer_layers(values: dict[str, Any]) -> None:
    """The first layers, and the first one of each other kind."""
    layers_by = next((name for name in _LAYERS if isinstance(values.get(name), int)), None)
    if layers_by is None:
        return
    layers = values[layers_by]
    lists = [n for n, v in values.items() if isinstance(v, list) and len(v) == layers > 1]
    tables = [n for n, v in values.items() if isinstance(v, dict) and _by_layer(v)]
    for name in tables:
        values[name] = {int(layer): each for layer, each in values[name].items()}
    kinds = [
        [str(values[name][layer]) for name in lists] + [str(values[n].get(layer)) for n in tables]
        for layer in range(layers)
    ]
    least = 2
    for name, value in values.items():
        if _EVERY.search(str(name)) and isinstance(value, int) and not isinstance(value, bool):
            least = max(least, value + 1 if re.search("start|first", name) else value)
    chosen = sorted({*range(min(layers, least, _MOST_LAYERS)), *map(kinds.index, kinds)})
    if values.get("num_kv_shared_layers"):  # the last ones have keys of earlier ones of their kind
        values["num_kv_shared_layers"] = len(chosen)
        chosen += chosen
    total = len(chosen)
    for name in lists:
        values[name] = [values[name][layer] for layer in chosen]
    for name in tables:
        values_of_name = values[name]
        values[name] = {
            n: values_of_name[layer] for n, layer in enumerate(chosen) if layer in values_of_name
        }
    values[layers_by] = total
    for name in ("full_attn_idxs", "attn_layer_indices", "mlp_only_layers"):
        if isinstance(values.get(name), list) and name not in lists:
            values[name] = [each for each in values[name] if each < total]


def _by_layer(values: dict[Any, Any]) -> bool:
    return bool(values) and all(str(name).isdigit() for name in values)


def build(config: PretrainedConfig, gentle: bool = False, seed: int = 0) -> PreTrainedModel:
    """A model of this config in float32, with weights for which everything in it matters.

    Logits spread by about 2; transformers' own weights are so small that attention is nearly even
    and a cap does nothing. gentle: queries and keys that are normed are short, for models that do
    not scale scores: their attention would take one token alone, and rounding would decide which.
    """
    with quiet():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, trust_remote_code=False, dtype=torch.float32, attn_implementation="eager"
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            last = name.rpartition(".")[2]
            if weight.dim() > 1 and last != "A_log":
                fan_in = 1 if "embed" in name or "wte" in name else math.prod(weight.shape[1:])
                weight.copy_(values / math.sqrt(weight.shape[-1] if weight.dim() > 2 else fan_in))
            elif last.endswith("bias") and not last.startswith("dt"):
                weight.copy_(0.2 * values)
            elif last not in ("A_log", "D", "dt_bias"):
                weight.add_(0.1 * values - (0.85 if gentle and _QUERY_NORM.search(name) else 0))
        _spread(model)
    return model


def _spread(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    tokens = torch.arange(PLAIN_WORDS, PLAIN_WORDS + 16)[None]
    for _ in range(2):  # a cap and a tied embedding do not follow the factor
        logits = model.eval()(input_ids=tokens, use_cache=False).logits
        head.weight.mul_(float(2 / logits.std().clamp(min=1e-3)))


def samples(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Prompts and responses, int64: two of one prompt, a short one, and one of LONGEST tokens."""
    generator = torch.Generator().manual_seed(seed)

    def random_tokens(count: int) -> Tensor:
        return torch.randint(PLAIN_WORDS, WORDS, (count,), generator=generator)

    shared = random_tokens(9)
    rows = [(shared, 20), (shared, 14), (random_tokens(3), 4), (random_tokens(12), LONGEST - 12)]
    return [(prompt, random_tokens(count)) for prompt, count in rows]
