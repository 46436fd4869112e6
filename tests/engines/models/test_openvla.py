"""A policy of OpenVLA's form, of random weights: towers, checkpoint, sequences with images."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from configs.model import PretrainedModel, RandomModel, RandomVision
from engines.models import checkpoints
from engines.models.facts import model_facts
from engines.models.vla.openvla import OpenVLA, OpenVLAConfig, pixels_of, turn
from engines.models.vla.shapes import DINOV2, SIGLIP, TowerShape, VisionShape
from engines.models.vla.vision_tower import VisionTower

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


def randomised(module: torch.nn.Module) -> None:
    """Random weights, those that begin as zeros and ones too."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)


@pytest.fixture
def policy() -> OpenVLA:
    config = OpenVLAConfig(
        vision_backbone_id="tiny",
        towers=[asdict(ONE), asdict(OTHER)],
        text_config=LlamaConfig(**LANGUAGE),
    )
    made = OpenVLA(config).eval()
    randomised(made)
    return made


def save(policy: OpenVLA, tensors: dict[str, Tensor], folder: Path) -> Path:
    """Files of a checkpoint as OpenVLA's are: two of tensors, an index, config.json with auto_map."""
    config = {
        "architectures": ["OpenVLAForActionPrediction"],
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
        "model_type": "openvla",
        "vision_backbone_id": "tiny",
        "towers": [asdict(ONE), asdict(OTHER)],
        "text_config": {"model_type": "llama", **LANGUAGE},
        "norm_stats": {"libero": {"action": {"q01": [-1.0], "q99": [1.0]}}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    parts = {f"model-{number}.safetensors": names[number::2] for number in range(2)}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    index = {
        "metadata": {},
        "weight_map": {name: file for file, some in parts.items() for name in some},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def tensors(policy: OpenVLA) -> dict[str, Tensor]:
    """Those of its checkpoint, with those of timm's towers that the features do not need."""
    found = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    for name in ("featurizer.norm.weight", "featurizer.blocks.2.attn.qkv.weight"):
        found[f"vision_backbone.{name}"] = torch.ones(3)
    found["vision_backbone.fused_featurizer.attn_pool.latent"] = torch.ones(3)
    return found


def asked(policy: OpenVLA) -> tuple[Tensor, Tensor]:
    """Three turns end to end, int64 [1, T], and what was seen at each."""
    torch.manual_seed(1)
    ids = torch.randint(0, 40, (3, 6)).tolist()
    images = torch.randint(0, 256, (3, 20, 24, 3), dtype=torch.uint8)
    turns = [turn(row, [], number, policy.patches) for number, row in enumerate(ids)]
    return torch.tensor(turns), policy.see(images)


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
        found = sum(one.numel() for one in tower.parameters())
        assert (found, round(found / 1e6)) == (shape.parameters, millions)
        assert shape.patches == 256


def test_a_checkpoint_gives_the_policy_back(
    policy: OpenVLA, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    loaded = checkpoints.load_for_training(save(policy, tensors, tmp_path))
    assert isinstance(loaded, OpenVLA) and loaded.config.action_tokens == (44, 300)
    ids, seen = asked(policy)
    for row in ids:
        torch.testing.assert_close(loaded(row[None], seen).logits, policy(row[None], seen).logits)
    half = checkpoints.load_for_training(tmp_path, "bfloat16")
    assert {one.dtype for one in half.parameters()} == {torch.bfloat16}
    assert checkpoints.tensor_shapes(tmp_path).keys() == policy.state_dict().keys()


def test_tensors_that_are_missing_or_of_no_use_are_named(
    policy: OpenVLA, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    lost = tensors.pop("projector.fc2.bias")
    with pytest.raises(ValueError, match=r"the tensor projector.fc2.bias is not in its files"):
        checkpoints.load_for_training(save(policy, tensors, tmp_path))
    more = {**tensors, "projector.fc2.bias": lost, "projector.fc9": torch.ones(1)}
    with pytest.raises(ValueError, match=r"the tensor projector.fc9 is in its files, but not in"):
        checkpoints.load_for_training(save(policy, more, tmp_path))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"towers": None, "vision_backbone_id": "clip-vit-l"}, "vision_backbone_id = clip-vit-l"),
        ({"text_config": {"model_type": "phi"}}, "text_config.model_type = phi"),
    ],
)
def test_another_form_is_refused(
    policy: OpenVLA, tensors: dict[str, Tensor], tmp_path: Path, other: dict[str, Any], said: str
) -> None:
    file = save(policy, tensors, tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **other}))
    with pytest.raises(ValueError, match=said):
        checkpoints.build_empty(tmp_path)


def test_what_its_files_say(policy: OpenVLA, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    facts = model_facts(PretrainedModel(path=str(save(policy, tensors, tmp_path))))
    assert facts is not None and facts.shape is not None
    assert facts.vision == facts.shape.vision == VisionShape(towers=(ONE, OTHER), language=32)
    assert facts.shape.parameters == sum(one.numel() for one in policy.parameters())


def test_what_the_files_of_openvla_leave_out_is_llamas(tmp_path: Path) -> None:
    """Its config.json says of the language model that it is a Llama, and how many tokens it has."""
    said = {"model_type": "openvla", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    (tmp_path / "model.safetensors").touch()
    facts = model_facts(PretrainedModel(path=str(tmp_path)))
    assert facts is not None and facts.shape is not None and facts.vision is not None
    model = checkpoints.build_empty(tmp_path)
    assert facts.shape.parameters == sum(one.numel() for one in model.parameters())
    assert facts.positions == model.config.get_text_config().max_position_embeddings
    assert (round(facts.shape.parameters / 1e8), facts.vision.patches) == (75, 256)


def test_one_is_drawn_at_random(tmp_path: Path) -> None:
    model = RandomModel(vision=RandomVision(actions=3))
    directory = checkpoints.materialize(model, tmp_path)
    drawn = checkpoints.load_for_training(directory)
    assert isinstance(drawn, OpenVLA)
    facts = model_facts(model)
    assert facts is not None and facts.shape is not None and facts.vision is not None
    assert facts.vision.patches == drawn.patches == 16
    assert facts.shape.parameters == sum(one.numel() for one in drawn.parameters())
    tokenizer = checkpoints.load_tokenizer(directory)
    first, stop = drawn.config.action_tokens
    assert [tokenizer.decode([one]) for one in range(first, stop)] == ["<2>", "<1>", "<0>"]
    # Each image is another embedding, and not so small that a norm's epsilon hides it.
    seen = drawn.see(torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)).unflatten(0, (2, -1))
    assert float((seen[0] - seen[1]).detach().square().mean().sqrt()) > 0.01
    assert checkpoints.materialize(RandomModel(), tmp_path) != directory


def test_the_image_stands_after_the_first_token(policy: OpenVLA) -> None:
    ids, seen = asked(policy)
    words = policy.get_input_embeddings()(ids[1].clamp(min=0))
    both = policy.embedded(ids[1], seen)
    assert both.shape == (6 + 4, 32) and ids[1, 1:5].tolist() == [-5, -6, -7, -8]
    torch.testing.assert_close(both[1:5], seen[4:8])
    torch.testing.assert_close(both[[0, 5, 6, 7, 8, 9]], words[[0, 5, 6, 7, 8, 9]])
    other = policy(ids[1][None], seen.flip(0)).logits[0, -1, 44:300]
    assert not torch.allclose(other, policy(ids[1][None], seen).logits[0, -1, 44:300], atol=1e-3)


def test_it_says_action_tokens_alone(policy: OpenVLA) -> None:
    ids, seen = asked(policy)
    likely = policy(ids[:1], seen).logits.log_softmax(-1)
    plain = policy.language_model(inputs_embeds=policy.embedded(ids[0], seen)[None]).logits
    torch.testing.assert_close(likely[..., 44:300], plain[..., 44:300].log_softmax(-1))
    assert likely[..., :44].isneginf().all() and likely[..., 300:].isneginf().all()


def test_gradients_reach_every_part(policy: OpenVLA) -> None:
    ids, seen = asked(policy)
    policy(ids[:1], seen).logits[0, -1, 44].backward()
    for name in ("vision_backbone.featurizer.blocks.0.ls1.scale_factor", "projector.fc1.weight"):
        gradient = policy.get_parameter(name).grad
        assert gradient is not None and float(gradient.abs().max()) > 0, name


def test_images_are_seen_by_each_tower_in_its_own_colours() -> None:
    grey = torch.full((1, 8, 8, 3), 255, dtype=torch.uint8)
    pixels = pixels_of(grey, 16)
    assert pixels.shape == (1, 6, 16, 16)
    torch.testing.assert_close(pixels[0, 3:], torch.ones(3, 16, 16))
    assert pixels[0, 0, 0, 0] == pytest.approx((1 - 0.485) / 0.229)
