"""An encoder makes an embedding of an episode's frames: its protocol, and the fixed projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from configs.encoder import FramesSettings, ProjectionEncoder
from storage.objects.documents import digest

Frames = Sequence[NDArray[np.generic]]  # of one form, uint8 or float32
Seen = TypeVar("Seen")  # a frame, or what stands for one


class Encoder(Protocol):
    """Makes embeddings; the same of an episode wherever and beside whatever it is made."""

    dim: int  # D, numbers of an embedding

    def digest(self, frame: NDArray[np.generic]) -> str:
        """Of all that makes the embeddings of such frames: settings, and weights."""

    def embed(self, frames: Frames) -> NDArray[np.float32]:
        """[D], of the frames of one episode that are looked at. ValueError where they are no images
        and it takes images alone.
        """


def looked_at(settings: FramesSettings, frames: Sequence[Seen]) -> Sequence[Seen]:
    """Those of an episode's frames, the first one included, that its embedding is made of.

    Of seven frames and frames = 3: 0, 3, 6 (span whole), or 4, 5, 6 (end).
    """
    if len(frames) <= settings.frames:
        return frames
    if settings.span == "end":
        return frames[-settings.frames :]
    # As siiRL chooses 64 frames; it repeats those of a shorter episode, which a mean does not need.
    return [frames[i] for i in np.linspace(0, len(frames) - 1, settings.frames, dtype=int)]


class Projection:
    """y = mean over frames of W x, with W [D, P] of normal numbers with variance 1 / D.

    Distances between embeddings are about those between the frames (Johnson and Lindenstrauss 1984).
    x: the P numbers of a frame, those of 8 bits as shares of 255.
    """

    def __init__(self, config: ProjectionEncoder) -> None:
        self.dim = config.dim
        self._config = config
        self._matrix: NDArray[np.float32] = np.empty((0, 0), np.float32)
        self._digest = ""

    def digest(self, frame: NDArray[np.generic]) -> str:
        """Of the settings and the matrix."""
        self._matrix_for(frame.size)
        return self._digest

    def embed(self, frames: Frames) -> NDArray[np.float32]:
        """[D] of one episode's frames."""
        matrix = self._matrix_for(frames[0].size)
        mean = np.mean([numbers_of(frame) for frame in frames], axis=0)
        return (matrix @ mean).astype(np.float32)

    def _matrix_for(self, inputs: int) -> NDArray[np.float32]:
        if self._matrix.shape[1] != inputs:
            # RandomState, whose numbers no release of numpy changes.
            normals = np.random.RandomState(self._config.seed).standard_normal((self.dim, inputs))
            self._matrix = (normals / np.sqrt(self.dim)).astype(np.float32)
            settings = self._config.model_dump_json().encode()
            self._digest = digest(settings + self._matrix.tobytes())
        return self._matrix


def numbers_of(frame: NDArray[np.generic]) -> NDArray[np.float64]:
    """[P] the numbers of a frame, those of 8 bits as shares of 255."""
    flat = frame.reshape(-1).astype(np.float64)
    return flat / 255.0 if frame.dtype == np.uint8 else flat
