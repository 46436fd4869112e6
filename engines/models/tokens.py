"""Whether two models have the same tokens: what a teacher and its student must share.

Read from the files of a model directory, without torch and transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.objects.documents import key_of

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTokens:
    """The tokens of a model.

    Of the recipe `tiny`: words {"<pad>": 0, "<bos>": 1, …}, special {"<bos>": 1, "bos_token": 1, …},
    rows 101.
    """

    words: Mapping[str, int]  # every token's id, added ones too
    special: Mapping[
        str, int
    ]  # ids of the special ones among them, and of those with a part to play
    rows: (
        int | None
    )  # of the embedding: ids that the model can read; None: config.json does not say

    @property
    def digest(self) -> str:
        """Names vocabulary and special ids together: 16 hex digits."""
        return key_of(sorted(self.words.items()), sorted(self.special.items()))


def model_tokens(directory: Path) -> ModelTokens | None:
    """The tokens of a model directory; None where it has no tokenizer.json."""
    file = directory / "tokenizer.json"
    if not file.exists():
        return None
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    added = json.loads(file.read_text()).get("added_tokens", [])
    special = {token["content"]: int(token["id"]) for token in added if token.get("special")}
    settings = _read(directory / "tokenizer_config.json")
    for name in NAMED:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text in words:
            special[name] = words[text]
    config = _read(directory / "config.json")
    return ModelTokens(
        words=words,
        special=special,
        rows={**config, **config.get("text_config", {})}.get("vocab_size"),
    )


def check_same_tokens(student: ModelTokens, teacher: ModelTokens, name: str) -> None:
    """ValueError, in one sentence, unless the teacher can score every token of the student."""
    remedy = f"Set teachers.{name} to a model with the student's tokenizer."
    if student.digest != teacher.digest:
        raise ValueError(
            f"The teacher {name} has another tokenizer than the student ({teacher.digest}, and "
            f"{student.digest}): {_difference(student, teacher)}. {remedy}"
        )
    if student.rows is not None and teacher.rows is not None and teacher.rows < student.rows:
        raise ValueError(
            f"The teacher {name} reads {teacher.rows} token ids, and the student can sample "
            f"{student.rows}. {remedy}"
        )


def tokens_of_student(student: Path, teacher: Path, name: str) -> int | None:
    """How many token ids the student of a teacher knows, by the directories of their files.

    Raises ValueError where their tokenizers are not the same, or not there.
    """
    student_tokens, teacher_tokens = model_tokens(student), model_tokens(teacher)
    if student_tokens is None or teacher_tokens is None:
        raise ValueError(
            "A teacher or its student has no tokenizer.json, by which their tokens are compared. "
            "Set teachers and model to checkpoints that have one."
        )
    check_same_tokens(student_tokens, teacher_tokens, name)
    return student_tokens.rows


def _difference(student: ModelTokens, teacher: ModelTokens) -> str:
    """The first token, by id, that is not the same on both sides."""
    pairs = (
        ("the token", student.words, teacher.words),
        ("among special tokens", student.special, teacher.special),
    )
    for kind, student_ids, teacher_ids in pairs:
        sides = {
            word: (teacher_ids.get(word), student_ids.get(word))
            for word in {**student_ids, **teacher_ids}
        }
        odd = {word: ids for word, ids in sides.items() if ids[0] != ids[1]}
        if odd:
            first = min(odd, key=lambda word: min((i, word) for i in odd[word] if i is not None))
            teachers, students = (
                "is none" if number is None else f"has the id {number}" for number in odd[first]
            )
            return f"{kind} {first!r} {teachers} of the teacher's and {students} of the student's"
    raise AssertionError("the digests differ")


def _read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return values
