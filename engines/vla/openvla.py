"""A policy in the form of OpenVLA (arXiv:2406.09246): its checkpoint's loader, and its action head.

Two vision towers look at an image, a projector makes their patches embeddings of the language model,
which stand after the first token of the instruction, and the language model writes action tokens: the
last 256 of its vocabulary (engines/environments/action_tokens.py).

No engine that samples or trains holds such a policy yet; docs/algorithms.md says what that takes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from engines.vla.vision_tower import DINOV2, SIGLIP, TowerShape, VisionTower

TOWERS = {"dinosiglip-vit-so-224px": (DINOV2, SIGLIP)}
# Mean and deviation of each colour that the towers were trained with: ImageNet's, and halves.
COLOURS = (((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,) * 3, (0.5,) * 3))


@dataclass(frozen=True, kw_only=True, slots=True)
class VLAShape:
    """The sizes of a policy."""

    language: dict[str, Any]  # settings of the Llama model
    towers: tuple[TowerShape, TowerShape] = (DINOV2, SIGLIP)
    padding: int = 64  # rows of the embedding that are no tokens (pad_to_multiple_of)
    bins: int = 256  # action tokens
    statistics: dict[str, Any] = field(default_factory=dict)  # norm_stats, by data set

    @classmethod
    def read(cls, directory: Path) -> Self:
        """From a checkpoint's config.json. ValueError where it is of another form."""
        said = json.loads((directory / "config.json").read_text())
        towers, language = said.get("vision_backbone_id"), said.get("text_config", {})
        if towers not in TOWERS or language.get("model_type", "llama") != "llama":
            raise ValueError(
                f"{directory} has the vision backbone {towers} and a language model of the kind "
                f"{language.get('model_type')}. Name a checkpoint of OpenVLA, with "
                f"{', '.join(TOWERS)} and llama."
            )
        return cls(
            language={key: value for key, value in language.items() if key != "model_type"},
            towers=TOWERS[towers],
            padding=said.get("pad_to_multiple_of", 64),
            bins=said.get("n_action_bins", 256),
            statistics=said.get("norm_stats") or {},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionTokensDrawn:
    """Action tokens of B images."""

    ids: Tensor  # int64 [B, n]
    logprobs: Tensor  # float32 [B, n], under the distribution that each was drawn from


class Projector(nn.Module):
    """Features of patches to embeddings of the language model."""

    def __init__(self, vision: int, language: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision, 4 * vision)
        self.fc2 = nn.Linear(4 * vision, language)
        self.fc3 = nn.Linear(language, language)

    def forward(self, x: Tensor) -> Tensor:
        """[B, patches, vision] to [B, patches, language]."""
        gelu = nn.functional.gelu
        found: Tensor = self.fc3(gelu(self.fc2(gelu(self.fc1(x)))))
        return found


class VisionBackbone(nn.Module):
    """The two towers, whose features of a patch stand side by side."""

    def __init__(self, towers: tuple[TowerShape, TowerShape]) -> None:
        super().__init__()
        self.featurizer, self.fused_featurizer = (VisionTower(shape) for shape in towers)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 6, image, image], normalised for each tower, to [B, patches, D1 + D2]."""
        one, other = pixels.split(3, dim=1)
        return torch.cat([self.featurizer(one), self.fused_featurizer(other)], dim=2)


class OpenVLA(nn.Module):
    """The policy. Modules have the names that the checkpoints' tensors have."""

    def __init__(self, shape: VLAShape) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.shape = shape
        self.vision_backbone = VisionBackbone(shape.towers)
        width = sum(tower.width for tower in shape.towers)
        language = LlamaConfig(**shape.language)
        self.projector = Projector(width, language.hidden_size)
        self.language_model = LlamaForCausalLM(language)
        self.vocabulary = language.vocab_size - shape.padding  # tokens that there are

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Self:
        """The policy of a checkpoint. ValueError naming a tensor that is missing or has no place."""
        from safetensors.torch import load_file

        with torch.device("meta"):
            policy = cls(VLAShape.read(directory))
        given: dict[str, Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            given |= load_file(file)
        policy.take(given, dtype)
        return policy.eval()

    def take(self, given: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Take a checkpoint's tensors as the weights, in a number format."""
        wanted = {name: tensor.shape for name, tensor in self.state_dict().items()}
        used = {name: tensor for name, tensor in given.items() if not self._unused(name)}
        for name in sorted(wanted.keys() | used.keys()):
            if name not in used or name not in wanted:
                where = "the checkpoint" if name not in used else "the policy of its config.json"
                raise ValueError(f"The tensor {name} is not in {where}.")
            if used[name].shape != wanted[name]:
                shapes = f"{tuple(used[name].shape)}, not {tuple(wanted[name])}"
                raise ValueError(f"The tensor {name} of the checkpoint has the shape {shapes}.")
        weights = {name: tensor.to(dtype) for name, tensor in used.items()}
        self.load_state_dict(weights, assign=True)
        # Its frequencies are no weights, and were not computed on the meta device.
        config = self.language_model.config
        self.language_model.model.rotary_emb = type(self.language_model.model.rotary_emb)(config)

    def _unused(self, name: str) -> bool:
        for prefix, tower in self.vision_backbone.named_children():
            place = f"vision_backbone.{prefix}."
            if name.startswith(place):
                assert isinstance(tower, VisionTower)
                return tower.unused(name.removeprefix(place))
        return name.endswith("rotary_emb.inv_freq")

    def embeddings(self, ids: Tensor, pixels: Tensor) -> Tensor:
        """[B, T + patches, H]: the first token, the image, the other tokens.

        Args:
            ids: int64 [B, T], of one length, the first one the beginning of a text.
            pixels: [B, 6, image, image], as `pixels_of` makes them.
        """
        words = self.language_model.get_input_embeddings()(ids)
        image = self.projector(self.vision_backbone(pixels.to(words.dtype)))
        return torch.cat([words[:, :1], image, words[:, 1:]], dim=1)

    def action_logprobs(self, ids: Tensor, pixels: Tensor, temperature: float = 1.0) -> Tensor:
        """float32 [B, T, bins]: what the token after each is, among the action tokens alone.

        [..., b] is of the token vocabulary - bins + b. Args: as `embeddings`.
        """
        found = self.language_model(inputs_embeds=self.embeddings(ids, pixels)).logits
        patches = self.shape.towers[0].patches
        at_text = torch.cat([found[:, :1], found[:, 1 + patches :]], dim=1)
        return self._of_actions(at_text, temperature)

    def _of_actions(self, logits: Tensor, temperature: float) -> Tensor:
        first = self.vocabulary - self.shape.bins
        own = logits[..., first : self.vocabulary].float() / temperature
        return own.log_softmax(-1)

    @torch.inference_mode()
    def draw(
        self,
        ids: Tensor,
        pixels: Tensor,
        count: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> ActionTokensDrawn:
        """Draw `count` action tokens for each of B images; the likeliest at temperature 0.

        Args: otherwise as `embeddings`.
        """
        step = self.language_model(inputs_embeds=self.embeddings(ids, pixels), use_cache=True)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        for number in range(count):
            likely = self._of_actions(step.logits[:, -1], temperature or 1.0)
            if temperature:
                chosen = torch.multinomial(likely.exp(), 1, generator=generator)
            else:
                chosen = likely.argmax(-1, keepdim=True)
            logprobs.append(likely.gather(1, chosen))
            tokens.append(chosen + self.vocabulary - self.shape.bins)
            if number + 1 < count:
                step = self.language_model(
                    input_ids=tokens[-1], past_key_values=step.past_key_values, use_cache=True
                )
        return ActionTokensDrawn(ids=torch.cat(tokens, 1), logprobs=torch.cat(logprobs, 1))


def pixels_of(images: Tensor, size: int) -> Tensor:
    """Images uint8 [B, H, W, 3] as the towers take them: float32 [B, 6, size, size].

    Scaled to the size in both directions, whatever their shape (image_resize_strategy resize-naive).
    """
    planes = images.permute(0, 3, 1, 2).float() / 255.0
    planes = nn.functional.interpolate(
        planes, [size, size], mode="bicubic", align_corners=False, antialias=True
    ).clamp(0.0, 1.0)
    parts = []
    for numbers in COLOURS:
        mean, deviation = (planes.new_tensor(one).reshape(1, 3, 1, 1) for one in numbers)
        parts.append((planes - mean) / deviation)
    return torch.cat(parts, dim=1)
