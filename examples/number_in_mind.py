"""A game of four turns with a thinking model: it thinks of a number, and says at the end which.

The number stands in the first turn's thought and nowhere else. The chat template removes the thoughts
of earlier turns, as Qwen3's does:

    python number_in_mind.py model    # first the model, in seconds
    refrain grpo number_in_mind.yaml

The policy plays it in two ways in each step: its thoughts stay in what it reads, or they are removed.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

NUMBERS = "0123"
ASKED = ("think", "wait", "wait", "say")  # before each turn
WORDS = ("user", "assistant", "ok", "think", "wait", "say", "keep", "name", "\n", *NUMBERS)
TEMPLATE = """\
{%- set turns = namespace(asked=0) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set turns.asked = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set content = message.content -%}
  {%- if message.role == 'assistant' and loop.index0 < turns.asked -%}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
  {%- endif -%}
  {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


class NumberInMind:
    """Asks for a number in mind, for two more turns, and then which number it was.

    The first turn is `<think>N</think>ok`, the next two are any thought and `ok`, the last one is any
    thought and a number; all else ends the episode. So what is said before the last turn, besides
    thoughts, is always the same.
    """

    def reset(self, **row: object) -> str:
        """Begin."""
        self._turns = 0
        self._first = ""
        self._right = False
        self.done = False
        return ""

    def step(self, text: str) -> str:
        """Read a turn, and say what is asked before the next."""
        thought = rf"[{NUMBERS}]" if self._turns == 0 else "[^<]*"
        self._turns += 1
        last = self._turns == len(ASKED)
        said = f"[{NUMBERS}]" if last else "ok"
        turn = re.fullmatch(rf"<think>({thought})</think>({said})", text)
        self.done = last or turn is None
        if turn is not None:
            self._first = self._first or turn[1]
            self._right = last and turn[2] == self._first
        return "" if self.done else ASKED[self._turns]

    def get_reward(self) -> float:
        """1 for the number that it thought of first; 0 for another, or where none came."""
        return float(self._right)


def recall(
    completions: list[str], episode_reward: list[float], task: list[str], **columns: object
) -> list[float]:
    """A right number earns the more, the fewer episodes of its task thought of it: a quarter each.

    So a task's mean is that over the four numbers of the share of the episodes with it in mind that
    said it. Who always thinks of the same one has a quarter, and so, in the mean, has who does not
    remember, whatever it thinks of and says: what is said does not depend on the number then, and
    each number that is said earns a quarter.
    """
    thoughts = [re.search(rf"[{NUMBERS}]", text) for text in completions]
    numbers = ["" if thought is None else thought[0] for thought in thoughts]
    episodes, alike = Counter(task), Counter(zip(task, numbers, strict=True))
    return [
        right * episodes[name] / (len(NUMBERS) * alike[name, number])
        for right, name, number in zip(episode_reward, task, numbers, strict=True)
    ]


def rows(size: int = 64) -> list[dict[str, str]]:
    """Prompts, all alike."""
    return [{"question": ASKED[0]} for _ in range(size)]


def write_model(folder: Path, steps: int = 80, seed: int = 0) -> None:
    """A Llama of two layers that knows how turns look, and can name a number that it was told.

    What it was shown: conversations in which a user tells a number and asks for it; and the game,
    with the thoughts of earlier turns and without, where the number at the end has nothing to do with
    the one in mind.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.1,  # narrow: from the default, 0.02, it repeated nothing in 120 steps
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        texts = [*(told(draw) for _ in range(12)), *(game(draw, True) for _ in range(8))]
        texts += [game(draw, False, turns=2 + number % 3) for number in range(8)]
        ids, labels = padded(tokenizer, texts)
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


Text = list[tuple[str, bool]]  # a conversation in pieces, and of each whether it is to be learned


def told(draw: random.Random) -> Text:
    """A number that the user tells, and that is asked for three times."""
    number = draw.choice(NUMBERS)
    text: Text = []
    for asked, said in zip((f"keep{number}", *["name"] * 3), ("ok", *number * 3), strict=True):
        text += [question(asked), (f"<think></think>{said}<|im_end|>", True), ("\n", False)]
    return text


def game(draw: random.Random, thoughts: bool, turns: int = len(ASKED)) -> Text:
    """The first turns of a game; without the earlier ones' thoughts the last one is to be learned."""
    text: Text = []
    for turn, asked in enumerate(ASKED[:turns]):
        thought = draw.choice(NUMBERS) if turn == 0 else ""
        said = draw.choice(NUMBERS) if asked == "say" else "ok"
        learned = thoughts or turn == turns - 1
        written = f"<think>{thought}</think>{said}<|im_end|>" if learned else f"{said}<|im_end|>"
        text += [question(asked), (written, learned), ("\n", False)]
    return text


def question(asked: str) -> tuple[str, bool]:
    """A user's message, and the head of the answer."""
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n", False


def padded(tokenizer: Any, texts: list[Text]) -> tuple[Any, Any]:
    """Token ids and labels of some conversations, both [N, T]; -100 for what is only read."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids, labels = [], []
    for text in texts:
        pieces = [(tokenizer(piece)["input_ids"], learned) for piece, learned in text]
        ids.append(torch.tensor([one for piece, _ in pieces for one in piece]))
        shown = [one if learned else -100 for piece, learned in pieces for one in piece]
        labels.append(torch.tensor(shown))
    return (
        pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad_sequence(labels, batch_first=True, padding_value=-100),
    )


def make_tokenizer() -> Any:
    """A token for each word of the game, with marks as Qwen3's."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: place for place, word in enumerate(dict.fromkeys(("<unk>", *WORDS)))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|\d|[a-z]+"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
