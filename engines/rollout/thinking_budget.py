"""A budget of tokens for the thought of a turn (`rollout.thinking`).

A thought that has not ended within its budget is ended: words are put after it that the policy did
not write (`Author.BUDGET`), which no version drew and which do not train, and the policy goes on
after them. So a shard is sampled in two rounds: all turns up to their budget, then to their end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engines.rollout.contract import RolloutRequest, Sampling
from engines.rollout.samples import POLICY, Completion, PromptTokens
from storage.batches.columns import UNFINISHED, WAITING, Author

Sample = Callable[[RolloutRequest, list[Completion]], list[Completion]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """How a shard is sampled whose thoughts have a budget."""

    request: RolloutRequest
    prompts: PromptTokens
    max_model_len: int
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]

    @property
    def _sampling(self) -> Sampling:
        return self.request.sampling

    def sampled(self, begun: Sequence[Completion], sample: Sample) -> list[Completion]:
        """All completions; `sample` draws those that have not ended, as a request says."""
        rows = [self._bounded(row, completion) for row, completion in enumerate(begun)]
        open_rows = {
            row for row, (completion, bound) in enumerate(rows) if bound and not completion.ended
        }
        first = [completion for completion, _ in rows]
        if open_rows:
            budget = replace(self._sampling, max_turn_tokens=self._sampling.thinking_budget)
            # Others wait meanwhile: to an engine they have ended.
            completions = [
                completion
                if row in open_rows or completion.ended
                else replace(completion, finish_reason=WAITING)
                for row, completion in enumerate(first)
            ]
            answers = sample(replace(self.request, sampling=budget), completions)
            first = [
                self._bounded(row, self.going_on(row, completion))[0]
                if row in open_rows
                else first[row]
                for row, completion in enumerate(answers)
            ]
        if all(completion.ended for completion in first):
            return first
        return sample(self.request, first)

    def so_far(self, begun: Sequence[Completion], stands: Sequence[Completion]) -> list[Completion]:
        """Completions in flight as they are to be gone on with, in whichever round they are."""
        return [
            self.going_on(row, replace(completion, finish_reason=UNFINISHED))
            if completion.finish_reason == WAITING and not begun[row].ended
            else self.going_on(row, completion)
            for row, completion in enumerate(stands)
        ]

    def going_on(self, row: int, one: Completion) -> Completion:
        """A completion, unfinished where the budget alone has ended it."""
        if one.finish_reason != "length" or len(one.tokens) >= self._most(row, one):
            return one
        return replace(one, finish_reason=UNFINISHED)

    def _bounded(self, row: int, one: Completion) -> tuple[Completion, bool]:
        """What to go on with, and whether the budget has still to be looked at."""
        turn = one.turn
        if one.ended or Author.BUDGET in one.authors[turn:]:
            return one, False
        if len(one.tokens) - turn < self._sampling.thinking_budget:
            return one, True
        return (self._closed(row, one) if self._thinks(row, one) else one), False

    def _thinks(self, row: int, one: Completion) -> bool:
        start, end, _ = self._sampling.thinking_words
        text = self.decode([*self.prompts.tokens_of(row), *one.tokens])
        return text.rfind(start) > text.rfind(end)

    def _closed(self, row: int, one: Completion) -> Completion:
        """A completion with the words that end its thought."""
        ids = self.encode(self._sampling.thinking_words[2])
        closed = replace(
            one,
            tokens=[*one.tokens, *ids],
            logprobs=[*one.logprobs, *[0.0] * len(ids)],
            authors=one.authors.ljust(len(one.tokens), POLICY) + bytes([Author.BUDGET]) * len(ids),
            finish_reason=UNFINISHED,
        )
        full = len(closed.tokens) >= self._most(row, closed)
        return replace(one, finish_reason="length") if full else closed

    def _most(self, row: int, one: Completion) -> int:
        """The longest that a completion may get."""
        asked = self.prompts.sampling(self.request, row)
        room = self.max_model_len - len(self.prompts.tokens_of(row))
        return min(asked.most(len(one.tokens), one.turn), room)
