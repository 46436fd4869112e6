"""A policy in the form of OpenVLA (arXiv:2406.09246), as a model of transformers.

Two vision towers look at an image, a projector makes their patches embeddings of the language model,
which stand after the first token of a text, and the language model writes action tokens: the last
ones of its vocabulary (engines/environments/action_tokens.py). It has the names of the checkpoints'
tensors. Importing this module makes transformers know the form (`model_type: openvla`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutputWithPast

from engines.models.vla.shapes import TowerShape, tiny_towers, towers_of
from engines.models.vla.vision_tower import Scale, VisionTower, unused_names

# Mean and deviation of each colour that the towers were trained with: ImageNet's, and halves.
COLOURS = (((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,) * 3, (0.5,) * 3))


class OpenVLAConfig(PreTrainedConfig):
    """config.json of a checkpoint. ValueError for one of another form."""

    model_type = "openvla"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": LlamaConfig}

    vision_backbone_id: str = "dinosiglip-vit-so-224px"
    text_config: dict[str, Any] | PreTrainedConfig | None = None
    pad_to_multiple_of: int = 64  # rows of the embedding that are no tokens
    n_action_bins: int = 256  # action tokens
    norm_stats: dict[str, Any] | None = None  # statistics of actions, by data set
    towers: list[dict[str, Any]] | None = None  # sizes of both, where the backbone has no name here
    tie_word_embeddings: bool = False

    def __post_init__(self, **named: Any) -> None:
        if isinstance(self.text_config, dict):
            kind = self.text_config.get("model_type", "llama")
            if kind != "llama":
                raise ValueError(
                    f"text_config.model_type = {kind}, and the language model of this form is a "
                    "llama. Set model.path to a checkpoint of OpenVLA."
                )
            self.text_config = LlamaConfig(**self.text_config)
        elif self.text_config is None:
            self.text_config = LlamaConfig()
        towers_of(self.vision_backbone_id, self.towers)
        super().__post_init__(**named)

    @property
    def shapes(self) -> tuple[TowerShape, TowerShape]:
        """Sizes of the towers."""
        return towers_of(self.vision_backbone_id, self.towers)

    @property
    def action_tokens(self) -> tuple[int, int]:
        """The first of them, and the one after the last."""
        stop = self.get_text_config().vocab_size - self.pad_to_multiple_of
        return stop - self.n_action_bins, stop


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
        projected: Tensor = self.fc3(gelu(self.fc2(gelu(self.fc1(x)))))
        return projected


class VisionBackbone(nn.Module):
    """The two towers, whose features of a patch stand side by side."""

    def __init__(self, towers: tuple[TowerShape, TowerShape]) -> None:
        super().__init__()
        self.featurizer, self.fused_featurizer = (VisionTower(shape) for shape in towers)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers of both."""
        return [*self.featurizer.blocks, *self.fused_featurizer.blocks]

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 6, image, image], normalised for each tower, to [B, patches, D1 + D2]."""
        first, second = pixels.split(3, dim=1)
        return torch.cat([self.featurizer(first), self.fused_featurizer(second)], dim=2)


class OpenVLA(PreTrainedModel):
    """The policy. In a sequence of tokens -1 - i stands for patch i of the images that go with it."""

    config: OpenVLAConfig
    config_class = OpenVLAConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__(config)
        shapes, language = config.shapes, config.get_text_config()
        self.vision_backbone = VisionBackbone(shapes)
        self.projector = Projector(sum(shape.width for shape in shapes), language.hidden_size)
        self.language_model = LlamaForCausalLM(language)
        self.patches = shapes[0].patches  # of an image
        self._keys_to_ignore_on_load_unexpected = [
            rf"^vision_backbone\.{name}\.{pattern}"
            for name, shape in zip(("featurizer", "fused_featurizer"), shapes, strict=True)
            for pattern in unused_names(shape)
        ]
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()

    def get_decoder(self) -> nn.Module:
        """The language model without its head."""
        return self.language_model.get_decoder()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, VisionTower):
            for parameter in module.parameters(recurse=False):
                init.normal_(parameter, mean=0.0, std=0.02)
        elif isinstance(module, Scale):
            init.ones_(module.scale_factor)
        elif isinstance(module, nn.Linear | nn.Conv2d):  # with less, nothing of an image is left
            init.normal_(module.weight, mean=0.0, std=module.weight[0].numel() ** -0.5)

    def see(self, images: Tensor) -> Tensor:
        """Images uint8 [F, H, W, 3] as embeddings [F patches, hidden]."""
        weight = self.projector.fc1.weight
        pixels = pixels_of(images, self.config.shapes[0].image).to(weight.dtype)
        features: Tensor = self.projector(self.vision_backbone(pixels))
        return features.flatten(0, 1)

    def embedded(self, tokens: Tensor, seen: Tensor) -> Tensor:
        """Tokens int64 [T] as embeddings [T, hidden]; `seen`: what `see` made of the images."""
        words = self.get_input_embeddings()(tokens.clamp(min=0))
        places = torch.arange(len(tokens), device=tokens.device)
        places = torch.where(tokens < 0, len(tokens) - 1 - tokens, places)
        return torch.cat([words, seen.to(words.dtype)]).index_select(0, places)

    def forward(
        self, input_ids: Tensor, seen: Tensor | None = None, **rest: Any
    ) -> CausalLMOutputWithPast:
        """Logits of sequences laid end to end, int64 [1, T]: -inf but for the action tokens.

        Args:
            input_ids: Tokens, and patches of the images.
            seen: Of the images, as `see` makes it; None: there are no patches.
            rest: For the language model.
        """
        if seen is None:
            seen = self.projector.fc3.weight.new_zeros(0, self.config.get_text_config().hidden_size)
        output: CausalLMOutputWithPast = self.language_model(
            inputs_embeds=self.embedded(input_ids[0], seen)[None], **rest
        )
        first, stop = self.config.action_tokens
        plain: Any = output.logits
        logits = torch.full_like(plain, -torch.inf)
        logits[..., first:stop] = plain[..., first:stop]
        return CausalLMOutputWithPast(logits=logits)  # type: ignore[arg-type]

    def probed(self, tokens: Sequence[int], prompt: int) -> list[int]:
        """Tokens of a probe as a turn: those after the first `prompt` become action tokens."""
        first, stop = self.config.action_tokens
        return [*tokens[:prompt], *(first + token % (stop - first) for token in tokens[prompt:])]

    @property
    def probe_image(self) -> Tensor:
        """What a probe shows to the policy, uint8 [1, image, image, 3]: colours side by side."""
        side = self.config.shapes[0].image
        places = torch.arange(side * side * 3, dtype=torch.int64)
        return (places * 7919 % 256).to(torch.uint8).view(1, side, side, 3)


def turn(prompt: Sequence[int], written: Sequence[int], image: int, patches: int) -> list[int]:
    """What the policy reads at a turn: the first token, an image, the rest, what it has written.

    Args:
        prompt: Tokens, of which the first is the beginning of a text.
        written: Tokens of the turn so far.
        image: Number of the image among those that go with the sequences.
        patches: Tokens that an image becomes.
    """
    first = -1 - image * patches
    return [prompt[0], *range(first, first - patches, -1), *prompt[1:], *written]


def pixels_of(images: Tensor, size: int) -> Tensor:
    """Images uint8 [B, H, W, 3] as the towers take them: float32 [B, 6, size, size].

    Scaled to the size in both directions, whatever their shape (image_resize_strategy resize-naive).
    """
    planes = images.permute(0, 3, 1, 2).float() / 255.0
    if planes.shape[2:] != (size, size):
        planes = nn.functional.interpolate(
            planes, [size, size], mode="bicubic", align_corners=False, antialias=True
        ).clamp(0.0, 1.0)
    parts = []
    for numbers in COLOURS:
        mean, deviation = (planes.new_tensor(values).reshape(1, 3, 1, 1) for values in numbers)
        parts.append((planes - mean) / deviation)
    return torch.cat(parts, dim=1)


def tiny_config(
    *, text: LlamaConfig, image: int, patch: int, width: int, layers: int, heads: int, actions: int
) -> OpenVLAConfig:
    """Of a policy whose towers are those of `tiny_towers`, and so many last tokens are actions."""
    towers = tiny_towers(image=image, patch=patch, width=width, layers=layers, heads=heads)
    return OpenVLAConfig(
        vision_backbone_id="made",
        text_config=text,
        pad_to_multiple_of=0,
        n_action_bins=actions,
        towers=[asdict(shape) for shape in towers],
    )


AutoConfig.register(OpenVLAConfig.model_type, OpenVLAConfig, exist_ok=True)
AutoModelForCausalLM.register(OpenVLAConfig, OpenVLA, exist_ok=True)
