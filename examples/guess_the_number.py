"""GuessTheNumber of TextArena: prompts that show two games, and the reward of one that was cut off.

python -m venv games && games/bin/pip install "textarena==0.7.*"
refrain grpo guess_the_number.yaml       # in this folder
refrain grpo guess_the_number.yaml rewards.functions.0.weight=0 \
    rewards.functions.1.path=guess_the_number.py:any_prize     # rewards that say nothing of the game
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

_GAMES = (  # guesses and what the game says of each
    (("[10]", "higher"), ("[15]", "lower"), ("[13]", "")),
    (("[10]", "lower"), ("[5]", "higher"), ("[7]", "")),
)


def rows(size: int = 2000) -> list[dict[str, object]]:
    """Prompts, all alike: what differs is the seed of each row's game, which then says its rules.

    A small model that was only told the rules talks about them; of games that it was shown, it copies
    the form.
    """
    chat = [{"role": "user", "content": "Guess a number from 1 to 20."}]
    for guesses in _GAMES:
        for guess, hint in guesses:
            said = f"[GAME] The target number is {hint}." if hint else "You win. A new game:"
            chat += [{"role": "assistant", "content": guess}, {"role": "user", "content": said}]
    return [{"question": chat} for _ in range(size)]


def no_prize(prompts: list[object], completions: list[str], **columns: object) -> list[float]:
    """0 for everybody, so that an episode that a limit ended, for which the game gives nothing, is
    a lost game and not a failed sample."""
    return [0.0] * len(completions)


_SAID = re.compile(r"\[(-?\d+)\]|^\[GAME\] The target number is (higher|lower)", re.MULTILINE)


def follows_hints(
    prompts: list[object],
    completions: list[list[dict[str, str]]],
    log_metric: Callable[[str, float], None],
    **columns: object,
) -> list[float | None]:
    """The share of guesses after a hint that lie among the numbers which all hints so far have left.

    None for an episode without such a guess. The metric `left_by_hints` is the share of the numbers
    from 1 to 20 that were left: what guesses come to that are drawn at random.
    """
    found: list[float | None] = []
    for completion in completions:
        least, most, guess, follows = 1, 20, None, []
        for number, hint in _SAID.findall(completion[0]["content"]):
            if number:
                guess = int(number)
                if (least, most) != (1, 20):
                    follows.append(least <= guess <= most)
                    log_metric("left_by_hints", (most - least + 1) / 20)
            elif guess is not None and hint == "higher":
                least = max(least, guess + 1)
            elif guess is not None:
                most = min(most, guess - 1)
        found.append(sum(follows) / len(follows) if follows else None)
    return found


def any_prize(
    prompts: list[object], completions: list[object], trainer_state: Any, **columns: object
) -> list[float]:
    """Numbers from 0 to 1, drawn anew in each step: nothing can be learned from them."""
    step = trainer_state.global_step
    return [random.Random(f"{step} {text}").random() for text in completions]
