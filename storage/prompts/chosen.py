"""Rows of another source that are chosen by their values, or made into multiple-choice questions."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from string import ascii_uppercase

from configs.data import FileSource, HubSource, MultipleChoice
from storage.objects.documents import Row, digest_lines, key_of
from storage.prompts.source import PromptSource, missing_column

READ_ROWS = 512  # at once, while rows are chosen
ANSWER = "answer"  # column with the letter of the right answer


class ChosenRows(PromptSource):
    """The rows of `of` that `where` names, as questions with letters if `choices` are given."""

    def __init__(self, of: PromptSource, config: FileSource | HubSource) -> None:
        self._of, self._choices = of, config.choices
        self.name = of.name
        settings = config.model_dump(mode="json", include={"where", "choices"})
        self.digest = f"chosen-{digest_lines([of.digest, settings])}"
        for column in [*config.where, *self._read_columns()]:
            if not of.has_column(column):
                raise missing_column("Row 0", of.name, column, of.columns)
        self._numbers = self._chosen(config.where) if config.where else None
        if not len(self):
            raise ValueError(
                f"No row of {of.name} has the values of source.where = {config.where}. Set others."
            )
        made = () if self._choices is None else (self._choices.question, ANSWER)
        self.columns = tuple(dict.fromkeys([*of.columns, *made]))

    def _read_columns(self) -> tuple[str, ...]:
        choices = self._choices
        return () if choices is None else (choices.question, choices.right, *choices.wrong)

    def _chosen(self, where: dict[str, str | int | float | bool]) -> list[int]:
        found = []
        for start in range(0, len(self._of), READ_ROWS):
            numbers = range(start, min(start + READ_ROWS, len(self._of)))
            for number, row in zip(numbers, self._of.rows(numbers), strict=True):
                if all(row.get(name) == value for name, value in where.items()):
                    found.append(number)
        return found

    def __len__(self) -> int:
        return len(self._of) if self._numbers is None else len(self._numbers)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        self._in_range(indices)
        numbers = indices if self._numbers is None else [self._numbers[i] for i in indices]
        rows = self._of.rows(numbers)
        return rows if self._choices is None else [lettered(row, self._choices) for row in rows]

    def has_column(self, name: str) -> bool:
        return name in self.columns or self._of.has_column(name)

    def check_columns(self, needed: Iterable[str]) -> None:
        filled = tuple(needed)
        made = () if self._choices is None else (self._choices.question, ANSWER)
        for column in filled:
            if not self.has_column(column):
                raise missing_column("Row 0", self.name, column, self.columns)
        # Rows that are left out may have no value in them.
        if self._numbers is None:
            self._of.check_columns([*self._read_columns(), *(c for c in filled if c not in made)])


def lettered(row: Row, choices: MultipleChoice) -> Row:
    """A row whose question has the answers after it, each with a letter, and `answer` the right one.

    The order is drawn from the row's own content, so it is the same wherever the row stands.
    """
    texts = [str(row[name]).strip() for name in (choices.right, *choices.wrong)]
    order = list(range(len(texts)))
    random.Random(key_of(str(row[choices.question]), texts)).shuffle(order)
    lines = [f"{letter}. {texts[i]}" for letter, i in zip(ascii_uppercase, order, strict=False)]
    asked = "\n".join([str(row[choices.question]).strip(), "", *lines])
    return {**row, choices.question: asked, ANSWER: ascii_uppercase[order.index(0)]}
