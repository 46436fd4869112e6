"""The weight_sync task: publish a policy version, load it into every rollout engine, check it."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from prefect import task

from engines.failures import InfrastructureError, WeightMismatch
from engines.rollout.weight_probe import CheckedLoad, Probe
from engines.weight_transfer.offer import TransferOffer, TransferReport
from storage.objects.errors import VersionTaken
from storage.objects.node_cache import is_kept
from storage.runs.forks import shared_weights
from storage.runs.retention import remove_version
from storage.runs.weights import WeightsRef
from tasks.results import Synced, Updated
from tasks.run.events import Note, WeightsPublished
from tasks.run.roles import ACTOR, ROLLOUT
from tasks.run.run import Run
from tasks.run.run_record import parent_config
from tasks.run.stage import OPTIONS, attempted


@task(name="weight_sync", task_run_name="weight_sync", **OPTIONS)
def weight_sync(run: Run, step: int, updated: Updated, whole: bool) -> Synced:
    """Bring version step to the store and to the engines that sample.

    The version reported, the digest of the bytes loaded and the log-probs of a short probe must all
    agree with the trainer's; a mismatch is an error that no retry hides. `whole`: people may want
    to load the version's folder, so it is not stored as a difference.
    """
    return publish_and_sync(run, updated.version, step, whole)


def publish_and_sync(run: Run, version: int, step: int, whole: bool = True) -> Synced:
    """Publish a version, load it into the rollout engines, and check it on a probe.

    Engines on the trainer's machine may load it while it is on its way to the store. Returns once
    it is there. Where a trainer was lost and the version is made anew with other bits, as on a GPU,
    that takes the place of the first, so long as no sample can have been drawn from it.
    """
    start = time.monotonic()
    actor, dtype = run.engines[ACTOR], run.config.rollout.dtype

    tokens, lengths = run.probe()

    def settle() -> tuple[WeightsRef, float]:
        try:
            return actor.settle(version, dtype, whole), time.monotonic()
        except VersionTaken as taken:
            raise made_otherwise(run, version, str(taken)) from taken

    with (
        attempted(run, step, "weight_sync") as attempt,
        run.engines.holding(attempt.assignment, "actor", "rollout"),
        ThreadPoolExecutor(1) as aside,
    ):
        shared = parents_weights(run) if version == run.start else None
        weights = shared or export(run, version, whole)
        exported = time.monotonic()
        # What the trainer still has to do, one after the other, is done while the engines load. The
        # calls of the thread beside belong to this attempt's span.
        here = contextvars.copy_context
        stored_at = exported
        sending: Future[TransferReport] | None = None
        later: list[Future[Any]] = []

        def go_on() -> None:
            later.append(aside.submit(here().run, actor.score, version, tokens, lengths))
            if shared is None and goes_behind(run):
                later.append(aside.submit(here().run, settle))

        def offered(receivers: int) -> TransferOffer:
            """Have the trainer send the version first: the engines wait for it."""
            nonlocal sending
            assert way != "store", "engines are offered nothing then"
            offer = actor.offer(version, dtype, way, receivers, timeout)
            sending = aside.submit(here().run, actor.send, version, dtype)
            go_on()
            return offer

        way, timeout = (
            run.config.rollout.weight_transfer,
            run.config.rollout.weight_transfer_timeout,
        )
        transfers = way != "store" and shared is None
        if not transfers:
            go_on()
        if run.config.cluster.share_devices:  # it would take the devices from engines that load
            wait(later)
        probe = Probe(tokens=tokens, prompt_lengths=lengths, expected=lambda: later[0].result())
        run.tell(WeightsPublished(version=version, nbytes=weights.nbytes))
        loaded = run.engines[ROLLOUT].sync(weights, probe, offered if transfers else None)
        if sending is not None:
            say_missed(run, version, sending, loaded)
        if len(later) > 1:
            settled, stored_at = later[1].result()
            check_settled(run, weights, settled)
        if shared is None:
            say_made_anew(run, weights)
    reports = [load.report for load in loaded.values()]
    transferred = {}
    if sending is not None:
        share = sum(report.transferred for report in reports) / len(reports)
        transferred["weights/transferred"] = share
    return Synced(
        weights=weights,
        workers=sorted(loaded),
        metrics={
            "weights/publish_seconds": exported - start,
            "weights/stored_seconds": stored_at - start,
            "weights/load_seconds": max(report.seconds for report in reports),
            "weights/waited_seconds": max(report.waited for report in reports),
            "weights/bytes": float(weights.nbytes),
            "weights/bytes_stored": float(
                weights.nbytes if weights.stored is None else weights.stored
            ),
            "weights/probe_error": max(load.logprob_error for load in loaded.values()),
            **transferred,
        },
    )


def say_missed(
    run: Run,
    version: int,
    sending: Future[TransferReport],
    loaded: Mapping[str, CheckedLoad],
) -> None:
    """Say so where engines had to read a version from the store which the trainer was to send them.

    What became of the trainer is none of it: it is asked for more, and built anew if it was lost.
    """
    try:
        why = sending.result().why
    except InfrastructureError as error:
        why = str(error)
    missed = {name: load.report.missed for name, load in loaded.items() if load.report.missed}
    if missed:
        run.tell(
            Note(
                text=f"{len(missed)} of {len(loaded)} engines read version {version} from the store: "
                f"{why or next(iter(missed.values()))}.",
                warning=True,
            )
        )


def goes_behind(run: Run) -> bool:
    """Whether the trainer's machine may have a version before the store, or its disk, has it."""
    store = run.files.store
    return not store.backend.remote or is_kept(store, run.config.store.node_cache_bytes)


def export(run: Run, version: int, whole: bool) -> WeightsRef:
    """Have the trainer publish a version, in place of a lost one's of its name."""
    actor, dtype = run.engines[ACTOR], run.config.rollout.dtype
    try:
        return actor.export(version, dtype, whole)
    except VersionTaken as taken:
        if not unused(run, version):
            raise made_otherwise(run, version, str(taken)) from taken
        text = f"{taken} A trainer that was lost had published it; no sample is of it, so it goes."
        run.tell(Note(text=text, warning=True))
        remove_version(run.files, version)
        return actor.export(version, dtype, whole)


def unused(run: Run, version: int) -> bool:
    """Whether no commit names a version, and no sample can have been drawn from it."""
    return version > run.head and run.config.max_staleness == 0


def made_otherwise(run: Run, version: int, what: str) -> Exception:
    """A trainer made a version anew, with other bits than the engines may have loaded already.

    An error that the task is tried again after, or the run's end where samples may be of the first.
    """
    if unused(run, version):
        return InfrastructureError(f"{what} The engines load it again.")
    return WeightMismatch(
        f"{what} With max_staleness = {run.config.max_staleness} samples may be of the lost weights "
        "and would have no origin. Resume the run."
    )


def check_settled(run: Run, announced: WeightsRef, settled: WeightsRef) -> None:
    """Raise where the store got other weights than the engines may have loaded."""
    if settled.digest != announced.digest:
        raise made_otherwise(
            run,
            announced.version,
            f"The trainer was lost while version {announced.version} was on its way to the store. "
            f"Made anew it has digest {settled.digest}, not {announced.digest}: its sums are not "
            "reproducible.",
        )


def parents_weights(run: Run) -> WeightsRef | None:
    """The parent's policy version that a fork samples with first, without a copy."""
    if run.origin is None or not run.origin.fork:
        return None
    same = parent_config(run.files, run.origin).rollout.dtype == run.config.rollout.dtype
    return shared_weights(run.files) if same else None


def say_made_anew(run: Run, weights: WeightsRef) -> None:
    """Say so where a fork had to make its parent's version again, and whether it is the same."""
    origin = run.origin
    if origin is None or not origin.fork or weights.version != run.start:
        return
    if weights.digest == origin.weights.digest:
        text = (
            f"The weights of {origin} are no longer in the store. They were made anew from its "
            "trainer state, with the same digest."
        )
    else:
        text = (
            f"The weights that {origin} was committed with are not shared: this run begins with "
            f"digest {weights.digest}, not {origin.weights.digest}. Another rollout.dtype does "
            "that, and so does replay on devices whose sums are not reproducible."
        )
    run.tell(Note(text=text, warning=weights.digest != origin.weights.digest))
