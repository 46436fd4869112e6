"""Tokens sampled and engine seconds of trees against independent completions, at equal numbers.

    python -m benchmarks.tree [RECIPE] [key=value …] [--prompts 8] [--rounds 3]

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

from configs.imports import imported_class
from configs.recipe import load_recipe
from configs.tree import TreeConfig
from engines.data.results import Growth
from engines.rollout.contract import RolloutRequest, Sampling, engine_class
from engines.rollout.engine import RolloutEngine
from engines.trees.growing import TreeEngine
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.run.engine_specs import data_spec, rollout_spec
from tasks.tree import sampling_of

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


class Bench:
    """A rollout engine, a data engine and prompts."""

    def __init__(self, config: TreeConfig, folder: Path, prompts: int) -> None:
        import torch

        from engines import models
        from storage.runs.weights_writing import publish

        # As the workers of a run have it.
        torch.set_num_threads(config.cluster.pools[config.cluster.roles.rollout].threads)
        self.config = config
        self.store = Store(config.store.uri)
        files = RunStore(self.store, RUN)
        spec = rollout_spec(config, self.store)
        directory = models.materialize(config.model, folder / "models")
        state = models.load_for_training(directory).state_dict()
        weights = publish(self.store, RUN, 0, state.items(), models.companion_files(directory))
        self.engine: RolloutEngine = imported_class(engine_class(config.rollout))(
            spec.model_copy(update={"model_cache": str(folder / "models")})
        )
        self.engine.sync(weights)
        data = data_spec(config, files).model_copy(update={"model_cache": str(folder / "models")})
        self.data = TreeEngine(data)
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
        plan = self.data.grow(self.prompts, growth, f"{RUN}/{step}/grow-0.safetensors")
        while plan.asked is not None:
            calls += 1
            request = self.request(plan.asked, sampling, step, f"level-{calls}")
            asked = time.perf_counter()
            level = self.engine.generate(replace(request, begun=plan.asked))
            seconds += time.perf_counter() - asked
            drawn += level.stats.tokens
            plan = self.data.grow(
                self.prompts,
                growth,
                f"{RUN}/{step}/grow-{calls}.safetensors",
                plan.nodes,
                plan.asked,
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
        )


def line(name: str, rounds: list[Sampled]) -> str:
    """A side's means."""

    def mean(field: str) -> float:
        return statistics.mean(getattr(one, field) for one in rounds)

    return (
        f"{name:12} drawn {mean('drawn'):9.0f}  held {mean('held'):9.0f}  "
        f"calls {mean('calls'):5.1f}  engine {mean('seconds'):8.3f} s  "
        f"planning {mean('planned'):6.3f} s  cut off {mean('truncated'):6.1f}"
    )


def main() -> None:
    """Let the sides take turns and print means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="tiny")
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
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
        print(line(name, rounds))
    alone, trees = found["independent"], found["trees"]
    spent = sum(one.seconds + one.planned for one in trees) / sum(one.seconds for one in alone)
    share = sum(one.drawn for one in trees) / sum(one.held for one in trees)
    print(
        f"drawn of the tokens that trees hold: {share:.3f}; an update could spare {1 - share:.1%}"
    )
    print(f"seconds of trees over those of independent completions: {spent:.2f}")


if __name__ == "__main__":
    main()
