"""What models do around their output head, as their own forward pass shows it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.bert import BertConfig
from transformers.models.cohere import CohereConfig
from transformers.models.falcon_h1 import FalconH1Config
from transformers.models.gemma2 import Gemma2Config
from transformers.models.granite import GraniteConfig
from transformers.models.llama import LlamaConfig
from transformers.models.llama4 import Llama4TextConfig
from transformers.models.minicpm3 import MiniCPM3Config
from transformers.models.modernbert_decoder import ModernBertDecoderConfig
from transformers.models.nanochat import NanoChatConfig
from transformers.models.phi import PhiConfig

from engines.train.model.head import Head, HeadForm, head_form

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def empty(config: PretrainedConfig):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (LlamaConfig(**SIZES), HeadForm()),
        (PhiConfig(**SIZES), HeadForm()),  # its bias is in the linear layer
        (GraniteConfig(**SIZES, logits_scaling=8.0), HeadForm(after=0.125)),
        (GraniteConfig(**SIZES, logits_scaling=13.0), HeadForm(after=1 / 13)),
        (CohereConfig(**SIZES, logit_scale=0.0625), HeadForm(after=0.0625)),
        (MiniCPM3Config(**SIZES, dim_model_base=8), HeadForm(before=0.25)),
        (Gemma2Config(**SIZES, final_logit_softcapping=30.0), HeadForm(cap=30.0)),
        (Gemma2Config(**SIZES, final_logit_softcapping=0.7), HeadForm(cap=0.7)),
        (Gemma2Config(**SIZES, final_logit_softcapping=None), HeadForm()),
        (NanoChatConfig(**SIZES, final_logit_softcapping=15.0), HeadForm(cap=15.0)),
        (FalconH1Config(**SIZES, lm_head_multiplier=0.0195), HeadForm(after=0.0195)),
    ],
)
def test_the_forward_pass_shows_scale_and_cap(config: PretrainedConfig, form: HeadForm) -> None:
    assert head_form(empty(config)) == form


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Llama4TextConfig(**SIZES), "does not say which part of it is the decoder"),
        (ModernBertDecoderConfig(**SIZES), "does not say which part of it is the decoder"),
        (BertConfig(**SIZES, is_decoder=True), "more than a product with its output head"),
    ],
)
def test_a_head_that_does_more_is_refused(config: PretrainedConfig, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        head_form(empty(config))


def test_the_model_is_left_as_it_was() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    before = model(input_ids=torch.arange(8)[None]).logits
    head_form(model)
    assert model(input_ids=torch.arange(8)[None]).logits.equal(before)


def test_a_bias_is_added_to_what_the_factor_on_states_has_shrunken() -> None:
    linear = torch.nn.Linear(4, 3)
    states = torch.randn(5, 4)
    head = Head.of(linear, HeadForm(before=0.5, after=3.0))
    assert head.bias is not None
    ours = head.scale * (states @ head.weight.t() + head.bias)
    torch.testing.assert_close(ours, 3.0 * linear(0.5 * states))
    some = head.words(1, 3)
    assert some.bias is not None
    assert some.weight.equal(head.weight[1:3]) and some.bias.equal(head.bias[1:3])
