"""Whether an evaluation that a run knows is there, whole, and what its own samples bear out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.audit.audit_objects import Read, check_batch, sources_in
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.evaluations.results import EvaluationResult, read_result
from storage.runs.run_store import RunStore


def check_evaluation(
    run: RunStore,
    suite: str,
    version: int,
    key: str,
    digests: Mapping[int, str | None],
    read: Read,
) -> None:
    """Read an evaluation whole. Raises ObjectMissing, ObjectDamaged, ValueError for a contradiction.

    key: of its result, which the run names as that of a suite on a version. digests: of the run's
    versions, as its commits say.
    """
    result = read_result(run.store, key)
    read.count(key, run.store.size(key))
    name = f"The evaluation of {suite} on version {version} of {run.run}"
    expected = digests.get(version)
    if expected is not None and result.weights.digest != expected:
        raise ValueError(
            f"{name} measured weights {result.weights.digest}, and the version has {expected}."
        )
    for source in sources_in((result.prompts, result.samples)).values():
        check_batch(run.store, source, read)
    _check_samples(run, name, result)


def _check_samples(run: RunStore, name: str, result: EvaluationResult) -> None:
    """Counts, mean, and the weights that each sample was drawn with."""
    samples = result.samples.of_policy(run.store)
    rewards, status = (samples.fetch_numpy(run.store, column)[0] for column in ("reward", "status"))
    failed = np.isnan(rewards)
    if not (failed == (status == SampleStatus.FAILED)).all():
        raise ValueError(f"{name} has samples that failed and have a reward, or the reverse.")
    counted = {"samples": len(rewards), "failed": int(failed.sum())}
    for metric, count in counted.items():
        if result.metrics.get(metric) != count:
            raise ValueError(
                f"{name} says {metric} = {result.metrics.get(metric)}, and its samples are {count}."
            )
    digests = set(samples.fetch_list(run.store, "weights_digest"))
    if digests != {result.weights.digest}:
        raise ValueError(
            f"{name} is of weights {result.weights.digest}, and samples were drawn with "
            f"{', '.join(sorted(map(str, digests - {result.weights.digest})))}."
        )
    recorded, mean = result.metrics.get("reward"), _mean(rewards, samples, run)
    if mean is not None and (recorded is None or abs(mean - recorded) > 1e-9):
        raise ValueError(f"{name} says reward = {recorded}, and its samples {mean}.")


def _mean(rewards: NDArray[Any], samples: BatchRef, run: RunStore) -> float | None:
    """Mean over prompts of the mean of their scored samples; rewards: [N]."""
    scored = ~np.isnan(rewards)
    if not scored.any():
        return None
    rows = samples.fetch_numpy(run.store, "prompt_row")[0][scored]
    _, place = np.unique(rows, return_inverse=True)
    sums = np.bincount(place, weights=rewards[scored].astype(np.float64))
    return float((sums / np.bincount(place)).mean())
