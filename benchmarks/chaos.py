"""Kill a run's processes at random, again and again, and see whether it ends as if nothing had been.

    python -m benchmarks.chaos --kills 100 --seed 0            kills fall on a run of 30 steps
    python -m benchmarks.chaos --kills 40 --apart              each after the last one is mended
    python -m benchmarks.chaos --kills 30 --overlapping        steps overlap, and carry groups on
    python -m benchmarks.chaos --kills 30 --episodes           a model and an environment take turns
    python -m benchmarks.chaos --kills 12 --apart --workers 16 many rollout workers, a shard for each
    python -m benchmarks.chaos --kills 10 --flow dapo --recipe tiny-dapo     another flow
    python -m benchmarks.chaos --flow distill teachers.t.model.kind=random teachers.t.model.seed=7
    python -m benchmarks.chaos --kills 8 --apart --workers 64 --sleep 2    which sleep for 2 s instead
    python -m benchmarks.chaos --kills 8 --kinds rollout flow scheduler    these alone are killed
    python -m benchmarks.chaos --kills 4 --apart --outage 5 --kinds store  the store is gone for 5 s

The tiny recipe with the transformers engine is deterministic on CPU, so the weights must equal those
of an undisturbed run bit for bit. Any process of the run may be killed, the flow too, which is then
resumed. With --outage the store is a bucket of moto's server, which may be out of reach for a while.
Prints a table of recovery times by kind and writes everything as JSON.

Where steps overlap, which groups a step trains on depends on who finished when. Then each prompt must
have been trained that the undisturbed run trains, the audit must find nothing wrong and nothing left
over, and updates made again from the stored batches must give equal weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.chaos_subject import Subject, many
from benchmarks.stores import Outages, outages
from storage.runs.run_store import RunStore
from tests.faults.ledger import committed, story

RECIPE = (
    "tiny",
    "name=chaos",
    "rollout.max_new_tokens=32",
    "cluster.pools.rollout.workers=2",
    "cluster.pools.train.workers=2",
    "cluster.no_workers_timeout=120",
    "algorithm.kl.coefficient=0.01",
    "store.snapshot_every=5",
)
MAX_STALENESS = 2  # where steps overlap
OVERLAPPING = (
    f"max_staleness={MAX_STALENESS}",
    "algorithm.correction=[{kind: truncate}]",
    "rollout.shards=4",
    "rollout.over_sampling=1.5",
    "rollout.partial_rollout=carry",
    "rollout.save_every=0.2",
    "cluster.pools.rollout.slots=2",
)
EXAMPLE = Path(__file__).parents[1] / "examples/guessing"
EPISODES = (
    f"{EXAMPLE}.yaml",
    f"episodes.environment.path={EXAMPLE}.py:Guessing",
    f"data.source.path={EXAMPLE}.py:rows",
    "name=chaos",
    "prompts_per_step=8",
    "group_size=4",
    "cluster.pools.rollout.workers=2",
    "cluster.no_workers_timeout=120",
    "store.snapshot_every=5",
)
REPLAYED = 4  # updates that are made again where steps overlap
KINDS = (
    "flow",
    "scheduler",
    "server",
    "mlflow",
    "rollout",
    "train",
    "aggregator",
    "teacher",
    "cpu",
    "reward",
    "environment",
    "store",
)
LONGEST_WAIT = 6.0  # seconds between kills, at most; drawn evenly
END = re.compile(r"\w+(Error|Lost|Failed|Unavailable|Held|NoWorkers|Conflict|Traceback)\b")
STUCK = 600.0  # seconds without a commit after which the run is given up


@dataclass(kw_only=True)
class Kill:
    """One kill and what came of it."""

    kind: str
    at: float  # seconds since the run began
    step: int  # last committed step
    recovered: float | None = None  # seconds to the next commit
    alone: bool = True  # no other kill fell into that time


@dataclass(kw_only=True)
class Report:
    """What was done and what came out."""

    steps: int
    seed: int
    undisturbed_seconds: float = 0.0
    seconds: float = 0.0
    starts: int = 0  # of the flow
    ends: list[str] = field(default_factory=list)  # what a flow that was not killed said at its end
    kills: list[Kill] = field(default_factory=list)
    overlapping: bool = False
    # Weights, cursor and ledger of every step; where steps overlap, the prompts that were trained.
    equal: bool = False
    audit: dict[str, object] = field(default_factory=dict)  # where steps overlap
    replayed: dict[int, bool] = field(default_factory=dict)  # step -> whether the weights are equal
    left: list[str] = field(default_factory=list)  # processes


def undisturbed(subject: Subject) -> float:
    """Seconds that the run takes when it is left alone."""
    began = time.monotonic()
    if subject.process.wait() != 0:
        raise RuntimeError((subject.folder / "out").read_text())
    return time.monotonic() - began


def disturbed(
    subject: Subject, kills: int, dice: random.Random, apart: bool, kinds: Sequence[str]
) -> tuple[list[Kill], float]:
    """The run, killed `kills` times: the steps at which are drawn evenly from all but the last."""
    steps, folder = subject.steps, subject.folder
    due = sorted(dice.uniform(0, steps - 1) for _ in range(kills))
    began = last = time.monotonic()
    made: list[Kill] = []
    reached = 0
    wait = dice.uniform(0, LONGEST_WAIT)
    while not subject.finished:
        now = time.monotonic()
        step = subject.head
        if step > reached:
            reached, last = step, now
            for kill in made:
                if kill.recovered is None:
                    kill.recovered = now - began - kill.at
        if now - last > STUCK:
            raise RuntimeError(f"no step for {STUCK} s; see {folder}/out")
        mended = not apart or all(kill.recovered is not None for kill in made)
        since = now - began - (made[-1].at if made else 0.0)
        if len(made) < kills and mended and step >= int(due[len(made)]) and since >= wait:
            if kind := strike(subject, dice, kinds):
                for other in made:
                    other.alone = other.alone and other.recovered is not None
                crowded = any(kill.recovered is None for kill in made)
                made.append(Kill(kind=kind, at=now - began, step=step, alone=not crowded))
                print(f"{made[-1].at:7.1f} s  step {step:3}  {kind}", flush=True)
            wait = dice.uniform(0, LONGEST_WAIT)
        time.sleep(0.02)
    for kill in made:
        if kill.recovered is None:
            kill.recovered = time.monotonic() - began - kill.at
    return made, time.monotonic() - began


def strike(subject: Subject, dice: random.Random, kinds: Sequence[str]) -> str | None:
    """Kill a process of a kind drawn at random; None if there is none of that kind just now."""
    kind = dice.choice(kinds)
    if kind == "store":
        assert subject.outages is not None, "main() asks for --outage"
        subject.outages.begin()
        return kind
    alive = subject.faults.processes(kind)
    if not alive:  # a run without episodes has no environments
        return None
    name = dice.choice(sorted(alive))
    with contextlib.suppress(psutil.NoSuchProcess):
        alive[name].kill()
        return kind
    return None


def trained_rows(files: RunStore) -> list[int]:
    """Rows of the data whose groups were part of a batch, ascending; one for each time."""
    rows = []
    for commit in committed(files, MAX_STALENESS):
        samples = commit.refs["samples"][["group_id", "prompt_row"]]
        groups, _ = samples.fetch_numpy(files.store, "group_id")
        _, first = np.unique(groups, return_index=True)
        rows += samples.take(first).fetch_numpy(files.store, "prompt_row")[0].tolist()
    return sorted(rows)


def asked(subject: Subject, command: str, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON answer of a command on the subject's run."""
    assert subject.files is not None
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            f"flows.{command}",
            subject.files.run,
            *words,
            *subject.place,
            "--json",
        ],
        cwd=subject.folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer


def show(report: Report) -> None:
    """Recovery times by kind."""
    print(f"\n{'killed':<11} {'kills':>6} {'alone':>6} {'median s':>9} {'worst s':>8}")
    for kind in [one for one in KINDS if any(kill.kind == one for kill in report.kills)]:
        all_of = [kill for kill in report.kills if kill.kind == kind]
        times = [kill.recovered for kill in all_of if kill.alone and kill.recovered is not None]
        middle = f"{statistics.median(times):9.1f}" if times else f"{'-':>9}"
        worst = f"{max(times):8.1f}" if times else f"{'-':>8}"
        print(f"{kind:<11} {len(all_of):>6} {len(times):>6} {middle} {worst}")
    for line in report.ends:
        print(line[:160])
    print(
        f"{len(report.kills)} kills, {report.starts} starts of the flow, {report.seconds:.0f} s "
        f"against {report.undisturbed_seconds:.0f} s undisturbed; "
        f"{'equal' if report.equal else 'DIFFERENT'} "
        f"{'prompts' if report.overlapping else 'weights'}; {len(report.left)} processes left"
    )
    if report.overlapping:
        print(f"audit: {report.audit}; made again, equal to the bit: {report.replayed}")


def main() -> int:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--apart", action="store_true", help="wait for a commit between kills")
    parser.add_argument("--overlapping", action="store_true", help="steps overlap, carry groups on")
    parser.add_argument("--episodes", action="store_true", help="answers of several turns")
    parser.add_argument("--flow", default="grpo", help="the flow that is killed [grpo]")
    parser.add_argument("--recipe", default=RECIPE[0], help=f"its recipe [{RECIPE[0]}]")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="more settings of the run")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers")
    parser.add_argument(
        "--sleep", type=float, help="seconds; rollout engines sleep and do not decode"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, help="what is killed [everything; store with --outage]"
    )
    parser.add_argument("--outage", type=float, help="seconds for which the store is out of reach")
    parser.add_argument("--out", type=Path, help="JSON file for the report")
    arguments = parser.parse_args()
    arguments.kinds = arguments.kinds or [
        kind for kind in KINDS if kind != "store" or arguments.outage is not None
    ]
    if "store" in arguments.kinds and not (arguments.outage or 0) > 0:
        parser.error(
            "--kinds store needs --outage SECONDS, more than 0: how long it is out of reach."
        )
    with contextlib.ExitStack() as stack:
        seconds = arguments.outage
        return compare(
            arguments, None if seconds is None else stack.enter_context(outages(seconds))
        )


def compare(arguments: argparse.Namespace, store: Outages | None) -> int:
    """Both runs; 0 where they are equal and nothing is left."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    words = EPISODES if arguments.episodes else (arguments.recipe, *RECIPE[1:])
    if arguments.overlapping:
        words = (*words, *OVERLAPPING)
    if arguments.workers != 2:
        words = (*words, *many(arguments.workers))
    words = (*words, *arguments.settings)
    report = Report(steps=arguments.steps, seed=arguments.seed, overlapping=arguments.overlapping)
    (folder / "whole").mkdir()
    (folder / "broken").mkdir()
    given = (arguments.flow, words, arguments.steps, arguments.sleep, store)
    whole = Subject(folder / "whole", *given)
    report.undisturbed_seconds = undisturbed(whole)
    broken = Subject(folder / "broken", *given)
    dice = random.Random(arguments.seed)
    report.kills, report.seconds = disturbed(
        broken, arguments.kills, dice, arguments.apart, arguments.kinds
    )
    report.starts = broken.starts
    said = (folder / "broken/out").read_text(errors="replace").splitlines()
    report.ends = [line for line in said if END.match(line)]
    report.left = [" ".join(process.cmdline()) for process in broken.left()]
    assert whole.files is not None
    assert broken.files is not None
    if report.overlapping:
        report.equal = trained_rows(whole.files) == trained_rows(broken.files)
        code, found = asked(broken, "audit")
        report.audit = {
            "good": code == 0,
            "problems": found["problems"],
            "orphans": found["orphans"],
        }
        for step in random.Random(arguments.seed).sample(range(1, arguments.steps + 1), REPLAYED):
            report.replayed[step] = asked(broken, "replay", str(step))[0] == 0
    else:
        report.equal = story(committed(whole.files)) == story(committed(broken.files))
    show(report)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(asdict(report), indent=1))
    good = report.equal and not report.left and all(report.replayed.values())
    good = good and not report.audit.get("problems") and not report.audit.get("orphans")
    if good:
        shutil.rmtree(folder)
    else:
        print(f"everything is in {folder}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
