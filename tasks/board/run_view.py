"""What the environment of an episode gave to see, as pictures."""

from __future__ import annotations

import io
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from storage.audit import lineage
from storage.audit.all_curves import Point, committed_points, with_evaluations
from storage.audit.samples import SampleOrigin, Transcript, texts_of, tokenizer_of
from storage.batches.columns import Author
from storage.batches.format import DTYPES
from storage.batches.refs import BatchRef
from storage.evaluations.results import notes_of
from storage.objects.errors import ObjectDamaged, ObjectMissing
from storage.objects.store import Store
from storage.runs.commit_log import head
from storage.runs.live import is_done, read_end, state_of
from storage.runs.run_lease import holder_of
from storage.runs.run_store import RunStore, committer, origin_of, start_of
from tasks.commands.samples import (
    StoredSamples,
    bounds,
    pattern_of,
    samples_of_evaluation,
    samples_of_step,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


OPENING, FRAME = "opening_frame", "frame"  # columns, as engines/episodes/frames.py writes them


Frame = tuple[BatchRef, int]  # one row of one column, and which frame of that row


def frames_of(store: Store, sample: BatchRef, frames: BatchRef | None) -> list[Frame]:
    """The frames of one sample [1] in order; [] for none.

    frames: those of all turns of the step, a row each, where they are kept as rows.
    """
    places = [(sample[[OPENING]], 0)] if OPENING in sample.names else []
    if frames is not None and {"sample_id", "turn", FRAME} <= set(frames.names):
        (number,) = sample.fetch_numpy(store, "sample_id")[0].tolist()
        rows = np.flatnonzero(frames.fetch_numpy(store, "sample_id")[0] == number)
        turns = frames.fetch_numpy(store, "turn")[0][rows]
        places += [(frames[[FRAME]].take([row]), 0) for row in rows[np.argsort(turns)].tolist()]
    elif FRAME in sample.names and sample.column(FRAME).kind == "jagged":
        frame = sample[[FRAME]]  # before each turn, the opening one among them
        places = [(frame, turn) for turn in range(int(frame.lengths(store, FRAME)[0]))]
    return places


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


Values = list[float | None]  # [T], of each response token; None: not a finite number

# Columns with a number for each response token, of samples or of the batch that trained, by name.
NUMBERS = {
    "advantages": "advantage",
    "rollout_logprobs": "log-prob, engine",
    "old_logprobs": "log-prob, trainer",
    "ref_logprobs": "log-prob, reference",
    "teacher_logprobs": "log-prob, teacher",
    "values": "value",
    "returns": "return",
    "token_rewards": "token reward",
    "correction_weights": "correction weight",
    "staleness": "staleness",
}
# Log-prob ratios by name: log-probs of the numerator, and those that are taken from them.
RATIOS = {
    "log-prob ratio trainer / engine": ("old_logprobs", "rollout_logprobs"),
    "log-prob ratio policy / reference": ("old_logprobs", "ref_logprobs"),
    "log-prob ratio engine / reference": ("rollout_logprobs", "ref_logprobs"),
    "log-prob ratio teacher / engine": ("teacher_logprobs", "rollout_logprobs"),
}


def token_texts(words: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text that each token [T] adds; "" where only those after it make a whole character."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(words, token) or "" for token in tokens]


def token_authors(store: Store, sample: BatchRef) -> list[str]:
    """Who wrote each response token [T] of one sample: policy, environment or template."""
    count = int(sample.lengths(store, "response_ids")[0])
    if "author" not in sample.names:
        return ["policy"] * count
    return [
        Author(author).name.lower() for author in sample.fetch_numpy(store, "author")[0].tolist()
    ]


def token_numbers(store: Store, samples: Sequence[BatchRef]) -> dict[str, Values]:
    """Numbers of each response token [T] by what they mean, ratios first.

    samples: the same sample in each batch that has it, [1] each; the last one's column counts.
    """
    columns: dict[str, np.ndarray] = {}
    for sample in samples:
        for name in NUMBERS:
            if name in sample.names and not sample.column(name).shape:
                columns[name] = sample.fetch_numpy(store, name)[0].astype(np.float64)
    ratios = {
        name: columns[above] - columns[below]
        for name, (above, below) in RATIOS.items()
        if above in columns and below in columns and len(columns[above]) == len(columns[below])
    }
    numbers = {NUMBERS[name]: values for name, values in columns.items()}
    return {name: finite(values) for name, values in (ratios | numbers).items()}


def finite(values: np.ndarray) -> Values:
    """Numbers for JSON, which knows no NaN."""
    return [round(value, 6) if np.isfinite(value) else None for value in values.tolist()]


PAGE = 25  # samples, or groups, of a page
PREVIEW = 240  # characters of a text in a list
KNOWN = 8  # steps whose rewards are kept in memory
DRAWS = 40  # samples of a row of the data that are named

Record = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which samples of a step are asked for; the texts are as the command `samples` takes them."""

    of: str  # a step, or SUITE@VERSION
    order: str = "best"  # best, worst or stored
    status: str = ""  # ok, truncated or failed; empty: any
    reward: str = ""  # LOW:HIGH
    search: str = ""  # regular expression
    group: str = ""
    page: int = 0


@dataclass(slots=True)
class RunView:
    """A stored run, as far as it has been looked at. Several threads may ask."""

    files: RunStore
    _points: list[Point] = field(default_factory=list)  # of the committed steps
    _samples: OrderedDict[str, StoredSamples] = field(default_factory=OrderedDict)
    _reads_curves: threading.Lock = field(default_factory=threading.Lock)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of the samples

    def run(self) -> Record:
        """What the run is, and how far it is."""
        files = self.files
        done, end = head(files) or start_of(files), read_end(files)
        finished, running = is_done(files, done), holder_of(files) is not None
        back = None if end is None or not finished else end.rolled_back
        record = files.read_run() or {}
        config = record.get("config")
        origin = origin_of(files)
        return {
            "run": files.run,
            "store": files.store.uri,
            "state": state_of(running, finished, back),
            "running": running,
            "first": start_of(files) + 1,
            "last": done,
            "steps": config.get("steps") if isinstance(config, dict) else None,
            "flow": record.get("flow"),
            "origin": None if origin is None else str(origin),
            "evaluations": sorted({f"{suite}@{v}" for suite, v, _ in notes_of(files).values()}),
        }

    def curves(self, names: Sequence[str]) -> Record:
        """The names of all metrics, and the values of some by step."""
        with self._reads_curves:
            if head(self.files) is not None:
                after = self._points[-1].step if self._points else 0
                self._points += committed_points(self.files, after)
            points = with_evaluations(self.files, self._points)  # which may come any time later
        return {
            "names": sorted({name for point in points for name in point.metrics}),
            "steps": [point.step for point in points],
            "values": {name: [point.metrics.get(name) for point in points] for name in names},
        }

    def samples(self, query: Wanted) -> Record:
        """A page of the samples that are wanted, and in numbers what there is."""
        samples = self._read(query.of)
        rows, matches = _chosen(samples, query)
        page = rows[query.page * PAGE : (query.page + 1) * PAGE]
        return {
            **_facts(samples),
            "chosen": len(rows),
            "matches": None
            if matches is None
            else {"prompts": matches[0], "responses": matches[1]},
            "page": query.page,
            "pages": math.ceil(len(rows) / PAGE),
            "samples": self._listed(samples, page),
        }

    def groups(self, of: str, page: int) -> Record:
        """A page of the groups of a step: the prompt of each, and its samples' rewards."""
        samples = self._read(of)
        groups, first = np.unique(samples.groups, return_index=True)
        groups = groups[np.argsort(first)]  # in the order of the batch
        rows_of_groups = []
        for group in groups[page * PAGE : (page + 1) * PAGE].tolist():
            rows = np.flatnonzero(samples.groups == group)
            rewards = [_reward(samples, row) for row in rows.tolist()]
            scored = [reward for reward in rewards if reward is not None]
            rows_of_groups.append(
                {
                    "group": group,
                    "rows": rows.tolist(),
                    "rewards": rewards,
                    "mean": float(np.mean(scored)) if scored else None,
                    "std": float(np.std(scored)) if scored else None,
                    **self._prompt(samples, int(rows[0])),
                }
            )
        pages = math.ceil(len(groups) / PAGE)
        return {**_facts(samples), "page": page, "pages": pages, "groups": rows_of_groups}

    def sample(self, of: str, row: int) -> Record:
        """All that is known of one sample."""
        samples = self._read(of)
        if not 0 <= row < len(samples.ref):
            raise ValueError(
                f"{samples.name} has samples 0 to {len(samples.ref) - 1}, and no {row}."
            )
        store, ref = samples.files.store, samples.ref.take([row])
        (transcript,) = samples.transcripts([row])
        origin = transcript.origin
        words = tokenizer_of(samples.files, samples.versions)
        ids = ref.fetch_numpy(store, "response_ids")[0].tolist()
        siblings = np.flatnonzero(samples.groups == origin.group).tolist()
        commit = samples.commit
        frames = self._frames(samples, row)
        return {
            "origin": asdict(origin),
            "name": samples.name,
            "row": row,
            "prompt": transcript.prompt,
            "parts": transcript.parts or (("policy", transcript.response),),
            "tokens": token_texts(words, ids),
            "authors": token_authors(store, ref),
            "numbers": token_numbers(store, [ref, *self._trained(samples, origin)]),
            "pictures": len(frames) if _shown(frames) else 0,
            "frames": None if not frames else "{} {}".format(*form_of(frames[0])),
            "data": _data_row(samples, origin),
            "siblings": [
                {"row": sibling, "reward": _reward(samples, sibling)} for sibling in siblings
            ],
            "version_in": None if commit is None else commit.version_in.model_dump(mode="json"),
            "version_out": None if commit is None else commit.version_out.model_dump(mode="json"),
            "objects": sorted(ref.objects),
        }

    def picture(self, of: str, row: int, number: int) -> bytes:
        """A frame that a sample's environment gave, as a PNG. ValueError where there is none."""
        samples = self._read(of)
        frames = self._frames(samples, row) if 0 <= row < len(samples.ref) else []
        if not 0 <= number < len(frames):
            raise ValueError(f"Sample {row} of {samples.name} has {len(frames)} pictures.")
        return png(samples.files.store, frames[number])

    def data_row(self, row: int) -> Record:
        """Every sample of a row of the data, by step: what became of the prompt."""
        origin = lineage.of_prompt(self.files, row, DRAWS)
        return {
            "row": row,
            "samples": [
                {
                    "step": sample.step,
                    "run": sample.run,
                    "sample": sample.sample,
                    "reward": sample.reward,
                    "versions": sorted({span.version for span in sample.spans}),
                    "trained": sample.trained,
                }
                for sample in origin.samples
            ],
            "dropped": origin.dropped,
            "removed": origin.removed,
            "more": origin.more,
        }

    def find(self, of: str, sample: int) -> Record:
        """The row, among a step's samples, of one by its number. ValueError for none."""
        samples = self._read(of)
        rows = np.flatnonzero(samples.column("sample_id") == sample)
        if not len(rows):
            raise ValueError(f"{samples.name} has no sample {sample}.")
        return {"row": int(rows[0])}

    def _read(self, of: str) -> StoredSamples:
        """The samples of a step or an evaluation; what cannot change any more is kept."""
        with self._lock:
            if of in self._samples:
                self._samples.move_to_end(of)
                return self._samples[of]
        if "@" in of:
            samples = samples_of_evaluation(self.files, of)
        elif not of.isdecimal():
            raise ValueError(f"{of!r} names no step and no evaluation, SUITE@VERSION.")
        else:
            owner, step = self.files, int(of)
            if step <= start_of(owner):
                owner, step = committer(owner, step)
            samples = samples_of_step(owner, step)
        if samples.commit is not None or samples.result is not None:
            with self._lock:
                self._samples[of] = samples
                while len(self._samples) > KNOWN:
                    self._samples.popitem(last=False)
        return samples

    def _listed(self, samples: StoredSamples, rows: list[int]) -> list[Record]:
        """Samples of a list. Where some are damaged, they alone are said to be."""
        try:
            transcripts = samples.transcripts(rows)
        except ObjectDamaged as error:
            if len(rows) == 1:
                return [{"row": rows[0], "error": str(error)}]
            return [line for row in rows for line in self._listed(samples, [row])]
        return [_line(row, transcript) for row, transcript in zip(rows, transcripts, strict=True)]

    def _prompt(self, samples: StoredSamples, row: int) -> Record:
        """The prompt of a sample, for a list."""
        try:
            words = tokenizer_of(samples.files, samples.versions)
            prompts, _ = texts_of(samples.files, samples.ref.take([row]), words)
        except (ObjectDamaged, ObjectMissing) as error:
            return {"error": str(error)}
        return {"prompt": prompts[0][:PREVIEW]}

    def _trained(self, samples: StoredSamples, origin: SampleOrigin) -> list[BatchRef]:
        """The sample in the batch that trained, [1], if it is there."""
        batch = None if samples.commit is None else samples.commit.refs.get("batch")
        if batch is None or "sample_id" not in batch.names:
            return []
        ids = batch.fetch_numpy(samples.files.store, "sample_id")[0]
        return [batch.take(np.flatnonzero(ids == origin.sample)[:1])] if origin.trained else []

    def _frames(self, samples: StoredSamples, row: int) -> list[tuple[BatchRef, int]]:
        frames = None if samples.commit is None else samples.commit.refs.get("frames")
        return frames_of(samples.files.store, samples.ref.take([row]), frames)


def _chosen(samples: StoredSamples, query: Wanted) -> tuple[list[int], tuple[int, int] | None]:
    """Rows of the samples that are wanted, in order; how often prompts and answers have a text."""
    here: NDArray[np.bool_] = np.ones(len(samples.ref), bool)
    if query.status:
        here &= samples.with_status(query.status)
    if query.reward:
        here &= samples.with_reward(*bounds(query.reward))
    if query.group:
        here &= samples.groups == int(query.group)
    times = None
    if query.search:
        rows = np.flatnonzero(here).tolist()
        matches = samples.containing(pattern_of(query.search), rows)
        here = np.isin(np.arange(len(here)), matches.rows)
        times = matches.prompts, matches.responses
    rows = np.flatnonzero(here)
    if query.order != "stored":  # those without a reward come last
        worth = np.where(
            samples.failed, -np.inf, samples.rewards * (1 if query.order == "best" else -1)
        )
        rows = rows[np.argsort(-worth[rows], kind="stable")]
    return rows.tolist(), times


def _facts(samples: StoredSamples) -> Record:
    """What there is of a step, in numbers."""
    scored = samples.rewards[~samples.failed]
    return {
        "name": samples.name,
        "count": len(samples.ref),
        "failed": int(samples.failed.sum()) if samples.scored else 0,
        "scored": samples.scored,
        "committed": samples.commit is not None or samples.result is not None,
        "mean": float(scored.mean()) if len(scored) else None,
    }


def _line(row: int, transcript: Transcript) -> Record:
    origin = transcript.origin
    return {
        "row": row,
        "sample": origin.sample,
        "group": origin.group,
        "data_row": origin.prompt_row,
        "reward": origin.reward,
        "advantage": origin.advantage,
        "trained": origin.trained,
        "tokens": origin.tokens,
        "finish": origin.episode_end or origin.finish_reason,
        "versions": sorted({span.version for span in origin.spans}),
        "prompt": transcript.prompt[-PREVIEW:],
        "response": transcript.response[:PREVIEW],
    }


def _reward(samples: StoredSamples, row: int) -> float | None:
    return None if samples.failed[row] else float(samples.rewards[row])


def _shown(frames: Sequence[tuple[BatchRef, int]]) -> bool:
    """Whether frames are pictures."""
    if not frames:
        return False
    name, shape = form_of(frames[0])
    return is_picture(np.dtype(name), tuple(shape))


def _data_row(samples: StoredSamples, origin: SampleOrigin) -> object:
    """The row of the data that a sample answers, where it is stored."""
    if samples.result is not None:
        prompts = samples.result.prompts
        rows = np.flatnonzero(
            prompts.fetch_numpy(samples.files.store, "group_id")[0] == origin.group
        )
        has_rows = "row" in prompts.names and len(rows)
        return (
            prompts.take(rows[:1]).fetch_list(samples.files.store, "row")[0] if has_rows else None
        )
    return None if samples.commit is None else lineage.prompt_of(samples.files, origin)
