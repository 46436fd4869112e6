"""What the memory plan says of an encoder, beside what its model holds and needs."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.encoder import ProjectionEncoder, VisionEncoder
from engines.encoders.memory_plan import encoder_bytes
from engines.encoders.vision import Vision
from tests.engines.encoders.test_encoders import drawn

SIDE, PATCHES = 112, 8  # pixels of an image, patches of its side
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "patch_size": SIDE // PATCHES,
}


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors that torch's operations have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}  # storage -> bytes
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, storage._cdata)
        self.most = max(self.most, sum(self._live.values()))
        return made


def model(kind: str, folder: Path) -> Path:
    """A vision model of random weights that is larger than its images."""
    import transformers

    torch.manual_seed(0)
    picture = {**SIZES, "image_size": SIDE}
    if kind == "dinov2":
        made: Any = transformers.Dinov2Model(transformers.Dinov2Config(**picture))
    elif kind == "clip":  # with the tower of texts, which no encoder loads
        words = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        words |= {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
        seeing = {**picture, "intermediate_size": 4 * 96}
        made = transformers.CLIPModel(
            transformers.CLIPConfig(vision_config=seeing, text_config=words)
        )
    else:
        ahead = {"pred_hidden_size": 24, "pred_num_attention_heads": 2}
        video = {"crop_size": SIDE, "frames_per_clip": 4, "pred_num_hidden_layers": 1}
        made = transformers.VJEPA2Model(transformers.VJEPA2Config(**SIZES, **ahead, **video))
    made.save_pretrained(folder / kind)
    return folder / kind


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dinov2", "clip", "vjepa2"])
def test_weights_are_those_that_are_held_and_frames_are_not_more_than_planned(
    kind: str, dtype: Any, tmp_path: Path
) -> None:
    config = VisionEncoder(model=str(model(kind, tmp_path)), frames=4, dtype=dtype)
    planned = encoder_bytes(config)
    encoder = Vision(config, tmp_path)
    assert planned["encoder's weights"] == encoder.weight_bytes
    with Peak() as peak:
        encoder.embed([np.zeros((SIDE, SIDE, 3), np.uint8)] * 4)
    assert 0.6 * planned["encoder's frames"] < peak.most <= planned["encoder's frames"]


def test_what_is_not_known_is_not_counted(tmp_path: Path) -> None:
    assert encoder_bytes(ProjectionEncoder()) == {}
    assert encoder_bytes(VisionEncoder(model="some/model")) == {}, "not downloaded"
    assert encoder_bytes(VisionEncoder(model=str(tmp_path / "none" / "at" / "all"))) == {}
    directory = drawn("vit", tmp_path)
    (directory / "model.safetensors").unlink()
    assert encoder_bytes(VisionEncoder(model=str(directory))) == {}
