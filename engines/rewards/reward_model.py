"""A reward model: a frozen sequence classifier of transformers with one label, its number the score.

Trained on pairs (Bradley and Terry; Ouyang et al. 2022, arXiv:2203.02155, eq. 1) such numbers mean
something only against each other: they have no zero and no unit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from configs.reward_model import RewardModelReward
from engines import models
from engines.processes.user_code import installed
from engines.progress import report
from engines.rewards.protocol import Unscored
from engines.rewards.runner import RewardCode
from storage.objects.digests import Digester

if TYPE_CHECKING:
    import torch

    from engines.rewards.protocol import Prompt

WINDOW_BYTES = 16 * 2**20
WEIGHTS, WORDS = ("*.safetensors",), ("*.json", "*.jinja", "*.model", "*.txt")


class RewardModel:
    """One reward model, on the GPU of this process if it has one."""

    def __init__(self, reward: RewardModelReward, cache: Path) -> None:
        """ValueError where the files hold no such model, or lack a tensor of it."""
        import torch

        try:
            directory = models.prepared(reward.checkpoint, cache)
            check_directory(reward, directory)
            report(f"loading the reward model {reward.label}")
            model = models.load_classifier(directory, reward.dtype)
        except ValueError as error:
            raise ValueError(named(error)) from None
        self._reward = reward
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.to(self._device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self._tokenizer = models.load_tokenizer(directory)
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
        found: list[float | Unscored] = []
        rows: dict[int, list[int]] = {}  # tokens by sample, of those that can be scored
        longest = self._reward.max_length
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            tokens = self.tokens(prompt, completion)
            if 0 < len(tokens) <= longest:
                rows[number] = tokens
            reason = f"{len(tokens)} tokens of the reward model, and max_length = {longest}"
            found.append(Unscored(reason=reason))
        for batch in batches(rows, self._reward.batch_tokens, alone=self._pad is None):
            for number, score in zip(batch, self._forward([rows[n] for n in batch]), strict=True):
                found[number] = (
                    score
                    if math.isfinite(score)
                    else Unscored(reason=f"the reward model gave {score}")
                )
        return found

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


def batches(rows: dict[int, list[int]], batch_tokens: int, alone: bool = False) -> list[list[int]]:
    """Numbers of rows in batches of about one length, of at most so many tokens with padding.

    alone: one row in each. Example: rows of 3, 9 and 4 tokens and 8 tokens make [[0, 2], [1]].
    """
    found: list[list[int]] = []
    for number in sorted(rows, key=lambda number: len(rows[number])):
        # The longest of a batch is its last one.
        full = not found or alone or (len(found[-1]) + 1) * len(rows[number]) > batch_tokens
        if full:
            found.append([number])
        else:
            found[-1].append(number)
    return found


def check_directory(reward: RewardModelReward, directory: Path) -> None:
    """ValueError, one sentence, unless the files are of a classifier with one label."""
    config = json.loads((directory / "config.json").read_text())
    classes = config.get("architectures") or []
    labels = len(config.get("id2label") or (0, 1))  # transformers' default is two
    if not any(name.endswith("ForSequenceClassification") for name in classes) or labels != 1:
        said = f"{', '.join(classes) or 'no class'} with {labels} labels"
        raise ValueError(
            f"The reward {reward.label}: {reward.model} is {said}. Set rewards.functions[].model to "
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
        models.check_model(reward.checkpoint)
        directory = models.present(reward.checkpoint)
    except ValueError as error:
        raise ValueError(named(error)) from None
    if directory is not None:
        check_directory(reward, directory)


def named(error: ValueError) -> str:
    """A sentence about a model's files with the name of the reward model's setting."""
    return str(error).replace("model.path", "rewards.functions[].model")


def digest_of(directory: Path, patterns: Sequence[str]) -> str:
    """Of the names and bytes of a model's files."""
    total = Digester()
    for path in sorted({path for pattern in patterns for path in directory.glob(pattern)}):
        total.update(f"{path.name} {path.stat().st_size}\n".encode())
        with open(path, "rb") as file:
            while window := file.read(WINDOW_BYTES):
                total.update(window)
                report(f"reading {path.name}, {file.tell() // 2**20} MiB")
    return total.digest()
