"""The sizes of a policy's vision part: two towers and a projector. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerShape:
    """The sizes of a vision transformer."""

    width: int  # D
    depth: int  # blocks, with the last, which is not built
    heads: int
    hidden: int  # of the feed-forward part
    patch: int  # pixels of a side
    image: int  # pixels of a side
    prefix: int  # class and register tokens
    scaled: bool  # whether a block's outputs are scaled (LayerScale), as DINOv2's

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image // self.patch) ** 2

    @property
    def layers(self) -> int:
        """Blocks that are built."""
        return self.depth - 1

    @property
    def layer_parameters(self) -> int:
        """Weights of a block: attention, feed-forward part, norms, factors; with biases."""
        attention = 4 * self.width * (self.width + 1)
        feed_forward = 2 * self.width * self.hidden + self.hidden + self.width
        return attention + feed_forward + (6 if self.scaled else 4) * self.width

    @property
    def parameters(self) -> int:
        """Weights in all."""
        outside = 3 * self.patch**2 + 1 + self.patches + self.prefix
        return self.layers * self.layer_parameters + outside * self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """The towers, and the width that the projector leads to."""

    towers: tuple[TowerShape, TowerShape]
    language: int  # width of the language model

    @property
    def patches(self) -> int:
        """Embeddings that an image becomes."""
        return self.towers[0].patches

    @property
    def features(self) -> int:
        """Width of both towers, which stand side by side."""
        return sum(tower.width for tower in self.towers)

    @property
    def parameters(self) -> int:
        """Weights of towers and projector."""
        wide, out = 4 * self.features, self.language
        projector = (self.features + 1) * wide + (wide + 1) * out + (out + 1) * out
        return sum(tower.parameters for tower in self.towers) + projector


# Those that OpenVLA's checkpoints name (vision_backbone_id).
DINOV2 = TowerShape(
    width=1024, depth=24, heads=16, hidden=4096, patch=14, image=224, prefix=5, scaled=True
)
SIGLIP = TowerShape(
    width=1152, depth=27, heads=16, hidden=4304, patch=14, image=224, prefix=0, scaled=False
)
BACKBONES = {"dinosiglip-vit-so-224px": (DINOV2, SIGLIP)}


def towers_of(backbone: str, towers: list[dict[str, Any]] | None) -> tuple[TowerShape, TowerShape]:
    """The two that config.json names, or gives the sizes of. ValueError where it does neither."""
    if towers is not None:
        first, second = (TowerShape(**sizes) for sizes in towers)
        return first, second
    if backbone not in BACKBONES:
        raise ValueError(
            f"vision_backbone_id = {backbone} is none of {', '.join(BACKBONES)}. Set model.path to a "
            "checkpoint of OpenVLA with one of them."
        )
    return BACKBONES[backbone]


def vision_of(config: Mapping[str, Any]) -> VisionShape | None:
    """By a model's config.json; None where it looks at no images. ValueError: see `towers_of`."""
    if config.get("model_type") != "openvla":
        return None
    backbone = config.get("vision_backbone_id", next(iter(BACKBONES)))
    width = config.get("text_config", {}).get("hidden_size", 4096)  # as LlamaConfig has it
    return VisionShape(towers=towers_of(backbone, config.get("towers")), language=width)


def tiny_towers(
    *, image: int, patch: int, width: int, layers: int, heads: int
) -> tuple[TowerShape, TowerShape]:
    """Two towers of one size, one in the form of DINOv2, the other in SigLIP's."""

    def tower(prefix: int) -> TowerShape:
        return TowerShape(
            width=width,
            depth=layers + 1,
            heads=heads,
            hidden=2 * width,
            patch=patch,
            image=image,
            prefix=prefix,
            scaled=prefix > 0,
        )

    return tower(5), tower(0)
