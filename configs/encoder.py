"""What makes an embedding of what an episode had to see: a fixed projection, or a vision model."""

from typing import Annotated, Literal

from pydantic import Field

from configs.base import ModelPath, Settings
from configs.model import PretrainedModel

# The kind that takes images alone, and one that takes anything.
NEEDS_IMAGES = ("encoder.kind = transformers", "encoder.kind = projection")


class FramesSettings(Settings):
    """Which frames of an episode are looked at; its embedding is the mean over them."""

    frames: int = Field(
        1, ge=1, description="Frames of an episode that are looked at; fewer where it has fewer."
    )
    span: Literal["whole", "end"] = Field(
        "end", description="end: the last ones; whole: evenly from the first to the last."
    )


class ProjectionEncoder(FramesSettings):
    """A fixed random projection of the frames' numbers (pixels as shares of 255)."""

    kind: Literal["projection"] = "projection"
    dim: int = Field(64, ge=1, description="Numbers of an embedding.")
    seed: int = Field(0, ge=0, description="Seed of the projection.")


class VisionEncoder(FramesSettings):
    """A vision model of transformers, of images or videos: the mean over its last layer's tokens."""

    kind: Literal["transformers"] = "transformers"
    model: ModelPath = Field(
        description="Hub id or directory of a vision model, such as DINOv2, ViT, CLIP's vision "
        "tower or V-JEPA 2. It lives on the pool of cluster.roles.encoder."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub model; none takes the default branch."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "float32", description="Number format of its weights."
    )

    @property
    def checkpoint(self) -> PretrainedModel:
        """Where its files are."""
        return PretrainedModel(path=self.model, revision=self.revision)


EncoderConfig = Annotated[ProjectionEncoder | VisionEncoder, Field(discriminator="kind")]
