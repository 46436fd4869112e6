"""Embeddings of what episodes saw: the projection, vision models of random weights, the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.encoder import ProjectionEncoder, VisionEncoder
from engines.encoders import embedding
from engines.encoders.embedding import EncoderEngine, EncoderSpec, make_encoder
from engines.encoders.encoder import Projection, looked_at
from engines.encoders.vision import check_encoder
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def drawn(kind: str, folder: Path) -> Path:
    """A vision model of random weights, saved as a checkpoint."""
    import torch
    import transformers

    torch.manual_seed(0)
    made: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "vit": (transformers.ViTConfig, transformers.ViTModel, {"intermediate_size": 64}),
        "vit-classes": (
            transformers.ViTConfig,
            transformers.ViTForImageClassification,
            {"intermediate_size": 64},
        ),
        "dinov2": (transformers.Dinov2Config, transformers.Dinov2Model, {}),
        "clip": (
            transformers.CLIPVisionConfig,
            transformers.CLIPVisionModel,
            {"intermediate_size": 64},
        ),
    }
    config, model, more = made[kind]
    model(config(**SMALL, **more)).save_pretrained(folder / kind)
    return folder / kind


def images(count: int, size: tuple[int, int] = (20, 24)) -> list[np.ndarray]:
    random = np.random.RandomState(1)
    return [random.randint(0, 256, (*size, 3)).astype(np.uint8) for _ in range(count)]


def test_which_frames_are_looked_at() -> None:
    seven = [np.array(i) for i in range(7)]

    def places(count: int, span: Any) -> list[int]:
        return [int(one) for one in looked_at(ProjectionEncoder(frames=count, span=span), seven)]

    assert places(3, "end") == [4, 5, 6]
    assert places(3, "whole") == [0, 3, 6]
    assert places(1, "end") == [6]
    assert places(9, "whole") == places(9, "end") == list(range(7))


def test_the_projection_keeps_distances_and_is_the_same_everywhere() -> None:
    config = ProjectionEncoder(dim=512, seed=3)
    one, other = Projection(config), Projection(config)
    near, far = np.zeros((8, 8), np.float32), np.zeros((8, 8), np.float32)
    near[0, 0], far[0, :] = 1, 2
    zero = one.embed([np.zeros((8, 8), np.float32)])
    assert np.linalg.norm(one.embed([near]) - zero) == pytest.approx(1.0, rel=0.2)
    assert np.linalg.norm(one.embed([far]) - zero) == pytest.approx(32**0.5, rel=0.2)
    assert one.embed([near]).tobytes() == other.embed([near]).tobytes()
    np.testing.assert_allclose(
        one.embed([near, far]), (one.embed([near]) + one.embed([far])) / 2, atol=1e-6
    )
    assert one.digest(near) == other.digest(near)
    assert Projection(ProjectionEncoder(dim=512, seed=4)).digest(near) != one.digest(near)


def test_images_count_as_shares_of_255() -> None:
    encoder = Projection(ProjectionEncoder())
    image = np.full((4, 4, 3), 51, np.uint8)
    as_numbers = np.full((4, 4, 3), 0.2, np.float32)
    np.testing.assert_allclose(encoder.embed([image]), encoder.embed([as_numbers]), atol=1e-6)


@pytest.mark.parametrize("kind", ["vit", "vit-classes", "dinov2", "clip"])
def test_vision_models_of_transformers(kind: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel, CLIPVisionModel

    directory = drawn(kind, tmp_path)
    config = VisionEncoder(model=str(directory), frames=4)
    assert check_encoder(config) == str(directory)
    encoder = make_encoder(config, tmp_path)
    seen = images(3)
    found = encoder.embed(seen)
    assert found.shape == (encoder.dim,) == (32,) and np.isfinite(found).all()
    again = make_encoder(config, tmp_path)
    assert again.digest(seen[0]) == encoder.digest(seen[0])
    assert again.embed(seen).tobytes() == found.tobytes()
    alone = [encoder.embed([one]) for one in seen]
    np.testing.assert_allclose(found, np.mean(alone, axis=0), atol=1e-5)
    whole = AutoModel if kind != "clip" else CLIPVisionModel
    model = whole.from_pretrained(directory).eval()
    square = images(1, (16, 16))
    pixels = torch.from_numpy(square[0]).permute(2, 0, 1)[None].float() / 255
    mean, deviation = (
        torch.tensor(numbers)[None, :, None, None]
        for numbers in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    with torch.no_grad():
        wanted = model(pixel_values=(pixels - mean) / deviation).last_hidden_state.mean(1)[0]
    np.testing.assert_allclose(encoder.embed(square), wanted.numpy(), atol=1e-5)
    with pytest.raises(ValueError, match=r"takes images, arrays \[H, W, 3\] of uint8"):
        encoder.embed([np.zeros((4, 4), np.float32)])


def test_a_video_model_looks_at_all_frames_at_once(tmp_path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {name: SMALL[name] for name in SMALL if name != "image_size"}
    predictor = {"pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}
    config = transformers.VJEPA2Config(crop_size=16, frames_per_clip=4, **sizes, **predictor)
    model = transformers.VJEPA2Model(config).eval()
    model.save_pretrained(tmp_path / "vjepa2")
    settings = VisionEncoder(model=str(tmp_path / "vjepa2"), frames=4, span="whole")
    check_encoder(settings)
    encoder = make_encoder(settings, tmp_path)
    three = images(3, (18, 18))  # the size with its margin: nothing is scaled, one pixel cut off
    found = encoder.embed(three)
    video = np.stack([*three, three[0]])[:, 1:17, 1:17]
    pixels = torch.from_numpy(video).permute(0, 3, 1, 2).float() / 255
    mean, deviation = (
        torch.tensor(numbers)[None, :, None, None]
        for numbers in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    with torch.no_grad():
        wanted = model(((pixels - mean) / deviation)[None]).last_hidden_state.mean(1)[0]
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)
    assert not np.allclose(found, encoder.embed(three[::-1]), atol=1e-4), "their order counts"
    with pytest.raises(ValueError, match="Set encoder.frames to a multiple of 2"):
        check_encoder(settings.model_copy(update={"frames": 3}))


def test_what_is_no_vision_model_is_refused(tmp_path: Path) -> None:
    import transformers

    with pytest.raises(ValueError, match=r"encoder.model = .*: no such file or directory"):
        check_encoder(VisionEncoder(model=str(tmp_path / "none" / "at" / "all")))
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=9,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="of the kind llama, which takes no images"):
        check_encoder(VisionEncoder(model=str(tmp_path / "llama")))


def episodes(store: Store, status: list[int]) -> tuple[BatchRef, BatchRef]:
    """Three episodes, of which the first has two turns, and the last none."""
    samples = write_batch(
        store,
        "samples.safetensors",
        {
            "sample_id": np.array([5, 6, 7]),
            "status": np.array(status, np.int64),
            "opening_frame": np.zeros((3, 2), np.float32),
        },
    )
    parts = [
        write_batch(
            store,
            f"{turn}.safetensors",
            {
                "sample_id": np.array(ids),
                "turn": np.full(len(ids), turn),
                "frame": np.array([[number + 10 * turn, 1.0] for number in ids], np.float32),
            },
        )
        for turn, ids in ((1, [5]), (0, [6, 5]))  # turns in any order
    ]
    return samples, BatchRef.concat(parts)


def engine(tmp_path: Path, **settings: Any) -> EncoderEngine:
    return EncoderEngine(
        EncoderSpec(
            encoder=ProjectionEncoder(dim=8, **settings),
            model_cache=str(tmp_path),
            store_uri=f"file://{tmp_path}/store",
            store_options={},
        )
    )


def test_an_embedding_is_of_the_frames_that_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(f"file://{tmp_path}/store")
    samples, frames = episodes(store, [0, 1, 0])
    made = engine(tmp_path).embed(samples, frames, "embeddings.safetensors")
    found = made.fetch_numpy(store, "embedding")[0]
    encoder = Projection(ProjectionEncoder(dim=8))
    last = [[15.0, 1.0], [6.0, 1.0], [0.0, 0.0]]
    for row, frame in zip(found, last, strict=True):
        np.testing.assert_array_equal(row, encoder.embed([np.array(frame, np.float32)]))
    assert set(made.fetch_list(store, "encoder")) == {encoder.digest(np.zeros(2, np.float32))}
    assert made.fetch_list(store, "embedding_error") == ["", "", ""]
    whole = engine(tmp_path, frames=9).embed(samples, frames, "whole.safetensors")
    every = [[[0, 0], [5, 1], [15, 1]], [[0, 0], [6, 1]], [[0, 0]]]
    for row, of in zip(whole.fetch_numpy(store, "embedding")[0], every, strict=True):
        np.testing.assert_array_equal(row, encoder.embed([np.array(one, np.float32) for one in of]))
    monkeypatch.setattr(embedding, "CHUNK_BYTES", 17)  # two frames
    apart = engine(tmp_path, frames=9).embed(samples, frames, "apart.safetensors")
    np.testing.assert_array_equal(
        apart.fetch_numpy(store, "embedding")[0], whole.fetch_numpy(store, "embedding")[0]
    )
    none = engine(tmp_path).embed(samples, None, "none.safetensors")
    assert np.isfinite(none.fetch_numpy(store, "embedding")[0]).all(), "of the first frames"


def test_a_failed_episode_and_numbers_that_are_none_have_no_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(f"file://{tmp_path}/store")
    samples, frames = episodes(store, [SampleStatus.FAILED, 0, 0])
    plain = Projection.embed

    def embed(self: Projection, seen: Any) -> Any:
        return plain(self, seen) * (np.nan if seen[-1][0] == 6 else 1.0)

    monkeypatch.setattr(Projection, "embed", embed)
    made = engine(tmp_path).embed(samples, frames, "embeddings.safetensors")
    known = np.isfinite(made.fetch_numpy(store, "embedding")[0]).all(1)
    assert known.tolist() == [False, False, True]
    assert made.fetch_list(store, "embedding_error") == [
        "the episode had failed",
        "the encoder gave an embedding that is not finite",
        "",
    ]
