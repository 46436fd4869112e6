"""A reward model: a frozen sequence classifier of transformers with one label, its number the score.

Or it reads two answers, and its number says which is better (configs/rewards.py:Pairwise).

Trained on pairs (Bradley and Terry; Ouyang et al. 2022, arXiv:2203.02155, eq. 1) such numbers mean
something only against each other: they have no zero and no unit.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from configs.rewards import LocalJudgeReward, RewardModelReward
from engines.models import checkpoints
from engines.models.tensor_files import WEIGHTS, WORDS, digest_of
from engines.processes.user_code import installed
from engines.rewards.judge_rubric import as_text
from engines.rewards.protocol import Unscored
from engines.rewards.runner import RewardCode
from engines.start_progress import report

if TYPE_CHECKING:
    import torch

    from engines.rewards.protocol import Prompt


class RewardModel:
    """One reward model, on the GPU of this process if it has one."""

    def __init__(self, reward: RewardModelReward, cache: Path) -> None:
        """ValueError where the files hold no such model, or lack a tensor of it."""
        import torch

        try:
            directory = checkpoints.prepared(reward.checkpoint, cache)
            check_directory(reward, directory)
            report(f"loading the reward model {reward.label}")
            model = checkpoints.load_classifier(directory, reward.dtype)
        except ValueError as error:
            raise ValueError(named(error)) from None
        self._reward = reward
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.to(self._device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self._tokenizer = checkpoints.load_tokenizer(directory)
        # Transformers finds a row's last token by it; without one it takes rows alone.
        self._pad: int | None = self._model.config.get_text_config().pad_token_id
        self.code = RewardCode(
            name=reward.label,
            settings=reward.model_dump(mode="json", exclude={"batch_tokens"}),
            source=digest_of(directory, WEIGHTS),
            module=digest_of(directory, WORDS),
            packages=installed(("transformers", "torch")),
        )

    @property
    def held(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for tensor in self._model.parameters())

    def scores(
        self, prompts: Sequence[Prompt], completions: Sequence[str]
    ) -> list[float | Unscored]:
        """The score of each of N samples."""
        return self._numbers([self.tokens(p, c) for p, c in zip(prompts, completions, strict=True)])

    def compared(
        self, prompt: Prompt, completions: Mapping[int, str]
    ) -> dict[int, float | Unscored]:
        """The mean probability of each answer to a prompt that it is better than others.

        completions: answers that can be compared, by number. Both orders of a pair are read, so that
        the place of an answer does not count: P(i > j) = (s(f(i, j)) + 1 - s(f(j, i))) / 2 with the
        logistic function s and the model's number f (Bradley and Terry; pairs in both orders as in
        LLM-Blender, arXiv:2306.02561).
        """
        assert self._reward.pairwise is not None, "the model scores answers alone"
        pairs = paired(list(completions), self._reward.pairwise.opponents)
        both = [(i, j) for pair in pairs for i, j in (pair, pair[::-1])]
        numbers = self._numbers(
            [self._pair(prompt, completions[i], completions[j]) for i, j in both]
        )
        won: dict[int, list[float]] = {number: [] for number in completions}
        reason = "there is no other answer to compare with"
        for (i, j), first, other in zip(pairs, numbers[::2], numbers[1::2], strict=True):
            if isinstance(first, Unscored) or isinstance(other, Unscored):
                reason = (first if isinstance(first, Unscored) else cast("Unscored", other)).reason
                continue
            probability = (_logistic(first) + 1.0 - _logistic(other)) / 2.0
            won[i].append(probability)
            won[j].append(1.0 - probability)
        return {
            number: sum(wins) / len(wins) if wins else Unscored(reason=reason)
            for number, wins in won.items()
        }

    def _pair(self, prompt: Prompt, first: str, second: str) -> list[int]:
        """Two answers to a prompt as the model's tokens."""
        assert self._reward.pairwise is not None
        parts = {"{prompt}": as_text(prompt), "{first}": first, "{second}": second}
        places = re.split(r"(\{prompt\}|\{first\}|\{second\})", self._reward.pairwise.template)
        text = "".join(parts.get(part, part) for part in places)
        if self._reward.template == "plain":
            return cast("list[int]", self._tokenizer(text)["input_ids"])
        chat = [{"role": "user", "content": text}]
        ids = self._tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        return cast("list[int]", ids)

    def _numbers(self, rows: Sequence[list[int]]) -> list[float | Unscored]:
        """The model's number for each of some rows of tokens."""
        numbers: list[float | Unscored] = []
        fits: dict[int, list[int]] = {}
        longest = self._reward.max_length
        for number, tokens in enumerate(rows):
            if 0 < len(tokens) <= longest:
                fits[number] = tokens
            reason = f"{len(tokens)} tokens of the reward model, and max_length = {longest}"
            numbers.append(Unscored(reason=reason))
        for batch in batches(fits, self._reward.batch_tokens, alone=self._pad is None):
            for number, score in zip(batch, self._forward([fits[n] for n in batch]), strict=True):
                numbers[number] = (
                    score
                    if math.isfinite(score)
                    else Unscored(reason=f"the reward model gave {score}")
                )
        return numbers

    def tokens(self, prompt: Prompt, completion: str) -> list[int]:
        """A sample as the model's tokens."""
        if self._reward.template == "plain":
            words = prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt)
            return cast("list[int]", self._tokenizer(words + completion)["input_ids"])
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        chat = [*asked, {"role": "assistant", "content": completion}]
        ids = self._tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        return cast("list[int]", ids)

    def _forward(self, rows: list[list[int]]) -> list[float]:
        import torch

        width = max(map(len, rows))
        pad = 0 if self._pad is None else self._pad
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        with torch.inference_mode():
            logits: torch.Tensor = self._model(
                input_ids=ids.to(self._device), attention_mask=mask.to(self._device)
            ).logits
        return cast("list[float]", logits[:, 0].float().tolist())


def paired(numbers: Sequence[int], opponents: int | None) -> list[tuple[int, int]]:
    """Which of some answers are compared, each pair once.

    opponents: with how many after it each is, in a circle; None: all with all.
    Example: paired([4, 5, 7], None) == [(4, 5), (4, 7), (5, 7)]
    """
    count = len(numbers)
    if opponents is None or 2 * opponents >= count - 1:
        return list(itertools.combinations(numbers, 2))
    return [
        (numbers[place], numbers[(place + distance) % count])
        for place in range(count)
        for distance in range(1, opponents + 1)
    ]


def _logistic(number: float) -> float:
    """1 / (1 + exp(-number)), of any number without overflow."""
    if number >= 0:
        return 1.0 / (1.0 + math.exp(-number))
    return math.exp(number) / (1.0 + math.exp(number))


def batches(rows: dict[int, list[int]], batch_tokens: int, alone: bool = False) -> list[list[int]]:
    """Numbers of rows in batches of about one length, of at most so many tokens with padding.

    alone: one row in each. Example: rows of 3, 9 and 4 tokens and 8 tokens make [[0, 2], [1]].
    """
    groups: list[list[int]] = []
    for number in sorted(rows, key=lambda number: len(rows[number])):
        # The longest of a batch is its last one.
        full = not groups or alone or (len(groups[-1]) + 1) * len(rows[number]) > batch_tokens
        if full:
            groups.append([number])
        else:
            groups[-1].append(number)
    return groups


def check_directory(reward: RewardModelReward, directory: Path) -> None:
    """ValueError, one sentence, unless the files are of a classifier with one label."""
    config = json.loads((directory / "config.json").read_text())
    classes = config.get("architectures") or []
    labels = len(config.get("id2label") or (0, 1))  # transformers' default is two
    if not any(name.endswith("ForSequenceClassification") for name in classes) or labels != 1:
        head = f"{', '.join(classes) or 'no class'} with {labels} labels"
        raise ValueError(
            f"The reward {reward.label}: {reward.model} is {head}. Set rewards.functions[].model to "
            "a checkpoint of a class …ForSequenceClassification with one label, whose number is the "
            "score."
        )
    tokenizer = directory / "tokenizer_config.json"
    stated = json.loads(tokenizer.read_text()) if tokenizer.exists() else {}
    template = "chat_template" in stated or (directory / "chat_template.jinja").exists()
    if reward.template == "chat" and not template:
        raise ValueError(
            f"The reward {reward.label}: the tokenizer of {reward.model} has no chat template. Set "
            "rewards.functions[].template = plain, if the model was trained on plain text."
        )


def check_reward_model(reward: RewardModelReward) -> None:
    """Check before a run what can be: nothing is loaded, a hub model not downloaded. ValueError."""
    try:
        checkpoints.check_model(reward.checkpoint)
        directory = checkpoints.present(reward.checkpoint)
    except ValueError as error:
        raise ValueError(named(error)) from None
    if directory is not None:
        check_directory(reward, directory)


def check_local_judge(reward: LocalJudgeReward) -> None:
    """Check before a run what can be: nothing is loaded, a hub model not downloaded. ValueError."""
    try:
        checkpoints.check_model(reward.checkpoint)
    except ValueError as error:
        raise ValueError(named(error)) from None


def named(error: ValueError) -> str:
    """A sentence about a model's files with the name of the reward model's setting."""
    return str(error).replace("model.path", "rewards.functions[].model")
