"""What judges answered, kept so that nothing is asked, and paid, twice.

One small object per answer below RUN/judged/, named by all that was sent and to whom. The text is
kept and not the score, so another scale or pattern finds its answers there. It is a cache: whoever
removes it only pays again. Beside the answers lie the rubrics that were used, by digest.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

from configs.rewards import JudgeReward
from engines.rewards.judge_endpoint import request_body
from engines.rewards.judge_rubric import Rubric
from storage.objects import documents
from storage.objects.documents import JsonValue, canonical
from storage.objects.errors import ObjectMissing, StoreError
from storage.objects.store import Store

log = logging.getLogger(__name__)

FORMAT = "refrain.judged/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAnswers:
    """The stored answers of a run, shared by its workers: the first answer to a question stands."""

    store: Store
    run: str

    def key(self, reward: JudgeReward, rubric: Rubric, text: str, seed: int) -> str:
        """Where an endpoint's answer to a question lies."""
        return self.key_of([reward.url, rubric.digest, request_body(reward, text, seed)])

    def key_of(self, asked: JsonValue) -> str:
        """Where the answer lies to all that was asked, and of whom."""
        name = hashlib.sha256(canonical(asked)).hexdigest()
        return f"{self.run}/judged/{name[:2]}/{name[2:]}.json"

    def read(self, key: str) -> str | None:
        """The answer that is stored; None where there is none that can be read."""
        try:
            return str(documents.read(self.store, key, FORMAT)["answer"])
        except ObjectMissing:
            return None
        except StoreError as error:
            log.warning("A judge's stored answer is of no use, and is asked for again: %s", error)
            return None

    def keep(self, key: str, answer: str) -> str:
        """Store an answer, unless another worker was faster; the one that stands is returned."""
        try:
            if self.store.create(key, documents.encode(FORMAT, {"answer": answer})):
                return answer
            standing = self.read(key)
            if standing is None:  # damaged
                self.store.write(key, documents.encode(FORMAT, {"answer": answer}))
        except StoreError as error:
            log.warning("A judge's answer could not be stored, and may be paid again: %s", error)
            return answer
        return answer if standing is None else standing

    def keep_rubric(self, rubric: Rubric) -> None:
        """Store the text of a rubric, which commits name by its digest."""
        name = rubric.digest.removeprefix("sha256:")
        try:
            self.store.create(f"{self.run}/judged/rubrics/{name}.txt", rubric.text.encode())
        except StoreError as error:
            log.warning("A judge's rubric could not be stored: %s", error)
