"""What the environment of an episode gave to see, as pictures."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray

from storage.batches.format import DTYPES
from storage.batches.refs import BatchRef
from storage.objects.store import Store

OPENING, FRAME = "opening_frame", "frame"  # columns, as engines/data/frames.py writes them


Frame = tuple[BatchRef, int]  # one row of one column, and which frame of that row


def frames_of(store: Store, sample: BatchRef, frames: BatchRef | None) -> list[Frame]:
    """The frames of one sample [1] in order; [] for none.

    frames: those of all turns of the step, a row each, where they are kept as rows.
    """
    found = [(sample[[OPENING]], 0)] if OPENING in sample.names else []
    if frames is not None and {"sample_id", "turn", FRAME} <= set(frames.names):
        (number,) = sample.fetch_numpy(store, "sample_id")[0].tolist()
        rows = np.flatnonzero(frames.fetch_numpy(store, "sample_id")[0] == number)
        turns = frames.fetch_numpy(store, "turn")[0][rows]
        found += [(frames[[FRAME]].take([row]), 0) for row in rows[np.argsort(turns)].tolist()]
    elif FRAME in sample.names and sample.column(FRAME).kind == "jagged":
        seen = sample[[FRAME]]  # before each turn, the opening one among them
        found = [(seen, turn) for turn in range(int(seen.lengths(store, FRAME)[0]))]
    return found


def form_of(frame: Frame) -> tuple[str, list[int]]:
    """Number format and shape of a frame."""
    (column,) = frame[0].columns.values()
    return np.dtype(DTYPES[column.dtype][1]).name, list(column.shape)


def png(store: Store, frame: Frame) -> bytes:
    """A frame as a PNG. ValueError where it is no picture."""
    from PIL import Image

    ref, place = frame
    (name,) = ref.names
    array = ref.fetch_numpy(store, name)[0][place]
    if not is_picture(array.dtype, array.shape):
        raise ValueError(f"The frame is {array.dtype} {list(array.shape)}, which is no picture.")
    data = io.BytesIO()
    Image.fromarray(as_bytes(array)).save(data, "PNG")
    return data.getvalue()


def is_picture(dtype: np.dtype, shape: tuple[int, ...]) -> bool:
    """Whether a frame of this form can be shown: [H, W] or [H, W, 1, 3 or 4] of bytes or floats."""
    of_colours = len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))
    return of_colours and (dtype == np.uint8 or np.issubdtype(dtype, np.floating))


def as_bytes(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    """A picture [H, W] or [H, W, C] with numbers from 0 to 255; floats are from 0 to 1."""
    numbers = array.astype(np.float64)
    if array.dtype != np.uint8:
        numbers = np.clip(np.nan_to_num(numbers), 0, 1) * 255
    picture = numbers.astype(np.uint8)
    return picture[..., 0] if picture.ndim == 3 and picture.shape[2] == 1 else picture
