"""The weight_sync task: publish a policy version, load it into every rollout engine, check it."""

from __future__ import annotations

import time

from prefect import task

from engines.rollout_pool import Probe
from tasks.results import Synced, Updated
from tasks.retries import OPTIONS, attempted
from tasks.run import Run


@task(name="weight_sync", **OPTIONS)
def weight_sync(run: Run, step: int, updated: Updated) -> Synced:
    """Bring version step to the store and to the engines that sample.

    The version reported, the digest of the bytes loaded and the log-probs of a short probe must all
    agree with the trainer's; a mismatch is an error that no retry hides.
    """
    return publish_and_sync(run, updated.version, step)


def publish_and_sync(run: Run, version: int, step: int) -> Synced:
    """Publish a version, load it into the rollout engines, and check it on a probe."""
    start = time.monotonic()
    with attempted(run, step, "weight_sync"):
        weights = run.shared_weights if version == run.start else None
        if weights is None:
            weights = run.engines.actor.export(version, run.config.rollout.dtype)
        exported = time.monotonic()
        tokens, lengths = run.probe()
        probe = Probe(
            tokens=tokens,
            prompt_lengths=lengths,
            logprobs=run.engines.actor.score(version, tokens, lengths),
        )
        loaded = run.engines.rollouts.sync(weights, probe)
    reports = [load.report for load in loaded.values()]
    return Synced(
        weights=weights,
        workers=sorted(loaded),
        metrics={
            "weights/publish_seconds": exported - start,
            "weights/load_seconds": max(report.seconds for report in reports),
            "weights/bytes": float(weights.nbytes),
            "weights/probe_error": max(load.logprob_error for load in loaded.values()),
        },
    )
