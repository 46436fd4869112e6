"""Tokens sampled and engine seconds of trees against independent completions, at equal numbers.

    python -m benchmarks.tree [RECIPE] [key=value …] [--prompts 8] [--rounds 3] [--updates 5]

RECIPE as for `refrain tree`, tiny if left out. One rollout engine, in this process, with the weights
that a run of the recipe begins with; both sides sample `group_size` completions of the same prompts,
taking turns, after one round of each that is not counted. A tree's levels are one call to the engine
each, as in a run; planning, which a data worker does between them, is counted apart.

Printed, for each side, means over the rounds: tokens that were drawn, tokens of the completions,
calls, seconds of the calls, seconds of the planning, completions that were cut off.

Then the trees of the last round are trained on, with `train.tree_training` and without, on engines
that take turns in this process too, `--updates` times after one update each that is not counted:
tokens of an update, its seconds and those of the processor (medians), and for the largest micro-batch
the slots that attention has and the bytes that say where its tokens lie, beside those of a mask.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from configs.imports import imported_class
from configs.recipe import load_recipe
from configs.tree import TreeConfig
from engines.data.data_engine import DataEngine
from engines.rollout.contract import RolloutRequest, Sampling, engine_class
from engines.rollout.engine import RolloutEngine
from engines.train.contract import UpdateRequest
from engines.trees.contract import Growth
from engines.trees.tree_engine import TreeEngine
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.run.roles import data_spec, rollout_spec, train_spec
from tasks.trees.roles import tree_spec
from tasks.trees.tree import sampling_of

RUN = "benchmark"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One side of one round."""

    drawn: int  # tokens that the engine drew
    held: int  # tokens of the completions
    calls: int  # of the engine
    seconds: float  # in these calls
    planned: float  # seconds between them
    truncated: int  # completions
    samples: BatchRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Updated:
    """One update."""

    tokens: int  # in forward passes
    saved: float  # share of the samples' tokens that are not among them
    seconds: float
    processor: float  # seconds of the processor
    loss: float
    norm: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """An update's micro-batches, and the largest one."""

    micro_batches: int
    tokens: int
    slots: int  # of attention
    bytes: int  # that say where tokens lie


class Bench:
    """A rollout engine, a data engine and prompts."""

    def __init__(self, config: TreeConfig, folder: Path, prompts: int) -> None:
        import torch

        from engines.models import checkpoints
        from storage.runs.weights_writing import publish

        # As the workers of a run have it.
        torch.set_num_threads(config.cluster.pools[config.cluster.roles.rollout].threads)
        self.config = config
        self.store = Store(config.store.uri)
        files = RunStore(self.store, RUN)
        spec = rollout_spec(config, self.store)
        directory = checkpoints.materialize(config.model, folder / "models")
        state = checkpoints.load_for_training(directory).state_dict()
        weights = publish(self.store, RUN, 0, state.items(), checkpoints.companion_files(directory))
        self.engine: RolloutEngine = imported_class(engine_class(config.rollout))(
            spec.model_copy(update={"model_cache": str(folder / "models")})
        )
        self.engine.sync(weights)
        data = data_spec(config, files).model_copy(update={"model_cache": str(folder / "models")})
        self.data = DataEngine(data)
        trees = tree_spec(config, self.store).model_copy(update={"model_cache": data.model_cache})
        self.grower = TreeEngine(trees)
        self.files, self.models = files, str(folder / "models")
        made = self.data.prompts(list(range(prompts)), 0, f"{RUN}/prompts.safetensors")
        assert made.ref is not None
        self.prompts = made.ref

    def close(self) -> None:
        self.engine.close()
        self.data.close()

    def request(self, prompts: BatchRef, sampling: Sampling, step: int, key: str) -> RolloutRequest:
        out_key = f"{RUN}/{step}/{key}.safetensors"
        return RolloutRequest(
            prompts=prompts, sampling=sampling, out_key=out_key, step=step, shard=0
        )

    def independent(self, step: int) -> Sampled:
        """Completions that share nothing but their prompt."""
        sampling = Sampling.of(self.config.rollout, self.config.group_size)
        began = time.perf_counter()
        found = self.engine.generate(self.request(self.prompts, sampling, step, "whole"))
        seconds = time.perf_counter() - began
        return self.sampled(found.ref, found.stats.tokens, 1, seconds, 0.0)

    def trees(self, step: int) -> Sampled:
        """The leaves of trees."""
        config = self.config
        sampling = sampling_of(config)
        growth = Growth(tree=config.tree, n=config.group_size, seed=config.rollout.seed, step=step)
        drawn, calls, seconds = 0, 0, 0.0
        began = time.perf_counter()
        plan = self.grower.grow(self.prompts, growth, f"{RUN}/{step}/grow-0.safetensors")
        while plan.asked is not None:
            calls += 1
            request = self.request(plan.asked, sampling, step, f"level-{calls}")
            asked = time.perf_counter()
            level = self.engine.generate(replace(request, begun=plan.asked))
            seconds += time.perf_counter() - asked
            drawn += level.stats.tokens
            plan = self.grower.grow(
                self.prompts,
                growth,
                f"{RUN}/{step}/grow-{calls}.safetensors",
                plan,
                level.ref,
            )
        assert plan.samples is not None
        planned = time.perf_counter() - began - seconds
        return self.sampled(plan.samples, drawn, calls, seconds, planned)

    def sampled(
        self, samples: BatchRef, drawn: int, calls: int, seconds: float, planned: float
    ) -> Sampled:
        assert len(samples) == len(self.prompts) * self.config.group_size
        status = samples.fetch_numpy(self.store, "status")[0]
        return Sampled(
            drawn=drawn,
            held=int(samples.lengths(self.store, "response_ids").sum()),
            calls=calls,
            seconds=seconds,
            planned=planned,
            truncated=int((status == SampleStatus.TRUNCATED).sum()),
            samples=samples,
        )

    def updates(self, samples: BatchRef, count: int) -> dict[bool, list[Updated]]:
        """Updates on one batch, with advantages that are drawn, without tree training and with it."""
        from engines.train.fsdp_engine import FSDPEngine

        random = np.random.default_rng(0)
        lengths = samples.lengths(self.store, "response_ids")
        drawn = [np.full(length, random.normal(), np.float32) for length in lengths]
        batch = samples.with_columns(
            write_batch(self.store, f"{RUN}/advantages.safetensors", {"advantages": drawn})
        )
        engines = {}
        for tree in (False, True):
            spec = train_spec(self.config, replace(self.files, run=f"{RUN}-{tree}"), "actor")
            train = spec.train.model_copy(update={"tree_training": tree})
            engines[tree] = FSDPEngine(
                spec.model_copy(update={"train": train, "model_cache": self.models})
            )
            engines[tree].join(0, 1, "127.0.0.1", 0, 1, 600.0)
        found: dict[bool, list[Updated]] = {False: [], True: []}
        most = self.config.rollout.max_new_tokens
        for step in range(1, count + 2):
            for tree, engine in engines.items():
                began, used = time.perf_counter(), time.process_time()
                metrics = engine.update(
                    UpdateRequest(
                        step=step,
                        batch=batch,
                        algorithm=self.config.algorithm,
                        temperature=self.config.rollout.temperature,
                        max_new_tokens=most,
                    )
                ).metrics
                one = Updated(
                    tokens=int(metrics["train/tokens"]),
                    saved=metrics["train/tokens_saved"],
                    seconds=time.perf_counter() - began,
                    processor=time.process_time() - used,
                    loss=metrics["train/loss"],
                    norm=metrics["train/grad_norm"],
                )
                if step > 1:
                    found[tree].append(one)
        for engine in engines.values():
            engine.close()
        return found

    def layouts(self, samples: BatchRef) -> dict[bool, Layout]:
        """The largest micro-batch of each side's update."""
        import torch

        from engines.train.batching.micro_batch import read_micro_batch
        from engines.train.batching.packing import plan_update, read_lengths

        train, found = self.config.train, {}
        for tree in (False, True):
            plan = plan_update(
                read_lengths(self.store, samples, tree),
                world=1,
                budget=train.shared_micro_batch_tokens,
                mini_batches=train.mini_batches,
            )
            micros = [rows for mini in plan for rows in mini.ranks[0]]
            packed = [
                read_micro_batch(self.store, samples, rows, (), torch.device("cpu"), tree).packed
                for rows in micros
            ]
            widest = max(packed, key=lambda one: one.tokens.numel())
            layout = widest.layout
            held = [layout.expand, layout.collapse, *layout.copies]
            found[tree] = Layout(
                micro_batches=len(micros),
                tokens=widest.tokens.numel(),
                slots=layout.expand.numel(),
                bytes=sum(each.numel() * each.element_size() for each in held),
            )
        return found


def line(name: str, rounds: list[Sampled]) -> str:
    """A side's means."""

    def mean(field: str) -> float:
        return statistics.mean(getattr(one, field) for one in rounds)

    return (
        f"{name:12} drawn {mean('drawn'):9.0f}  held {mean('held'):9.0f}  "
        f"calls {mean('calls'):5.1f}  engine {mean('seconds'):8.3f} s  "
        f"planning {mean('planned'):6.3f} s  cut off {mean('truncated'):6.1f}"
    )


def print_updates(found: dict[bool, list[Updated]], layouts: dict[bool, Layout]) -> None:
    """Both sides' medians."""
    for tree, updates in found.items():
        layout, first = layouts[tree], updates[0]
        print(
            f"{'tree training' if tree else 'prompts once':14} tokens {first.tokens:7}  saved "
            f"{first.saved:.1%}  update {_median(updates, 'seconds'):8.3f} s  processor "
            f"{_median(updates, 'processor'):8.3f} s  loss {first.loss:+.6f}  norm {first.norm:.6f}\n"
            f"{'':14} {layout.micro_batches} micro-batches, the largest: {layout.tokens} tokens, "
            f"{layout.slots} slots, {layout.bytes:,} bytes (a mask: {layout.tokens**2:,})"
        )
    ratios = [
        _median(found[True], field) / _median(found[False], field)
        for field in ("tokens", "seconds", "processor")
    ]
    print("with over without: tokens {:.3f}, seconds {:.3f}, processor {:.3f}".format(*ratios))


def _median(updates: list[Updated], field: str) -> float:
    return float(statistics.median(getattr(one, field) for one in updates))


def main() -> None:
    """Let the sides take turns and print means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="tiny")
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = [*options.words, f"store.uri=file://{folder}/store"]
        bench = Bench(load_recipe(TreeConfig, options.recipe, words), Path(folder), options.prompts)
        sides = {"independent": bench.independent, "trees": bench.trees}
        found: dict[str, list[Sampled]] = {name: [] for name in sides}
        for step in range(options.rounds + 1):
            for name, side in sides.items():
                one = side(2 * step + (name == "trees"))
                if step:
                    found[name].append(one)
        bench.close()
        for name, rounds in found.items():
            print(line(name, rounds), flush=True)
        samples = found["trees"][-1].samples
        updates = bench.updates(samples, options.updates)
        layouts = bench.layouts(samples)
    alone, trees = found["independent"], found["trees"]
    spent = sum(one.seconds + one.planned for one in trees) / sum(one.seconds for one in alone)
    share = sum(one.drawn for one in trees) / sum(one.held for one in trees)
    print(f"drawn of the tokens that trees hold: {share:.3f}")
    print(f"seconds of trees over those of independent completions: {spent:.2f}")
    print_updates(updates, layouts)


if __name__ == "__main__":
    main()
