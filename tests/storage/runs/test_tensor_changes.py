"""A tensor's difference from another one: exact, small where little changed, refused where damaged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.objects.errors import ObjectDamaged
from storage.runs import tensor_changes
from storage.runs.tensor_changes import decode, encode


def changed(old: np.ndarray, share: float, seed: int) -> np.ndarray:
    """`old` [N] uint16 with a share of its elements one step further, as an update leaves them."""
    random = np.random.default_rng(seed)
    return np.where(random.random(len(old)) < share, old + 1, old).astype(old.dtype)


@given(
    elements=st.integers(0, 700),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    block=st.sampled_from([1, 64, 10_000]),
    seed=st.integers(0, 99),
)
def test_any_difference_is_exact(
    elements: int, itemsize: int, share: float, block: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, elements * itemsize, np.uint8)
    at = np.repeat(random.random(elements) < share, itemsize)
    new = np.where(at, random.integers(0, 256, len(old), np.uint8), old)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_changes, "BLOCK", block)
        data = memoryview(b"".join(encode(new, old, itemsize)))
        kept = old.copy()
        assert np.array_equal(decode(data, old, itemsize), new)
    assert np.array_equal(old, kept)
    assert (len(data) == 0) == np.array_equal(old, new)


def test_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    old = np.zeros(300_000, np.uint16)
    new = old.copy()
    new[[0, 70_000, 299_999]] = 7, 8, 9
    data = b"".join(encode(new.view(np.uint8), old.view(np.uint8), 2))
    assert np.array_equal(decode(memoryview(data), old.view(np.uint8), 2).view(np.uint16), new)


def test_two_percent_take_under_two_percent() -> None:
    old = np.random.default_rng(1).normal(0, 0.02, 2**20).astype(np.float32).view(np.uint32)
    old = (old >> 16).astype(np.uint16)
    new = changed(old, 0.02, 2)
    size = len(b"".join(encode(new.view(np.uint8), old.view(np.uint8), 2)))
    assert size < 0.015 * old.nbytes


def test_damage_is_refused() -> None:
    old = np.arange(4000, dtype=np.uint16)
    data = b"".join(encode(changed(old, 0.1, 3).view(np.uint8), old.view(np.uint8), 2))
    for broken in (data[:-1], data[:40], b"\xff" * len(data)):
        with pytest.raises(ObjectDamaged):
            decode(memoryview(broken), old.view(np.uint8), 2)
    with pytest.raises(ObjectDamaged, match="past the tensor's end"):
        decode(memoryview(data), old[:20].view(np.uint8), 2)
