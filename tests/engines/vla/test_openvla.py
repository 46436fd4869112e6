"""A policy of OpenVLA's form, of random weights: towers, loader, action head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engines.environments.action_tokens import ActionStatistics, actions_of
from engines.vla import openvla
from engines.vla.openvla import OpenVLA, VLAShape, pixels_of
from engines.vla.vision_tower import DINOV2, SIGLIP, TowerShape, VisionTower

ONE = TowerShape(width=32, depth=3, heads=2, hidden=64, patch=8, image=16, prefix=5, scaled=True)
OTHER = TowerShape(width=16, depth=3, heads=2, hidden=40, patch=8, image=16, prefix=0, scaled=False)
LANGUAGE: dict[str, Any] = {
    "vocab_size": 364,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
STATISTICS = {"libero": {"action": {"q01": [-1.0, 0.0], "q99": [1.0, 4.0]}}}


def randomised(module: torch.nn.Module) -> None:
    """Random weights, those that begin as zeros and ones too."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)


@pytest.fixture
def policy() -> OpenVLA:
    shape = VLAShape(language=LANGUAGE, towers=(ONE, OTHER), statistics=STATISTICS)
    made = OpenVLA(shape).eval()
    randomised(made)
    return made


@pytest.fixture
def checkpoint(policy: OpenVLA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its files, with the tensors of timm's towers that the features do not need."""
    monkeypatch.setitem(openvla.TOWERS, "tiny", (ONE, OTHER))
    config = {
        "vision_backbone_id": "tiny",
        "text_config": {"model_type": "llama", **LANGUAGE},
        "norm_stats": STATISTICS,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    for name in ("featurizer.norm.weight", "featurizer.blocks.2.attn.qkv.weight"):
        tensors[f"vision_backbone.{name}"] = torch.ones(3)
    tensors["vision_backbone.fused_featurizer.attn_pool.latent"] = torch.ones(3)
    names = sorted(tensors)
    for number, some in enumerate((names[::2], names[1::2]), 1):
        save_file({name: tensors[name] for name in some}, tmp_path / f"model-{number}.safetensors")
    return tmp_path


def asked() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 40, (3, 6))
    images = torch.randint(0, 256, (3, 20, 24, 3), dtype=torch.uint8)
    return ids, pixels_of(images, 16)


def test_a_tower_with_registers_is_dinov2s() -> None:
    import transformers

    tower = VisionTower(ONE).eval()
    randomised(tower)
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        mlp_ratio=2,
        image_size=16,
        patch_size=8,
        num_register_tokens=4,
        layer_norm_eps=1e-6,
    )
    theirs = transformers.Dinov2WithRegistersModel(config).eval()
    own = dict(tower.state_dict())
    inside = theirs.embeddings
    with torch.no_grad():
        inside.cls_token.copy_(own["cls_token"])
        inside.register_tokens.copy_(own["reg_token"])
        inside.position_embeddings.zero_()
        inside.position_embeddings[:, 1:].copy_(own["pos_embed"])
        inside.patch_embeddings.projection.weight.copy_(own["patch_embed.proj.weight"])
        inside.patch_embeddings.projection.bias.copy_(own["patch_embed.proj.bias"])
        for number, layer in enumerate(theirs.encoder.layer[:2]):
            place = f"blocks.{number}."
            for name in ("norm1", "norm2"):
                layer.get_submodule(name).weight.copy_(own[f"{place}{name}.weight"])
                layer.get_submodule(name).bias.copy_(own[f"{place}{name}.bias"])
            for kind in ("weight", "bias"):
                parts = own[f"{place}attn.qkv.{kind}"].chunk(3)
                for part, name in zip(parts, ("q_proj", "k_proj", "v_proj"), strict=True):
                    layer.attention.get_submodule(name).get_parameter(kind).copy_(part)
                proj = own[f"{place}attn.proj.{kind}"]
                layer.attention.o_proj.get_parameter(kind).copy_(proj)
                layer.mlp.fc1.get_parameter(kind).copy_(own[f"{place}mlp.fc1.{kind}"])
                layer.mlp.fc2.get_parameter(kind).copy_(own[f"{place}mlp.fc2.{kind}"])
            layer.layer_scale1.lambda1.copy_(own[f"{place}ls1.scale_factor"])
            layer.layer_scale2.lambda1.copy_(own[f"{place}ls2.scale_factor"])
        images = torch.randn(2, 3, 16, 16)
        wanted = theirs.embeddings(images)
        for layer in theirs.encoder.layer[:2]:
            wanted = layer(wanted, None)
        torch.testing.assert_close(tower(images), wanted[:, 5:], atol=1e-5, rtol=1e-5)


def test_the_sizes_are_those_of_the_checkpoints() -> None:
    for shape, millions in ((DINOV2, 291), (SIGLIP, 397)):
        with torch.device("meta"):
            tower = VisionTower(shape)
        assert round(sum(one.numel() for one in tower.parameters()) / 1e6) == millions
        assert shape.patches == 256


def test_a_checkpoint_gives_the_policy_back(policy: OpenVLA, checkpoint: Path) -> None:
    loaded = OpenVLA.load(checkpoint, torch.float32)
    assert loaded.vocabulary == 300 and loaded.shape.statistics == STATISTICS
    ids, pixels = asked()
    torch.testing.assert_close(
        loaded.action_logprobs(ids, pixels), policy.action_logprobs(ids, pixels)
    )
    half = OpenVLA.load(checkpoint, torch.bfloat16)
    assert {one.dtype for one in half.parameters()} == {torch.bfloat16}
    assert half.draw(ids, pixels, 2).logprobs.dtype == torch.float32


def test_tensors_that_are_missing_or_of_no_use_are_named(policy: OpenVLA, checkpoint: Path) -> None:
    tensors = dict(policy.state_dict())
    with pytest.raises(ValueError, match=r"projector.fc2.bias is not in the checkpoint"):
        policy.take({k: v for k, v in tensors.items() if k != "projector.fc2.bias"}, torch.float32)
    with pytest.raises(ValueError, match=r"projector.fc9 is not in the policy"):
        policy.take({**tensors, "projector.fc9": torch.ones(1)}, torch.float32)
    with pytest.raises(
        ValueError, match=r"projector.fc3.bias of the checkpoint has the shape \(2,"
    ):
        policy.take({**tensors, "projector.fc3.bias": torch.ones(2)}, torch.float32)
    (checkpoint / "config.json").write_text(json.dumps({"vision_backbone_id": "clip-vit-l"}))
    with pytest.raises(ValueError, match="has the vision backbone clip-vit-l"):
        OpenVLA.load(checkpoint)


def test_the_image_stands_after_the_first_token(policy: OpenVLA) -> None:
    ids, pixels = asked()
    words = policy.language_model.get_input_embeddings()(ids)
    both = policy.embeddings(ids, pixels)
    assert both.shape == (3, 6 + 4, 32)
    torch.testing.assert_close(both[:, :1], words[:, :1])
    torch.testing.assert_close(both[:, 5:], words[:, 1:])
    other = policy.action_logprobs(ids, pixels.flip(0))
    assert not torch.allclose(other[:, -1], policy.action_logprobs(ids, pixels)[:, -1], atol=1e-3)


def test_drawn_tokens_are_actions_with_their_probabilities(policy: OpenVLA) -> None:
    ids, pixels = asked()
    drawn = policy.draw(ids, pixels, 4, generator=torch.Generator().manual_seed(5))
    again = policy.draw(ids, pixels, 4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(drawn.ids, again.ids)
    assert int(drawn.ids.min()) >= 300 - 256 and int(drawn.ids.max()) < 300
    with torch.no_grad():
        whole = policy.action_logprobs(torch.cat([ids, drawn.ids[:, :-1]], 1), pixels)
    known = whole[:, ids.shape[1] - 1 :].gather(2, (drawn.ids - 44)[..., None])[..., 0]
    torch.testing.assert_close(drawn.logprobs, known, atol=1e-4, rtol=1e-4)
    likeliest = policy.draw(ids, pixels, 1, temperature=0.0).ids
    with torch.no_grad():
        assert torch.equal(
            likeliest[:, 0] - 44, policy.action_logprobs(ids, pixels)[:, -1].argmax(-1)
        )
    statistics = ActionStatistics.of(STATISTICS["libero"]["action"])
    for row in drawn.ids.tolist():
        actions = actions_of(row, policy.vocabulary, statistics)
        assert actions.shape == (2, 2)
        assert (actions >= statistics.low).all() and (actions <= statistics.high).all()


def test_gradients_reach_every_part(policy: OpenVLA) -> None:
    ids, pixels = asked()
    policy.action_logprobs(ids, pixels)[:, -1, 0].sum().backward()  # type: ignore[no-untyped-call]
    for name in ("vision_backbone.featurizer.blocks.0.ls1.scale_factor", "projector.fc1.weight"):
        gradient = policy.get_parameter(name).grad
        assert gradient is not None and float(gradient.abs().max()) > 0, name


def test_images_are_seen_by_each_tower_in_its_own_colours() -> None:
    grey = torch.full((1, 8, 8, 3), 255, dtype=torch.uint8)
    pixels = pixels_of(grey, 16)
    assert pixels.shape == (1, 6, 16, 16)
    torch.testing.assert_close(pixels[0, 3:], torch.ones(3, 16, 16))
    assert pixels[0, 0, 0, 0] == pytest.approx((1 - 0.485) / 0.229)
