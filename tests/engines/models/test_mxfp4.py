"""gpt-oss with experts in mxfp4, unpacked to bfloat16: each number as the standard says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.families import FAMILIES
from configs.model import PretrainedModel
from engines.models import checkpoints
from engines.models.checkpoints import character_tokenizer
from engines.models.facts import model_facts
from engines.train.self_test.child import verdict
from engines.train.self_test.twin import build

# OCP Microscaling Formats 1.0: E2M1, sign and exponent and mantissa as 1, 2 and 1 bits.
E2M1 = [sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
EXPERTS = ("gate_up_proj", "down_proj")


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A tiny gpt-oss as it is published: two numbers a byte, a power of two for 32 of them."""
    kind, sizes = FAMILIES["gpt-oss"]
    folder = tmp_path / "packed"
    config = getattr(transformers, kind)(**{**sizes, "intermediate_size": 64})
    build(config).to(torch.bfloat16).save_pretrained(folder)
    bits, tensors = torch.Generator().manual_seed(0), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(EXPERTS):
            tensors[name] = tensor
            continue
        experts, inside, out = tensor.shape
        sizes = (experts, out, inside // 32)
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (*sizes, 16), generator=bits, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            120, 126, sizes, generator=bits, dtype=torch.uint8
        )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    character_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, out, in]: the low half of a byte comes first."""
    table = torch.tensor(E2M1)
    each = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], -1)
    return (each.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


def test_each_number_is_the_standards(packed: Path, tmp_path: Path) -> None:
    model = PretrainedModel(path=str(packed))
    directory = checkpoints.materialize(model, tmp_path / "cache")
    assert directory != packed

    before = load_file(packed / "model.safetensors")
    found = checkpoints.load_for_training(directory, "bfloat16").state_dict()
    for name, tensor in found.items():
        if name.endswith(EXPERTS):
            wanted = numbers(before[f"{name}_blocks"], before[f"{name}_scales"]).transpose(1, 2)
            assert torch.equal(tensor.float(), wanted)
        else:
            assert torch.equal(tensor, before[name])
    assert checkpoints.load_tokenizer(directory).vocab_size > 0
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    assert checkpoints.materialize(model, tmp_path / "cache") == directory  # not made again


def test_what_is_said_of_it_before_it_is_unpacked(packed: Path) -> None:
    facts = model_facts(PretrainedModel(path=str(packed)))
    assert facts is not None and facts.quantised == "mxfp4"
    said = verdict(packed, 48)
    assert (said.refused, said.untested) == (None, None)


def test_a_file_that_lacks_a_tensor_is_refused(packed: Path, tmp_path: Path) -> None:
    tensors = load_file(packed / "model.safetensors")
    del tensors["model.layers.1.self_attn.sinks"]
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\.1\.self_attn\.sinks"):
        checkpoints.materialize(PretrainedModel(path=str(packed)), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("packed-*[0-9a-f]"))
