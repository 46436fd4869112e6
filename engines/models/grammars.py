"""Which words may come next in a turn whose text has a grammar, by the library xgrammar.

What a grammar leaves follows from it, the tokenizer and the turn's tokens so far alone.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from configs.environment import pip_install
from storage.batches.columns import Author
from storage.batches.sampling_mask import SamplingMask, Words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from xgrammar import CompiledGrammar, GrammarMatcher

BEGIN, END = "<think>", "</think>"  # of a thought

# Of xgrammar's structural tags.
Format = dict[str, Any]
_THOUGHT = {"content": {"type": "any_text"}, "end": END, "type": "tag"}
_BLANKS = {"type": "regex", "pattern": "[ \\n]{0,4}"}  # that models write after a thought


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnGrammar:
    """What the text of a turn has to be.

    Example: `true` or `false`, after a thought if the model writes one
        TurnGrammar(answer={"type": "json_schema", "json_schema": {"type": "boolean"}}, thought="may")
    """

    answer: Format  # of the text after a thought
    # Whether the turn begins in a thought that its prompt has opened, may begin with one, or not.
    thought: Literal["open", "may", "no"] = "no"
    # Whether the answer is calls of tools; tagged: where it begins with a tag.
    calls: Literal["yes", "tagged", "no"] = "no"

    def to_json(self) -> str:
        """As it is stored."""
        about = {"answer": self.answer, "thought": self.thought, "calls": self.calls}
        return json.dumps(about, ensure_ascii=False)

    @classmethod
    def of_json(cls, text: str) -> TurnGrammar:
        """What `to_json` wrote."""
        return cls(**json.loads(text))

    def structural_tag(self, closed: bool = False) -> str:
        """For xgrammar; closed: of the rest of a turn after the words that end its thought."""
        answer: Format = {"type": "sequence", "elements": [_BLANKS, self.answer]}
        whole = self.answer
        if self.thought == "open":
            whole = {"type": "sequence", "elements": [{**_THOUGHT, "begin": ""}, answer]}
        elif self.thought == "may":
            thinking = {"type": "sequence", "elements": [{**_THOUGHT, "begin": BEGIN}, answer]}
            whole = {"type": "or", "elements": [thinking, self.answer]}
        return json.dumps({"type": "structural_tag", "format": answer if closed else whole})

    def begins(self, text: str) -> int:
        """Where in a turn's text the answer begins; its end where the thought has not ended."""
        if self.thought == "open" or (self.thought == "may" and text.startswith(BEGIN)):
            place = text.find(END)
            return len(text) if place < 0 else place + len(END)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunTurn:
    """A turn with a grammar that goes on."""

    structural_tag: str  # xgrammar's, of the whole turn, or of what follows its thought
    tokens: list[int]  # those that it has, of what the tag is of

    @classmethod
    def of(cls, grammar: TurnGrammar, tokens: Sequence[int], authors: bytes) -> BegunTurn:
        """By the turn's tokens, and the authors of the first ones; the others are the policy's."""
        closed = authors.rfind(Author.BUDGET) + 1  # after the words that ended its thought
        return cls(structural_tag=grammar.structural_tag(closed > 0), tokens=list(tokens[closed:]))


class Progress:
    """How far the tokens of a turn have come in its grammar."""

    def __init__(self, matcher: GrammarMatcher, words: int) -> None:
        self.matcher = matcher
        self.size = words

    def take(self, token: int) -> None:
        """The next token of the turn, one of those that were left."""
        taken = self.matcher.accept_token(token)
        assert taken, f"the grammar did not leave the token {token}"

    def left(self) -> NDArray[np.bool_]:
        """[V] the words that may come next: at the end those that end a turn alone."""
        return self._words_of(self._bits())

    def mask(self, tokens: Sequence[int]) -> SamplingMask:
        """The words that the next tokens of the turn were drawn from, which are taken."""
        words: list[Words | None] = []
        sets: dict[bytes, Words | None] = {}
        for token in tokens:
            bits = self._bits()
            key = blake2b(bits.tobytes()).digest()
            if key not in sets:
                sets[key] = Words.of(self._words_of(bits))
            words.append(sets[key])
            self.take(token)
        return SamplingMask.of(words)

    def _bits(self) -> NDArray[np.int32]:
        import torch

        bits = np.full((1, -(-self.size // 32)), -1, np.int32)
        self.matcher.fill_next_token_bitmask(torch.from_numpy(bits))
        return bits

    def _words_of(self, bits: NDArray[np.int32]) -> NDArray[np.bool_]:
        left = np.unpackbits(bits.view(np.uint8), bitorder="little")[: self.size]
        return left.astype(bool)


class Grammars:
    """Compiles grammars for a tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], words: int | None = None
    ) -> None:
        """ends: tokens that end a turn. words: of the vocabulary, as the model has it; None: as the
        tokenizer has it. ValueError where xgrammar is not installed.

        Special tokens are no text, so a grammar leaves none of them.
        """
        if find_spec("xgrammar") is None:
            raise ValueError(
                "a grammar needs the package xgrammar, which is not installed where engines run: "
                f"{pip_install('xgrammar')}"
            )
        import xgrammar

        self._words = len(tokenizer) if words is None else words
        seen = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=list(ends))
        added = tokenizer.added_tokens_decoder
        vocabulary = [""] * self._words
        for token, number in tokenizer.get_vocab().items():
            if number < self._words and not (number in added and added[number].special):
                vocabulary[number] = token
        info = xgrammar.TokenizerInfo(
            vocabulary,
            seen.vocab_type,
            vocab_size=self._words,
            stop_token_ids=list(ends),
            add_prefix_space=seen.add_prefix_space,
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=2**28)

    def check(self, grammar: TurnGrammar) -> None:
        """ValueError, in a sentence, for one that cannot be compiled."""
        self.compiled(grammar.structural_tag())

    def begin(self, begun: BegunTurn) -> Progress:
        """After what there is of a turn."""
        from xgrammar import GrammarMatcher

        progress = Progress(GrammarMatcher(self.compiled(begun.structural_tag)), self._words)
        for token in begun.tokens:
            progress.take(token)
        return progress

    def compiled(self, structural_tag: str) -> CompiledGrammar:
        """A grammar; ValueError, in a sentence, where it cannot be one."""
        try:
            return self._compiler.compile_structural_tag(structural_tag)
        except RuntimeError as error:
            said = re.sub(r"^\[[\d:]+\] [^ ]+:\d+: ", "", str(error)).strip().rstrip(".: ")
            raise ValueError(f"the schema cannot become a grammar: {said}") from None


@functools.lru_cache(maxsize=256)
def grammar_of(text: str) -> TurnGrammar | None:
    """A stored grammar; None where there is none."""
    return TurnGrammar.of_json(text) if text else None
