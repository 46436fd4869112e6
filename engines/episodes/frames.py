"""What episodes give to see: frames as arrays and as batches, and where in a turn an episode ended.

All frames of a run are of one form, that of the first ones. An episode's first frame, from when its
environment was reset, is a column of its prompt; those of its turns are batches of their own, which
are never written again when a turn follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engines.environments.protocol import Frame, Outcome
from engines.episodes.episode_rows import Episode
from storage.batches.format import DTYPES
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.run_store import DATA_SUFFIX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form: TypeAlias = "tuple[np.dtype, tuple[int, ...]]"  # of a frame: number format, shape

FIRST = "opening_frame"  # column of prompts and samples, [N, *shape]
# Of prompts and samples, where the policy looks: the present frame, [N, *shape]; once the episodes
# are over the frame before each turn, [N, jagged, *shape].
FRAME = "frame"


def check_images(dtype: str, shape: Sequence[int], asks: str, instead: str) -> None:
    """ValueError, one sentence, unless frames of this form are images.

    asks: the setting that takes images; instead: one that takes anything.
    """
    if dtype != "uint8" or len(shape) != 3 or shape[2] != 3:
        raise ValueError(
            f"{asks} takes images, arrays [H, W, 3] of uint8, and the environment's frames are "
            f"{dtype} {list(shape)}. Make it with params.render_mode = rgb_array, or set {instead}."
        )


def array_of(frame: Frame) -> NDArray[np.generic]:
    """A frame as an array."""
    return np.frombuffer(frame["data"], np.dtype(frame["dtype"])).reshape(frame["shape"])


def stack_frames(frames: Sequence[Frame | None]) -> NDArray[np.generic]:
    """Frames of one form, [N, *shape]."""
    return np.stack([array_of(frame) for frame in frames if frame is not None])


def form_of(samples: BatchRef) -> Form | None:
    """The form of the frames of some samples; None where none are kept."""
    if FIRST not in samples.names:
        return None
    column = samples.column(FIRST)
    return np.dtype(DTYPES[column.dtype][1]), column.shape


def check_first_frames(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Resets with their frames: failed where there is none, or one of another form than the first."""
    first = next(
        (outcome.frame for outcome in outcomes if outcome.frame is not None and not outcome.failed),
        None,
    )
    form = None if first is None else (np.dtype(first["dtype"]), tuple(first["shape"]))
    none = "the environment gave no frame when it was reset"
    return [
        replace(outcome, failed=none)
        if outcome.failed is None and outcome.frame is None
        else check_frame(outcome, form)
        for outcome in outcomes
    ]


def check_frame(outcome: Outcome, form: Form | None) -> Outcome:
    """An outcome, failed where its frame is of another form than those before."""
    if outcome.frame is None or outcome.failed is not None or form is None:
        return outcome
    dtype, shape = np.dtype(outcome.frame["dtype"]), tuple(outcome.frame["shape"])
    if (dtype, shape) == form:
        return outcome
    text = (
        f"the environment gave a frame of {dtype} {shape}, and before that of {form[0]} {form[1]}"
    )
    return replace(outcome, failed=text)


def write_frames(store: Store, out_key: str, episodes: Sequence[Episode]) -> BatchRef | None:
    """The frames of the answers that episodes just had, a row for each; None where there are none.

    out_key: of the answers; the frames' own is beside it.
    """
    answered = [episode for episode in episodes if episode.frame is not None]
    if not answered:
        return None
    columns: dict[str, object] = {
        "sample_id": np.array([episode.sample for episode in answered], np.int64),
        "turn": np.array([len(episode.observations) - 1 for episode in answered], np.int64),
        FRAME: stack_frames([episode.frame for episode in answered]),
    }
    return write_batch(store, f"{out_key.removesuffix(DATA_SUFFIX)}-frames{DATA_SUFFIX}", columns)


def present_frames(samples: BatchRef, frames: BatchRef, episodes: Sequence[Episode]) -> BatchRef:
    """The column of the frames that N samples have before them, by reference.

    samples: with those that they had. given: by their last answers, in the order of the `episodes`
    that got one.
    """
    every = BatchRef.concat([samples[[FRAME]], frames[[FRAME]]])
    places = np.arange(len(samples))
    answered = [row for row, episode in enumerate(episodes) if episode.frame is not None]
    places[answered] = len(samples) + np.arange(len(answered))
    return every.take(places)


def frames_by_turn(
    store: Store, prompts: BatchRef, samples: BatchRef, frames: BatchRef | None
) -> BatchRef:
    """The column of the frames before each turn of N episodes, by reference.

    Args:
        store: of the batches; only numbers are read.
        prompts: [P], with the first frames.
        samples: [N], of episodes that are over.
        frames: of the answers, a row for each; None: no turn was answered.
    """
    places = samples.prompts_in(store, prompts).tolist()
    numbers = samples.fetch_numpy(store, "sample_id")[0].tolist()
    turn_ids, offsets = samples.fetch_numpy(store, "turn_ids")
    assert offsets is not None
    ends = offsets[1:].tolist()
    starts = offsets[:-1].tolist()
    turns = [int(turn_ids[b - 1]) + 1 if b > a else 0 for a, b in zip(starts, ends, strict=True)]
    answered: dict[tuple[int, int], int] = {}
    if frames is not None:
        of, turn = (frames.fetch_numpy(store, name)[0].tolist() for name in ("sample_id", "turn"))
        answered = {key: len(prompts) + row for row, key in enumerate(zip(of, turn, strict=True))}
    rows = []
    for place, number, count in zip(places, numbers, turns, strict=True):
        own = [place]
        for before in range(count - 1):
            own.append(answered.get((number, before), own[-1]))
        rows.append(own[:count])
    every = prompts[[FRAME]]
    if frames is not None:
        every = BatchRef.concat([every, frames[[FRAME]]])
    return every.grouped(rows)


def unused_tokens(tokenizer: PreTrainedTokenizerBase | None, turn: Sequence[int], used: int) -> int:
    """How many of a turn's tokens [T] come after its first `used` characters; or tokens, for None.

    The fewest first tokens whose text has so many characters were used, so a token on the border
    was.
    """
    if tokenizer is None:
        return len(turn) - used
    for count in range(len(turn) + 1):
        if len(str(tokenizer.decode(list(turn[:count]), skip_special_tokens=True))) >= used:
            return len(turn) - count
    return 0
