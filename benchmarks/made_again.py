"""Steps of a run made again with transformers and torch's AdamW: is it the algorithm that it says?

    python -m benchmarks.made_again STORE [RUN] --model FOLDER [--steps 6] [--threads 1]

STORE: address of a store (file://…/.refrain/store); RUN: of a run of GRPO in it, all in float32
(rollout.dtype and train.compute_dtype), on policy, one optimizer step a step, constant learning rate,
its loss the mean over all tokens of a step. FOLDER: the model that it began with.

Nothing of Refrain's trainer, losses and engines is used: the advantages of each stored batch go into
-sum(A log pi) / tokens over plain padded forward passes, and so on from step to step. Printed for
each: the norm of the gradient, beside the one that the run reported; the largest difference between a
log-prob that the engine reported and the one that the model made again gives (after the first step
these are equal only if the weights are); and whether the drawn tokens are distributed as the policy
says. For that a token gets u = P(likelier tokens) + v P(the token), v drawn evenly from [0, 1]: where
tokens are drawn from the policy, u is even in [0, 1] (the randomised probability integral transform).
Its mean is then 0.5, and the Kolmogorov-Smirnov distance times the root of the number of tokens below
1.36 in 95 of 100 cases.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from configs.train import TrainConfig
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from storage.runs.commit_log import read_commit
from storage.runs.run_store import RunStore

AT_ONCE = 4  # sequences


@dataclass(frozen=True, slots=True)
class Sample:
    """One of a step's samples."""

    prompt: NDArray[np.integer]  # [P] tokens
    response: NDArray[np.integer]  # [R] tokens
    number: NDArray[np.floating]  # [R] or [1]: log-probs that the engine reported, or advantages


@dataclass(slots=True)
class Drawn:
    """Of tokens that an engine has drawn."""

    places: list[Tensor] = field(default_factory=list)  # u, see above
    differences: list[Tensor] = field(default_factory=list)  # of log-probs, nats

    def __str__(self) -> str:
        u = torch.cat(self.places).sort().values
        count = len(u)
        evenly = torch.arange(1, count + 1) / count
        distance = torch.maximum((evenly - u).abs(), (u - evenly + 1 / count).abs()).max()
        return (
            f"{count} tokens, u {u.mean():.4f} ± {(1 / 12 / count) ** 0.5:.4f}, "
            f"KS {distance * count**0.5:.2f}, log-probs differ by {self.worst:.1e}"
        )

    @property
    def worst(self) -> float:
        """The largest of the differences."""
        return float(torch.cat(self.differences).max())


def samples_of(store: Store, ref: BatchRef, column: str) -> list[Sample]:
    """A batch, with the column beside each sample's tokens."""

    def rows(name: str) -> list[NDArray[np.generic]]:
        values, offsets = ref.fetch_numpy(store, name)
        return np.split(values, len(ref) if offsets is None else offsets[1:-1])

    found = zip(rows("prompt_ids"), rows("response_ids"), rows(column), strict=True)
    return [Sample(prompt, response, number) for prompt, response, number in found]  # type: ignore[arg-type]


def forward(
    model: torch.nn.Module, samples: Sequence[Sample]
) -> Iterator[list[tuple[Sample, Tensor, Tensor]]]:
    """For a few samples at once: each, its response [R], the logits [R, V] that its tokens are of."""
    for start in range(0, len(samples), AT_ONCE):
        some = samples[start : start + AT_ONCE]
        longest = max(len(one.prompt) + len(one.response) for one in some)
        ids = torch.zeros(len(some), longest, dtype=torch.long)
        there = torch.zeros_like(ids)
        for row, one in enumerate(some):
            tokens = np.concatenate([one.prompt, one.response]).astype(np.int64)
            ids[row, : len(tokens)] = torch.as_tensor(tokens)
            there[row, : len(tokens)] = 1
        logits = model(input_ids=ids, attention_mask=there).logits
        found = []
        for row, one in enumerate(some):
            first, count = len(one.prompt) - 1, len(one.response)
            response = torch.as_tensor(one.response.astype(np.int64))
            found.append((one, response, logits[row, first : first + count]))
        yield found


@torch.no_grad()
def drawn(model: torch.nn.Module, samples: Sequence[Sample], dice: torch.Generator) -> Drawn:
    """How the tokens of samples lie in the policy, and by how much their log-probs differ."""
    found = Drawn()
    for few in forward(model, samples):
        for one, response, logits in few:
            logs = logits.double().log_softmax(-1)
            own = logs.gather(-1, response[:, None])
            likelier = (logs.exp() * (logs > own)).sum(-1)
            part = torch.rand(len(response), generator=dice, dtype=torch.double)
            found.places.append(likelier + part * own[:, 0].exp())
            found.differences.append((own[:, 0] - torch.as_tensor(one.number)).abs())
    return found


def add_gradient(model: torch.nn.Module, samples: Sequence[Sample]) -> None:
    """Add the gradient of -sum(A log pi) / tokens over a batch, whose samples have advantages A."""
    tokens = sum(len(one.response) for one in samples)
    for few in forward(model, [one for one in samples if np.any(one.number)]):
        loss = torch.zeros(())
        for one, response, logits in few:
            logs = logits.float().log_softmax(-1).gather(-1, response[:, None])[:, 0]
            loss = loss - (torch.as_tensor(one.number) * logs).sum() / tokens
        loss.backward()


def main() -> None:
    """Print the steps."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.made_again", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("store")
    parser.add_argument("run", nargs="?", help="[the only one in the store]")
    parser.add_argument("--model", required=True, help="folder of the model that it began with")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    store = Store(options.store)
    run = RunStore(store, options.run or store.children()[0])
    commits = [read_commit(run, step) for step in range(1, options.steps + 1)]
    train = TrainConfig.model_validate(commits[0].update["train"])
    if (train.schedule, train.warmup_steps, train.epochs, train.mini_batches) != (
        "constant", 0, 1, 1,
    ):  # fmt: skip
        parser.error("the run has a schedule, epochs or mini-batches; give one without.")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
    adamw = torch.optim.AdamW(
        model.parameters(),
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.adam_epsilon,
        weight_decay=train.weight_decay,
    )
    dice, everything = torch.Generator().manual_seed(0), Drawn()
    for commit in commits:
        found = drawn(model, samples_of(store, commit.refs["samples"], "rollout_logprobs"), dice)
        everything.places += found.places
        everything.differences += found.differences
        adamw.zero_grad()
        add_gradient(model, samples_of(store, commit.refs["batch"], "advantages"))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        adamw.step()
        reported = commit.metrics["train/grad_norm"]
        norms = f"gradient {norm:.6f}, reported {reported:.6f}"
        print(f"step {commit.step}: {norms}; {found}", flush=True)
    print(f"all: {everything}")


if __name__ == "__main__":
    main()
