"""The memory plan of an encoder: what a vision model holds, and what an episode's frames need.

By the model's files, whose weights are not read.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

from configs.encoder import EncoderConfig, VisionEncoder
from engines.encoders.vision import BATCH, MARGIN, VIDEO, preprocessing
from engines.models import checkpoints
from engines.models.tensor_files import stored_tensors
from engines.rollout.memory_plan import BYTES

# What is there at once of a token, in a layer's feed-forward part: the first layer's input, this
# one's, what attention made of it, their sum, and what is normalised of both; then the inner numbers
# before, in and after their activation. Layers that free some of it sooner need up to a third less.
WIDE, INNER = 6, 3
PIXEL = 3 * 4  # bytes: three colours in float32
COPIES = 3.3  # of the images: as they are, scaled, and normalised; and those of 8 bits


def encoder_bytes(config: EncoderConfig) -> dict[str, int]:
    """What an encoder holds, and needs for an episode; {} for a projection, or where no files are."""
    if not isinstance(config, VisionEncoder):
        return {}
    with contextlib.suppress(ValueError):  # which is said where the encoder is checked
        directory = checkpoints.present(config.checkpoint)
        if directory is not None and (numbers := weights_in(directory)):
            size = BYTES[config.dtype]
            passing = frames_bytes(directory, config.frames, size)
            return {"encoder's weights": size * numbers, "encoder's frames": passing}
    return {}


def weights_in(directory: Path) -> int:
    """Numbers of a model's tensors, of CLIP its vision tower's; 0 without safetensors files."""
    fields = json.loads((directory / "config.json").read_text())
    prefix = "vision_model." if fields.get("model_type") == "clip" else ""
    tensors = stored_tensors(directory) or {}
    return sum(
        math.prod(tensor.shape) for name, tensor in tensors.items() if name.startswith(prefix)
    )


def frames_bytes(directory: Path, frames: int, size: int) -> int:
    """For the frames of an episode that go through the model at once, at the widest place.

    That is a layer's feed-forward part beside the images, or these before the model has them, which
    are taken to be as large as they are scaled to.

    Args:
        directory: Of the model's files.
        frames: Of an episode that are looked at.
        size: Bytes of a number of an activation.
    """
    fields = json.loads((directory / "config.json").read_text())
    fields = fields.get("vision_config", fields)
    side = preprocessing(directory)[0]
    width = int(fields["hidden_size"])
    inner = int(fields.get("intermediate_size") or width * fields.get("mlp_ratio", 4))
    video = fields.get("model_type") == VIDEO
    at_once = frames if video else min(frames, BATCH)
    patches = (side // int(fields["patch_size"])) ** 2 + 1  # one for the class
    tokens = patches * at_once // int(fields.get("tubelet_size", 1))
    images = PIXEL * at_once * int(side * (MARGIN if video else 1)) ** 2
    return max(tokens * (WIDE * width + INNER * inner) * size + images, int(COPIES * images))
