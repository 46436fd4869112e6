"""A search engine over a corpus of the user's, as a tool: the environment of the recipe `search`."""

from __future__ import annotations

import json
import re
import string
from functools import cache
from typing import Any

from engines.environments.contract import library

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CHARACTERS = 1500  # of a passage, as much as a turn has room for


class Search:
    """An environment whose only tool searches a corpus by BM25.

    Args:
        corpus: a JSONL file, each line a passage with `text`, and a `title` if it has one. It is read
            once by each process of environments.
        passages: how many a search gives.
    """

    def __init__(self, corpus: str, passages: int = 3) -> None:
        self._retriever, self._texts = _index(corpus)
        self._count = min(passages, len(self._texts))

    def reset(self) -> str:
        """The row's question says all."""
        return ""

    def search(self, query: str) -> str:
        """Search the corpus for passages.

        Args:
            query: words that the passages should have.
        """
        words = library("bm25s").tokenize([query], show_progress=False)
        numbers, _ = self._retriever.retrieve(words, k=self._count, show_progress=False)
        found = (self._texts[number] for number in numbers[0])
        return "\n\n".join(f"[{place}] {text}" for place, text in enumerate(found, 1))


@cache
def _index(corpus: str) -> tuple[Any, list[str]]:
    """The index of a corpus (bm25s.BM25) and its passages; ValueError where there is none."""
    bm25s = library("bm25s")
    try:
        with open(corpus, encoding="utf-8") as file:
            passages = [json.loads(line) for line in file if line.strip()]
    except OSError as error:
        raise ValueError(
            f"the corpus {corpus} cannot be read ({error.strerror}). Set "
            "episodes.environment.params.corpus to a JSONL file that every worker sees"
        ) from error
    if not passages or not all("text" in passage for passage in passages):
        raise ValueError(
            f"the corpus {corpus} has no passages, or a line without `text`. Each line has to be a "
            "JSON object with `text`"
        )
    texts = [f"{one.get('title', '')}\n{one['text']}".strip()[:_CHARACTERS] for one in passages]
    retriever = bm25s.BM25()
    retriever.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    return retriever, texts


def exact_match(
    prompts: list[object],
    completions: list[str | list[dict[str, str]]],
    golden_answers: list[list[str]],
    **columns: object,
) -> list[float]:
    """1 where the last <answer> is one of the row's answers but for case, articles and punctuation.

    The measure of SQuAD (arXiv:1606.05250), as in Search-R1 (arXiv:2503.09516).
    """
    scores = []
    for completion, answers in zip(completions, golden_answers, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        found = _ANSWER.findall(text)
        scores.append(float(bool(found) and _plain(found[-1]) in map(_plain, answers)))
    return scores


def _plain(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", text).split())
