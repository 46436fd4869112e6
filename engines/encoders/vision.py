"""A vision model of transformers as an encoder: DINOv2, ViT, CLIP's vision tower, V-JEPA 2.

An embedding is the mean over frames and over the tokens of the last layer. V-JEPA 2, which is what
siiRL takes, looks at the frames together, as a video; there it is the mean over all of its tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.encoder import NEEDS_IMAGES, VisionEncoder
from engines.encoders.encoder import Frames
from engines.episodes.frames import check_images
from engines.models import checkpoints
from engines.models.tensor_files import WEIGHTS, digest_of
from engines.processes.user_code import installed
from engines.start_progress import report
from storage.objects.documents import key_of

# ImageNet's, with which such models are trained where their files say nothing else.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH = 64  # frames that go through the model at once
VIDEO = "vjepa2"  # the kind of model that looks at a video
MARGIN = 256 / 224  # a video's shorter side over what is cut out of it


class Vision:
    """One vision model, on the GPU of this process if it has one."""

    def __init__(self, config: VisionEncoder, cache: Path) -> None:
        """ValueError where the files hold no such model, or lack a tensor of it."""
        import torch

        try:
            directory = checkpoints.prepared(config.checkpoint, cache)
            check_directory(config, directory)
            report("loading the encoder")
            model = checkpoints.load_vision_model(directory, config.dtype)
        except ValueError as error:
            raise ValueError(named(error)) from None
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model: Any = model.to(self._device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self._frames = config.frames
        self._video = self._model.config.model_type == VIDEO
        self._size, mean, deviation = preprocessing(directory)
        shape = (1, 3, 1, 1)
        self._mean = torch.tensor(mean, device=self._device).reshape(shape)
        self._deviation = torch.tensor(deviation, device=self._device).reshape(shape)
        self.dim = int(self._model.config.hidden_size)
        files = digest_of(directory, (*WEIGHTS, "*.json"))
        packages = installed(("transformers", "torch"))
        self._digest = key_of("vision", config.model_dump(mode="json"), files, packages)

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for tensor in self._model.parameters())

    def digest(self, frame: NDArray[np.generic]) -> str:
        """Of the settings, the model's files and the libraries."""
        return self._digest

    def embed(self, frames: Frames) -> NDArray[np.float32]:
        """[D] of one episode's frames, [H, W, 3] of 8 bits each."""
        import torch

        check_images(str(frames[0].dtype), frames[0].shape, *NEEDS_IMAGES)
        if self._video:
            return self._embed_video(frames)
        total = torch.zeros(self.dim, dtype=torch.float64)
        for start in range(0, len(frames), BATCH):
            some = torch.from_numpy(np.stack(frames[start : start + BATCH])).to(self._device)
            with torch.inference_mode():
                states = self._model(pixel_values=self._pixels(some)).last_hidden_state
            total += states.double().mean(1).sum(0).cpu()
        return (total / len(frames)).float().numpy()

    def _embed_video(self, frames: Frames) -> NDArray[np.float32]:
        """[D]; the frames of a shorter episode are repeated from the first one on, as siiRL does."""
        import torch

        count = len(frames)
        video = torch.from_numpy(np.stack([frames[i % count] for i in range(self._frames)]))
        with torch.inference_mode():
            pixels = self._pixels(video.to(self._device))[None]
            states = self._model(pixel_values_videos=pixels, skip_predictor=True).last_hidden_state
        embedding: NDArray[np.float32] = states.double().mean(1)[0].float().cpu().numpy()
        return embedding

    def _pixels(self, images: Any) -> Any:
        """Images [F, H, W, 3] as the model takes them: [F, 3, size, size], normalised.

        The shorter side is scaled to the size (a video's to a bit more), and the middle is cut out.
        """
        import torch

        planes = images.permute(0, 3, 1, 2).float() / 255.0
        height, width = planes.shape[2:]
        scale = int(self._size * (MARGIN if self._video else 1)) / min(height, width)
        shape = [max(self._size, round(side * scale)) for side in (height, width)]
        planes = torch.nn.functional.interpolate(
            planes, shape, mode="bilinear", align_corners=False, antialias=True
        )
        top, side_margin = ((side - self._size) // 2 for side in shape)
        cut = planes[:, :, top : top + self._size, side_margin : side_margin + self._size]
        return ((cut - self._mean) / self._deviation).to(self._model.dtype)


def preprocessing(directory: Path) -> tuple[int, list[float], list[float]]:
    """Pixels of a side, and mean and deviation of each colour, as a model's files say."""
    config = json.loads((directory / "config.json").read_text())
    config = config.get("vision_config", config)
    size = config.get("image_size", config.get("crop_size", 224))
    file = directory / "preprocessor_config.json"
    fields = json.loads(file.read_text()) if file.exists() else {}
    return (
        int(size if isinstance(size, int) else size[0]),
        list(fields.get("image_mean", MEAN)),
        list(fields.get("image_std", DEVIATION)),
    )


def check_directory(config: VisionEncoder, directory: Path) -> None:
    """ValueError, one sentence, unless the files are of a model of images."""
    fields = json.loads((directory / "config.json").read_text())
    if "patch_size" not in fields and "vision_config" not in fields:
        kind = fields.get("model_type", "of no kind")
        raise ValueError(
            f"encoder.model = {config.model} is a model of the kind {kind}, which takes no images. "
            "Set encoder.model to one of patches: DINOv2, ViT, CLIP's vision tower, V-JEPA 2."
        )
    tubelet = fields.get("tubelet_size", 1)
    if fields.get("model_type") == VIDEO and config.frames % tubelet:
        raise ValueError(
            f"encoder.frames = {config.frames}, and {config.model} looks at {tubelet} frames at "
            f"once. Set encoder.frames to a multiple of {tubelet}; 64 is what it was trained with."
        )


def check_encoder(config: VisionEncoder) -> str:
    """Check before a run what can be: nothing is loaded, a hub model not downloaded. ValueError."""
    try:
        checkpoints.check_model(config.checkpoint)
        directory = checkpoints.present(config.checkpoint)
    except ValueError as error:
        raise ValueError(named(error)) from None
    if directory is None:
        return f"{config.model}, from the model hub"
    check_directory(config, directory)
    return config.model


def named(error: ValueError) -> str:
    """A sentence about a model's files with the name of the encoder's setting."""
    return str(error).replace("model.path", "encoder.model")
