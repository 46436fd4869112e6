"""Learning curves of runs whose steps overlap: what staleness costs, what a correction gives back.

    python -m benchmarks.learning_curves [RECIPE] [--steps 60] [--staleness 0 1 4] [--seeds 0 1 2]
                                         [--set key=value …] [--png FILE] [--json FILE]

Each staleness with truncated importance sampling (`corrected`), and without: then the loss takes its
ratio to the policy that sampled, which bounds the step and weighs nothing. One run after the other,
in folders of their own; the seeds of model, data and sampling are the same for all of a seed. Printed
for each: the mean reward of the last tenth of the steps (median and range over the seeds), seconds a
step (median of all steps but the first), the mean staleness and the gap to the rollout engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from storage.objects.store import Store
from storage.runs.commit_log import head, read_commit
from storage.runs.run_store import RunStore

CORRECTIONS = {
    "corrected": ["algorithm.correction=[{kind: truncate}]"],
    "uncorrected": ["algorithm.ratio_against=rollout_logprobs"],
}
COLOURS = ("#0b6e99", "#e0a43b", "#b5541c", "#5c8a3a", "#7b5ea7")


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One run, a value for each step."""

    staleness: int  # max_staleness
    correction: str
    seed: int
    reward: list[float]  # mean over the step's samples
    seconds: list[float]  # since the commit before
    stale: list[float]  # staleness/mean
    mismatch: list[float]  # nats per token, to the rollout engine's log-probs

    @property
    def last(self) -> float:
        """Mean reward of the last tenth of the steps."""
        return statistics.mean(self.reward[-max(1, len(self.reward) // 10) :])


def run_one(recipe: str, words: Sequence[str], staleness: int, correction: str, seed: int) -> Curve:
    """A run in a folder of its own, which goes when it has been read."""
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        command = [
            sys.executable, "-m", "flows.grpo", recipe, f"max_staleness={staleness}",
            *CORRECTIONS[correction], f"seed={seed}", f"rollout.seed={seed}", f"data.seed={seed}",
            "store.keep_steps=2", "store.snapshot_every=1000", *words,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        log = Path(folder, "log")
        with log.open("w") as out:
            done = subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=out)
        if done.returncode != 0:
            raise SystemExit(log.read_text())
        store = Store(f"file://{folder}/.refrain/store")
        (name,) = store.children()
        files = RunStore(store, name)
        commits = [read_commit(files, step) for step in range(1, (head(files) or 0) + 1)]
    found = {
        name: [float(commit.metrics.get(key) or 0.0) for commit in commits]
        for name, key in {
            "reward": "reward/mean",
            "seconds": "time/step",
            "stale": "staleness/mean",
            "mismatch": "train/rollout_mismatch",
        }.items()
    }
    return Curve(staleness=staleness, correction=correction, seed=seed, **found)


def line(curves: Sequence[Curve]) -> str:
    """The seeds of one setting, in figures."""
    last = [curve.last for curve in curves]
    steps = [value for curve in curves for value in curve.seconds[1:]]
    return (
        f"n = {curves[0].staleness}  {curves[0].correction:<11}  "
        f"reward {statistics.median(last):.3f} ({min(last):.3f} to {max(last):.3f})  "
        f"{statistics.median(steps):5.2f} s a step  "
        f"staleness {statistics.mean(x for c in curves for x in c.stale):.2f}  "
        f"mismatch {statistics.mean(x for c in curves for x in c.mismatch):.4f} nats"
    )


def picture(settings: Sequence[Sequence[Curve]], file: Path) -> None:
    """The curves: a line for the median over the seeds, a band for their range."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    shown = sorted({curves[0].correction for curves in settings})
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axis, correction in zip(axes, shown, strict=True):
        chosen = [curves for curves in settings if curves[0].correction == correction]
        for colour, curves in zip(COLOURS, chosen, strict=False):
            rows = list(zip(*(curve.reward for curve in curves), strict=True))
            steps = range(1, len(rows) + 1)
            label = f"max_staleness = {curves[0].staleness}"
            axis.plot(steps, [statistics.median(row) for row in rows], color=colour, label=label)
            axis.fill_between(
                steps, [min(row) for row in rows], [max(row) for row in rows],
                color=colour, alpha=0.15, linewidth=0,
            )  # fmt: skip
        axis.set_title(correction, loc="left", fontsize=10)
        axis.set_xlabel("step")
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("mean reward")
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning_curves", description=__doc__
    )
    parser.add_argument("recipe", nargs="?", default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="+", default=[], help="settings of every run")
    parser.add_argument("--png", type=Path, help="file for the curves")
    parser.add_argument("--json", type=Path, help="file for every figure")
    options = parser.parse_args(arguments)
    words = [f"steps={options.steps}", *options.set]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before", flush=True)
    settings: dict[tuple[int, str], list[Curve]] = {}
    for seed in options.seeds:  # the settings of a seed side by side: what else goes on is shared
        for staleness in options.staleness:
            for correction in CORRECTIONS:
                curve = run_one(options.recipe, words, staleness, correction, seed)
                settings.setdefault((staleness, correction), []).append(curve)
                print(f"seed {seed}  {line([curve])}", flush=True)
    print(f"\nmedian and range over {len(options.seeds)} seeds")
    for curves in settings.values():
        print(line(curves))
    if options.png is not None:
        picture(list(settings.values()), options.png)
    if options.json is not None:
        found = [asdict(curve) for curves in settings.values() for curve in curves]
        options.json.write_text(json.dumps(found))
    print(f"load {os.getloadavg()[0]:.1f} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
