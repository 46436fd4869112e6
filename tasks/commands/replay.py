"""Making a committed update again, from the stored batches, and comparing what comes out.

What has to come out are the committed weights to the bit, or within a tolerance, where sums come in
another order and are rounded otherwise. The measure is the share of the way: of two versions the sum
over all weights of the absolute differences, divided by that sum between the stored state that the
replay began with and the committed version.

The tolerance is a tenth. Products of bfloat16 round a number by up to 2^-8 of its size, so a gradient
whose sums are in another order is another one by about that share, and AdamW, which divides a
gradient by its own size, gives an element whose gradient is smaller than its rounding any step there
is. Together that may be some per cent of the way; on a CPU it was a thousandth. The update of another
batch is off by half of the way and more.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from configs.algorithm.distillation import recorded_algorithm
from configs.grpo import GRPOConfig
from configs.overrides import change
from configs.resolving import resolve, this_machine
from configs.terminal_text import print_text
from engines.clusters.opening import open_cluster
from engines.train.contract import MadeOn, WeightsComparison
from engines.train.trainer import Trainer, opener_of, trainer_on
from engines.workers.cluster import Cluster
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import Commit, head, read_commit, read_outline
from storage.runs.forks import check_state
from storage.runs.run_store import RunStore, committer, numbered, start_of
from tasks.commands.command import Answer, Request, heading, table, text
from tasks.run.engines import ENGINE_MODULES
from tasks.run.roles import environment_spec, train_spec
from tasks.run.run_record import settings_of

if TYPE_CHECKING:
    from rich.console import RenderableType


TOLERANCE = 0.1  # share of the way


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayDemand:
    """What is demanded of a replay."""

    bits: bool  # equal weights; else within the tolerance
    why: str  # a clause, for people


def demand_of(
    update: Mapping[str, JsonValue], now: MadeOn, ranks: int, threads: int
) -> ReplayDemand:
    """What a replay must give.

    Args:
        update: What the commit says of how its update was made.
        now: On what it was made again.
        ranks: That made it again.
        threads: Of each of them.
    """
    record = update.get("made_on")
    if not isinstance(record, Mapping):
        return ReplayDemand(bits=True, why="the commit does not say on what it was made")
    was = MadeOn.of(record)
    reasons = (
        None if was.fixed else _open(update, was),
        None if now.fixed else f"here ({now.device}) sums have no fixed order",
        _changed("devices", was.device, now.device),
        _changed("versions of torch", was.torch, now.torch),
        _changed("numbers of ranks", update.get("ranks"), ranks),
        _changed("numbers of threads", update.get("threads"), threads),
        _before_kernels(update, was),
    )
    for reason in reasons:
        if reason is not None:
            return ReplayDemand(bits=False, why=reason)
    return ReplayDemand(
        bits=True, why=f"both were made on a {was.device} with a fixed order of sums"
    )


def share_of_way(apart: WeightsComparison, way: WeightsComparison) -> float:
    """How far the replayed weights are from the committed ones; both compared with the latter.

    Args:
        apart: The replayed weights.
        way: The weights of the stored state that the replay began with.
    """
    whole = sum(tensor.total for tensor in way.differing)
    off = sum(tensor.total for tensor in apart.differing)
    return off / whole if whole else float("inf") if off else 0.0


def _open(update: Mapping[str, JsonValue], was: MadeOn) -> str:
    train = update.get("train")
    if isinstance(train, Mapping) and train.get("compile"):
        return "layers were compiled (train.compile), whose kernels may add in another order"
    return (
        f"on the {was.device} sums had no fixed order (train.deterministic = false): attention's "
        "backward pass adds with atomics"
    )


def _before_kernels(update: Mapping[str, JsonValue], was: MadeOn) -> str | None:
    """Of an update on a GPU by an older Refrain, whose commits have no train.kernels."""
    train = update.get("train")
    if was.on_cpu or not isinstance(train, Mapping) or "kernels" in train:
        return None
    return "it was made by a Refrain without train.kernels, whose sums on a GPU have another order"


def _changed(what: str, was: object, now: object) -> str | None:
    return None if was == now else f"{what} differ, {was} and {now}"


ROLE = "replay"  # on the workers: the run's own engines, should it be running, stay as they are
SHOWN = 10  # differing tensors named on the terminal; --json has all
FIGURES = ("train/loss", "train/grad_norm")  # compared too, for a first idea of what differs


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """An update that was made again."""

    digest: str  # of the version that came out
    comparison: WeightsComparison | None  # None where the committed version's weights are gone
    replayed_from: int  # version of the stored state that it was rebuilt from
    metrics: dict[str, float]
    demand: ReplayDemand
    equal: bool  # to the bit
    share: float | None  # of the way; None where bits are equal or demanded, or weights are gone

    @property
    def within(self) -> bool:
        """Whether a tolerance is in place, and kept."""
        return self.share is not None and self.share <= TOLERANCE


def answer(request: Request) -> Answer:
    """Replay the update of the step that was named, or its episodes."""
    files, step = named_step(request)
    if request.arguments.episodes:
        return replayed_episodes(files, step)
    commit = made_again(files, step)
    config = settings(files, commit, request.cluster)
    done = replay(files, commit, config)
    return Answer(
        record=_record(files, commit, done),
        shown=_shown(files, commit, done),
        good=done.equal or done.within,
    )


def made_again(files: RunStore, step: int) -> Commit:
    """The commit of a step of which all is there. Raises ValueError where it is not."""
    commit = read_commit(files, step)
    try:
        check_state(files, step - 1)
        for key in commit.refs["batch"].objects:
            files.store.size(key)
    except ObjectMissing as error:
        raise ValueError(
            f"Step {step} of run {files.run} cannot be made again: retention removed what it was "
            f"made of ({error}). Set store.keep_steps and store.keep_snapshots higher in a run "
            "whose steps are to be replayed."
        ) from error
    return commit


def named_step(request: Request) -> tuple[RunStore, int]:
    """The step that was asked for, and the run that made it. Raises ValueError for none."""
    step = request.arguments.step
    newest = head(request.files) or start_of(request.files)
    if not 1 <= step <= newest:
        raise ValueError(
            f"Run {request.files.run} has no committed step {step}. {numbered(1, newest)}"
        )
    return committer(request.files, step)  # it may be one of the run it was forked from


def settings(files: RunStore, commit: Commit, cluster: Any) -> GRPOConfig:
    """The settings with which a step was made; `cluster`: words that change where it is now."""
    config = settings_of(files)
    config = change(type(config), config.model_dump(mode="json"), cluster)
    config = resolve(config, this_machine()).settings  # of pools that the words have added
    steps = commit.update.get("steps")  # a resumed run may have been given more
    return config.model_copy(update={"steps": steps}) if isinstance(steps, int) else config


def replay(files: RunStore, commit: Commit, config: GRPOConfig) -> Replayed:
    """Start the train workers alone, rebuild the version before, and apply the step's batch."""
    with lone_trainer(files, config, commit.step) as trainer:
        algorithm = recorded_algorithm(commit.algorithm)
        result = trainer.update(commit.step, commit.refs["batch"], algorithm)
        dtype, weights = config.rollout.dtype, commit.version_out
        comparison = None
        if files.store.exists(f"{weights.key}/manifest.json"):
            comparison = trainer.compare(commit.step, weights, dtype)
        digest = comparison.digest if comparison else trainer.digest(commit.step, dtype)
        equal, share, base = digest == weights.digest, None, trainer.base
        demand = _demand(files, range(base + 1, commit.step + 1), config, result.made_on)
        if not (equal or demand.bits or comparison is None):
            _say(f"not equal to the bit: back to version {base}, to see how long the way was")
            way = trainer.compare(base, weights, dtype)
            share = share_of_way(comparison, way)
    return Replayed(
        digest=digest,
        comparison=comparison,
        replayed_from=base,
        metrics=dict(result.metrics),
        demand=demand,
        equal=equal,
        share=share,
    )


@contextmanager
def lone_trainer(files: RunStore, config: GRPOConfig, step: int) -> Iterator[Trainer]:
    """A trainer on workers of its own, which makes updates up to a step again."""
    for name in ("distributed", "fsspec", "botocore"):
        logging.getLogger(name).setLevel(logging.ERROR)
    roles = config.cluster.roles
    pools = {roles.actor: config.cluster.pools[roles.actor]}
    if config.train.engine == "elastic":
        aggregator = roles.pool_of("aggregator")
        pools[aggregator] = config.cluster.pools[aggregator]
    _say(f"starting {sum(pool.workers for pool in pools.values())} train worker(s)")
    only = config.cluster.model_copy(update={"pools": pools})
    with open_cluster(only, preload=ENGINE_MODULES) as cluster:
        yield _trainer(cluster, files, config, step)


def _demand(files: RunStore, steps: range, config: GRPOConfig, now: MadeOn) -> ReplayDemand:
    """What is demanded after these steps, which were all made again: bits, if of each of them."""
    pool = config.cluster.pools[config.cluster.roles.actor]
    ranks = 1 if config.train.engine == "elastic" else pool.workers
    demands = [
        demand_of(read_outline(files, step).update, now, ranks, pool.threads) for step in steps
    ]
    return next((demand for demand in demands if not demand.bits), demands[-1])


def _trainer(cluster: Cluster, files: RunStore, config: GRPOConfig, last: int) -> Trainer:
    return trainer_on(
        cluster,
        config,
        files,
        train_spec(config, files, "actor"),
        ROLE,
        opener=opener_of(config, "actor"),
        epoch=1,
        on_replay=lambda step, _: _say(f"applying the batch of step {step} on the way to {last}"),
        caller=f"{files.run}-replay-{uuid.uuid4().hex[:8]}",
    )


def _say(line: str) -> None:
    print_text(line, error=True, flush=True)


def _compared_metrics(
    commit: Commit, done: Replayed
) -> dict[str, tuple[float | None, float | None]]:
    return {name: (commit.metrics.get(name), done.metrics.get(name)) for name in FIGURES}


def _record(files: RunStore, commit: Commit, done: Replayed) -> dict[str, object]:
    return {
        "run": files.run,
        "step": commit.step,
        "equal": done.equal,
        "demanded": "bits" if done.demand.bits else "tolerance",
        "why": done.demand.why,
        "tolerance": None if done.demand.bits else TOLERANCE,
        "share_of_way": done.share,
        "committed": commit.version_out.digest,
        "replayed": done.digest,
        "replayed_from_version": done.replayed_from,
        "weights_in_store": done.comparison is not None,
        "differing": [asdict(tensor) for tensor in done.comparison.differing]
        if done.comparison
        else [],
        "metrics": {
            name: {"committed": was, "replayed": now}
            for name, (was, now) in _compared_metrics(commit, done).items()
        },
    }


def _shown(files: RunStore, commit: Commit, done: Replayed) -> list[RenderableType]:
    lines: list[RenderableType] = [
        heading(f"Step {commit.step} of {files.run}, rebuilt from version {done.replayed_from}"),
        text(f"  committed  {commit.version_out.digest}"),
        text(f"  replayed   {done.digest}"),
    ]
    for name, (was, now) in _compared_metrics(commit, done).items():
        same = "the same" if was == now else f"was {was}"
        lines.append(text(f"  {name:<16} {now}  ({same})"))
    demand = "Equal bits are" if done.demand.bits else f"A tolerance of {TOLERANCE:.0%} is"
    lines.append(text(f"{demand} demanded: {done.demand.why}."))
    if done.equal:
        return [*lines, text("Equal, to the bit.", "bold green")]
    if done.comparison is None:
        why = "They differ; the committed weights are no longer in the store, so not known where."
        return [*lines, text(why, "bold red")]
    return [*lines, *_differences(commit, done, done.comparison)]


def _differences(
    commit: Commit, done: Replayed, comparison: WeightsComparison
) -> list[RenderableType]:
    differing = comparison.differing
    first = differing[0]
    summary = (
        f"{len(differing)} of {comparison.tensors} tensors differ, first {first.name}: by at "
        f"most {first.largest:.3g}, in {first.elements} elements."
    )
    rows = table("tensor", "shape", "elements that differ", "largest difference")
    for tensor in differing[:SHOWN]:
        rows.add_row(tensor.name, str(tensor.shape), str(tensor.elements), f"{tensor.largest:.3g}")
    if done.share is None:
        return [text(summary, "bold red"), rows]
    verdict = "kept" if done.within else "not kept"
    way = (
        f"The tolerance is {verdict}: of the way from version {done.replayed_from} to "
        f"{commit.step}, {done.share:.3%} came out otherwise."
    )
    return [text(summary), rows, text(way, "bold green" if done.within else "bold red")]


def replayed_episodes(files: RunStore, step: int) -> Answer:
    """Replay the episodes of a step: seed, row and the policy's turns as stored."""
    from engines.episodes.environment_engine import EnvironmentEngine

    config, commit = settings_of(files), read_commit(files, step)
    if config.episodes is None:
        raise ValueError(f"Run {files.run} plays no episodes: its answers have one turn.")
    samples = commit.refs["samples"]
    engine = EnvironmentEngine(environment_spec(config, config.episodes, files.store))
    try:
        answered = "turn_order" if "turn_order" in samples.names else "turn_rewards"
        turns = int(samples.lengths(files.store, answered).sum())
        differing = engine.replay(samples)
    except ObjectMissing as error:
        raise ValueError(
            f"The episodes of step {step} of run {files.run} cannot be stepped again: retention "
            f"removed them ({error}). Set store.keep_steps higher in a run to be replayed."
        ) from error
    finally:
        engine.close()
    verdict = (
        "the environments say the same again"
        if not differing
        else f"the environments of {len(differing)} say something else"
    )
    played = len(samples) // config.episodes.players
    lines = [heading(f"{played} episodes of {turns} turns, step {step} of {files.run}: {verdict}.")]
    lines += [text(f"  sample {sample}: {error}") for sample, error in differing]
    record = {
        "run": files.run,
        "step": step,
        "episodes": played,
        "turns": turns,
        "differing": [{"sample": sample, "error": error} for sample, error in differing],
    }
    return Answer(record=record, shown=lines, good=not differing)
