"""What a judge is asked about a sample, and the score that its answer gives."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engines.rewards.protocol import Prompt
    from storage.objects.documents import Row

_PLACE = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
_GIVEN = ("prompt", "completion")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """A text with places for a sample: {prompt}, {completion}, and {column} for a column of its row.

    Braces around anything but a name stay, so an example in JSON may stand in it; {{name}} is the
    text {name}.
    """

    text: str

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that rows need."""
        named = (place[2] for place in _PLACE.finditer(self.text) if place[2])
        return tuple(dict.fromkeys(name for name in named if name not in _GIVEN))

    @property
    def digest(self) -> str:
        """sha256 of the text."""
        return f"sha256:{hashlib.sha256(self.text.encode()).hexdigest()}"

    def filled(self, prompt: Prompt, completion: str, row: Row) -> str:
        """The text about a sample. What is put in is never looked at for places.

        ValueError where the row has no value for a place.
        """
        values: Mapping[str, object] = {**row, "prompt": as_text(prompt), "completion": completion}

        def put(place: re.Match[str]) -> str:
            if place[1]:
                return f"{{{place[1]}}}"
            value = values.get(place[2])
            if value is None:
                raise ValueError(f"the row has no value in the column {place[2]} of the rubric")
            return str(value)

        return _PLACE.sub(put, self.text)


def read_rubric(path: str) -> Rubric:
    """The rubric in a file; ValueError, one sentence, where there is none or it asks nothing."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(
            f"The rubric {path} cannot be read on {os.uname().nodename}: {reason}. Set "
            "rewards.functions[].rubric to a text file that every machine that scores has under the "
            "same path."
        ) from None
    if not any(place[2] == "completion" for place in _PLACE.finditer(text)):
        raise ValueError(
            f"The rubric {path} has no {{completion}}, so the judge would not see what it scores. "
            "Put {completion} where the answer is to stand."
        )
    return Rubric(text=text)


def as_text(prompt: Prompt) -> str:
    """A prompt for a judge: its text; of several messages each with its role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def score_of(answer: str, pattern: str, scale: tuple[float, float]) -> float | None:
    """The last score that an answer gives, in [0, 1]; None where it gives none, or one off the scale.

    Example: "Fair. Score: 7" on the scale [0, 10] is 0.7, and "Score: 11" is None.
    """
    low, high = scale
    last = None
    for match in re.finditer(pattern, answer):
        last = match
    try:
        score = math.nan if last is None else float(last[1])
    except (TypeError, ValueError):  # the group took no part, or is no number
        return None
    return (score - low) / (high - low) if low <= score <= high else None
