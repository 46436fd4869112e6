"""Parts of the tensors in a model directory's safetensors files, and files that are damaged."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engines.models import tensor_files
from engines.models.tensor_files import part_equals, read_part, stored_tensors

VALUES = torch.arange(60, dtype=torch.float32).view(12, 5) / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_part_is_read_in_windows_and_cast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(tensor_files, "WINDOW_BYTES", 24)
    before = torch.ones(3, dtype=torch.int64)
    save_file({"a": before, "b": VALUES.to(dtype)}, tmp_path / "model.safetensors")
    found = stored_tensors(tmp_path)
    assert found is not None and found["b"].shape == (12, 5)
    for first, rows in ((0, 12), (5, 4), (11, 1), (12, 0)):
        into = torch.full((rows, 5), -1.0)
        read_part(found["b"], first * 5, into)
        assert torch.equal(into, VALUES.to(dtype).float()[first : first + rows])
        assert part_equals(found["b"], first * 5, into)
        for place in range(into.numel()):
            other = into.clone()
            other.view(-1)[place] += 1
            assert not part_equals(found["b"], first * 5, other)
    integers = torch.zeros(2, dtype=torch.int64)
    read_part(found["a"], 1, integers)
    assert integers.tolist() == [1, 1]


def test_several_files_are_found_by_their_index(tmp_path: Path) -> None:
    assert stored_tensors(tmp_path) is None
    for name in ("a", "b"):
        save_file({name: VALUES}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = stored_tensors(tmp_path)
    assert found is not None
    assert {name: each.file.name for name, each in found.items()} == index["weight_map"]
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b\.safetensors cannot be read.*Set model\.path to"):
        stored_tensors(tmp_path)


def _cut(good: bytes) -> bytes:
    return good[:-1]


def _cut_in_header(good: bytes) -> bytes:
    return good[:20]


def _no_json(good: bytes) -> bytes:
    return good[:8] + b"x" + good[9:]


def _other_shape(good: bytes) -> bytes:
    return good.replace(b'"shape":[12,5]', b'"shape":[12,6]')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_cut, "it ends within the tensor b"),
        (_cut_in_header, "its header would be"),
        (_no_json, "Expecting value"),
        (_other_shape, "tensor b has 240 bytes, its shape 288"),
    ],
)
def test_a_damaged_file_is_one_sentence(
    tmp_path: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"b": VALUES}, file)
    found = stored_tensors(tmp_path)
    assert found is not None
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=says) as caught:
        stored_tensors(tmp_path)
    assert str(caught.value).startswith(str(file)) and "Set model.path to" in str(caught.value)
    if damage is _cut:  # after its header was looked at
        with pytest.raises(ValueError, match=r"ends within the tensor b\. Set model\.path"):
            read_part(found["b"], 55, torch.zeros(5))
