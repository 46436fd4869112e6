"""Every number on a step's page and in a run's table comes from the commit's field of that name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.commit_log import Commit
from storage.runs.curves import shown
from tasks.reporting import artifacts
from tasks.run.metrics import numbers_of
from tests.traced import Figure, Record, attempts_of, check_figures, figure


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store")


def batch(store: Store, key: str, rows: int) -> BatchRef:
    return write_batch(store, key, {"reward": np.ones(rows, np.float32)})


def attempt(stage: str, number: int, started: float, seconds: float, error: str = "") -> Record:
    return {
        "stage": stage,
        "shard": 2,
        "number": number,
        "worker": f"{stage}-w",
        "started": started,
        "seconds": seconds,
        "error": error,
    }


ATTEMPTS = [
    attempt("rollout", 1, 100.0, 1.5, "lost"),
    attempt("rollout", 2, 102.0, 3.0),
    attempt("update", 1, 106.0, 2.25),
]


def step(store: Store) -> Record:
    """The fields of a commit, no two numbers alike."""
    return {
        "step": 7,
        "parent": 6,
        "version_in": {"version": 5, "key": "in", "digest": "xxh3:in", "nbytes": 1},
        "version_out": {"version": 17, "key": "out", "digest": "xxh3:out", "nbytes": 1},
        "refs": {"samples": batch(store, "s1", 24)},
        "ledger": {
            "drawn": 60,
            "trained": 41,
            "filtered": 9,
            "filtered_by": {"equal rewards": 8},
            "dropped": {"too long": 4},
            "in_flight": 6,
        },
        "attempts": ATTEMPTS,
        "reward_code": {
            "c0de": [
                {"name": "math", "source": "sha1", "module": "m1", "packages": {"sympy": "1.2"}}
            ]
        },
        "metrics": {
            "time/step": 20.0,
            "time/rollout": 5.0,
            "time/reward": 0.75,
            "time/advantage": 0.875,
            "time/update": 2.25,
            "time/weight_sync": 0.625,
            "retries": 1.0,
            "reward/mean": 0.375,
            "sampling/rounds": 2.0,
            "sampling/groups": 12.0,
            "sampling/informative": 0.34,
            "rollout/tokens": 4321.0,
            "cost/device_seconds/train/update": 13.1,
            "cost/device_seconds/train/held": 40.1,
            "cost/device_seconds/train/lost": 2.1,
            "cost/device_seconds/train/starting": 3.1,
            "cost/device_seconds/train/idle": 21.8,
            "cost/idle_share/train": 0.54,
            "cost/cpu_seconds/train": 33.3,
            "cost/joules/train": 7777.0,
            "cost/gpu_busy/train": 0.61,
            "cost/device_hours": 0.0125,
            "cost/money": 0.03125,
            "cost/so_far/device_hours": 0.5625,
            "cost/so_far/money": 1.21875,
            "cost/per_sample/device_seconds": 0.825,
            "cost/per_sample/money": 0.0025,
        },
    }


def metric(name: str, value: float, *texts: tuple[str, str]) -> Figure:
    return figure("metrics", name, value=value, shown=texts)


COST = [
    metric("cost/device_seconds/train/held", 50.2, ("| train | 40.1 |", "| train | 50.2 |")),
    metric("cost/device_seconds/train/update", 14.2, ("| update 13.1 |", "| update 14.2 |")),
    metric("cost/device_seconds/train/lost", 4.2, ("| 2.1 |", "| 4.2 |")),
    metric("cost/device_seconds/train/starting", 5.2, ("| 3.1 |", "| 5.2 |")),
    metric("cost/device_seconds/train/idle", 22.9, ("| 21.8 (54%)", "| 22.9 (54%)")),
    metric("cost/idle_share/train", 0.25, ("21.8 (54%)", "21.8 (25%)")),
    metric("cost/cpu_seconds/train", 44.4, ("seconds: train 33.3.", "seconds: train 44.4.")),
    metric("cost/joules/train", 8888, ("Joules of GPUs: train 7777", "Joules of GPUs: train 8888")),
    metric("cost/gpu_busy/train", 0.31, ("run: train 61% of", "run: train 31% of")),
    metric("cost/device_hours", 0.5, ("hours: 0.0125 of the step", "hours: 0.5 of the step")),
    metric("cost/so_far/device_hours", 0.75, ("0.5625 of the version", "0.75 of the version")),
    metric("cost/per_sample/device_seconds", 0.9, ("0.825 device-s", "0.9 device-s")),
    metric("rollout/tokens", 99.0, ("4321 tokens sampled", "99 tokens sampled")),
    metric("cost/money", 0.5, ("EUR 0.03125 of the step", "EUR 0.5 of the step")),
    metric("cost/so_far/money", 2.5, ("1.219 of the version,", "2.5 of the version,")),
    metric("cost/per_sample/money", 0.5, ("0.0025 for each", "0.5 for each")),
]
TIME = [
    metric(
        "time/step",
        40.0,
        ("| 5.00 | 25% |", "| 5.00 | 12% |"),
        ("| 2.25 | 11% |", "| 2.25 | 6% |"),
        ("| whole step | 20.00 |", "| whole step | 40.00 |"),
    ),
    figure("attempts", 2, "seconds", value=4.5,
           shown=[("| update | 2.25 | 11% |", "| update | 4.50 | 22% |")]),
    figure("attempts", 1, "seconds", value=4.0,
           shown=[("| rollout | 5.00 | 25% |", "| rollout | 6.00 | 30% |")]),
    figure("attempts", 0, "seconds", value=1.0, shown=[("after 1.5 s", "after 1.0 s")]),
    figure("attempts", 0, "shard", value=3, shown=[("rollout 2**", "rollout 3**")]),
    figure("attempts", 0, "number", value=3,
           shown=[("attempt 1 on", "attempt 3 on"), ("| 2 | 1 | rollout", "| 2 | 2 | rollout")]),
    figure("attempts", 2, "number", value=2, shown=[("| 1 | 0 | update", "| 1 | 1 | update")]),
    figure("attempts", 2, "stage", value="score", shown=[("| update | 2", "| score | 2")]),
    figure("attempts", shown=[("| 2 | 1 | rollout", "| 3 | 1 | rollout"), ("| 1 | 0 | update", "| 2 | 0 | update")],
           value=[*ATTEMPTS, attempt("rollout", 1, 102.0, 1.0), attempt("update", 1, 106.0, 1.0)]),
]  # fmt: skip


def versions_and_prompts(store: Store) -> list[Figure]:
    """Figures of what went in and came out."""
    more = batch(store, "s2", 30)
    (old,), (new,) = batch(store, "s1", 24).objects, more.objects
    return [
        Figure({("step",): 9, ("parent",): 8},
               [("Step 7", "Step 9"), ("refrain replay a 7", "refrain replay a 9")]),
        figure("version_in", "version", value=6, shown=[("version 5", "version 6")]),
        figure("version_in", "digest", value="xxh3:new", shown=[("xxh3:in", "xxh3:new")]),
        figure("version_in", "key", value="v1",
               shown=[(f"`{store.url('in')}`", f"`{store.url('v1')}`")]),
        figure("version_out", "version", value=18, shown=[
            ("version 17**", "version 18**"), ("--version 17`", "--version 18`")]),
        figure("version_out", "digest", value="xxh3:new", shown=[("xxh3:out", "xxh3:new")]),
        figure("version_out", "key", value="v1",
               shown=[(f"`{store.url('out')}`", f"`{store.url('v1')}`")]),
        figure("refs", "samples", value=more, shown=[("24 rows", "30 rows"), (old, new)]),
        Figure({("ledger", "drawn"): 61, ("ledger", "trained"): 42},
               [("60 drawn = 41 trained", "61 drawn = 42 trained")]),
        Figure({("ledger", "drawn"): 61, ("ledger", "filtered"): 10},
               [("60 drawn", "61 drawn"), ("9 filtered", "10 filtered")]),
        Figure({("ledger", "drawn"): 61, ("ledger", "in_flight"): 7},
               [("60 drawn", "61 drawn"), ("6 in flight", "7 in flight")]),
        Figure({("ledger", "drawn"): 61, ("ledger", "dropped", "too long"): 5},
               [("60 drawn", "61 drawn"), ("4 dropped", "5 dropped"), ("too long 4", "too long 5")]),
        figure("ledger", "filtered_by", "equal rewards", value=7,
               shown=[("equal rewards 8", "equal rewards 7")]),
        metric("sampling/rounds", 1.0, ("in 2 rounds", "in 1 round")),
        metric("sampling/groups", 13.0, ("12 groups", "13 groups")),
        metric("sampling/informative", 0.5, ("34% have", "50% have")),
        figure("reward_code", "c0de", 0, "source", value="sha2", shown=[("sha1", "sha2")]),
        figure("reward_code", "c0de", 0, "module", value="m2", shown=[("`m1`", "`m2`")]),
        figure("reward_code", "c0de", 0, "packages", value={"sympy": "1.3"},
               shown=[("sympy 1.2", "sympy 1.3")]),
        figure("reward_code", value={"c0d3": [{"name": "math", "source": "sha1", "module": "m1", "packages": {"sympy": "1.2"}}]},
               shown=[("c0de", "c0d3")]),
    ]  # fmt: skip


def test_every_number_on_a_steps_page_is_a_field_of_its_commit(store: Store) -> None:
    words = ["cluster.currency=EUR"]
    run: Any = SimpleNamespace(
        name="a", store=store, origin=None, config=load_recipe(GRPOConfig, "tiny", words)
    )

    def page(record: Record) -> str:
        commit = Commit.model_validate(record)
        return artifacts.lineage(run, commit, attempts_of(commit))

    check_figures(step(store), page, [*versions_and_prompts(store), *TIME, *COST])


def test_every_number_in_a_runs_table_is_a_metric_of_its_commits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[list[dict[str, object]]] = []
    monkeypatch.setattr(
        artifacts, "create_table_artifact", lambda *, table, **_: tables.append(table)
    )
    run: Any = SimpleNamespace(name="a")

    def page(record: Record) -> str:
        commit = Commit.model_validate(record)
        artifacts.show_steps(run, [(commit.step, shown(numbers_of(commit)))])
        return json.dumps(tables[-1])

    columns = {
        "reward/mean": ("mean reward", 0.5),
        "time/step": ("seconds", 40.0),
        "retries": ("retries", 3),
        **{
            f"time/{stage}": (stage, 3.5)
            for stage in ("rollout", "reward", "advantage", "update", "weight_sync")
        },
    }
    record = step(store)
    before = json.loads(page(record))[0]
    figures = [
        metric(
            name, new, (json.dumps({label: before[label]})[1:-1], json.dumps({label: new})[1:-1])
        )
        for name, (label, new) in columns.items()
    ]
    numbered = Figure({("step",): 9, ("parent",): 8}, [('"step": 7', '"step": 9')])
    check_figures(record, page, [*figures, numbered])
