"""Metrics of a step's samples, as a person reads them on a curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.algorithms.group_advantages import Groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the samples of a step came to."""

    rewards: NDArray[np.float32]  # [N], the weighted sums; not a number where failed
    # name -> [N], what each reward function gave; not a number where it failed, or does not apply to
    # the sample (the function returned None).
    components: dict[str, NDArray[np.float32]]
    failed: NDArray[np.bool_]  # [N], scoring failed
    truncated: NDArray[np.bool_]  # [N], ended by the limit of new tokens
    lengths: NDArray[np.int64]  # [N], response tokens
    groups: NDArray[np.int64]  # [N], samples of one prompt share a number
    # [N], share of each response's n-grams that came before in it; None: not measured.
    repeated: NDArray[np.float32] | None = None

    def at(self, there: NDArray[np.bool_]) -> Measured:
        """Those of some samples."""
        return Measured(
            rewards=self.rewards[there],
            components={name: part[there] for name, part in self.components.items()},
            failed=self.failed[there],
            truncated=self.truncated[there],
            lengths=self.lengths[there],
            groups=self.groups[there],
            repeated=None if self.repeated is None else self.repeated[there],
        )


def task_metrics(
    measured: Measured, tasks: NDArray[np.str_], right_from: float
) -> dict[str, float]:
    """The same of each task's samples, as task/NAME/…; and of these:

    task/NAME/prompts: groups. task/NAME/right: share of the samples that did not fail whose reward is
    at least right_from; absent where all failed.

    Args:
        measured: of N samples.
        tasks: [N], the name of each one's task.
        right_from: a reward.
    """
    found: dict[str, float] = {}
    for name in np.unique(tasks).tolist():
        own = measured.at(tasks == name)
        metrics = {**sample_metrics(own), "prompts": float(len(np.unique(own.groups)))}
        if not own.failed.all():
            metrics["right"] = float((own.rewards[~own.failed] >= right_from).mean())
        found |= {f"task/{name}/{metric}": value for metric, value in metrics.items()}
    return found


def sample_metrics(measured: Measured) -> dict[str, float]:
    """Reward, length and group metrics of the samples of a step; a failed one counts nowhere.

    Returns:
        samples/total, samples/failed and samples/failed_fraction, and over the samples that did not
        fail, if there are any: response/*, reward/mean, std, min, max (std with the divisor n - 1);
        over the groups that have such samples: reward/group_std, the mean of their deviations
        (n - 1; 0 for one sample), and groups/without_variance, the share whose rewards are all
        equal. reward/<name>: the mean over the samples to which the function applies; absent where
        it applies to none.
    """
    rewards, failed, repeated = measured.rewards, measured.failed, measured.repeated
    metrics = {
        "samples/total": float(len(rewards)),
        "samples/failed": float(failed.sum()),
        "samples/failed_fraction": float(failed.mean()),
    }
    good = torch.from_numpy(~failed)
    if not bool(good.any()):
        return metrics
    scores = torch.from_numpy(rewards)[good]
    truncated = torch.from_numpy(measured.truncated)
    size = torch.from_numpy(measured.lengths)[good].double()
    metrics |= {
        "response/tokens_mean": float(size.mean()),
        "response/tokens_max": float(size.max()),
        "response/truncated_fraction": float(truncated[good].double().mean()),
        **_reward_metrics(scores, torch.from_numpy(measured.groups)[good]),
    }
    if repeated is not None:
        metrics["response/repeated_ngrams"] = float(
            torch.from_numpy(repeated)[good].double().mean()
        )
    for name, component in measured.components.items():
        given = torch.from_numpy(component)[good].double()
        if not bool(given.isnan().all()):
            metrics[f"reward/{name}"] = float(given.nanmean())
    return metrics


def _reward_metrics(scores: Tensor, groups: Tensor) -> dict[str, float]:
    by_prompt, whole = Groups.of(groups), Groups.of(torch.zeros_like(groups))
    return {
        "reward/mean": float(whole.mean(scores)),
        "reward/std": float(whole.deviation(scores)),
        "reward/min": float(scores.min()),
        "reward/max": float(scores.max()),
        "reward/group_std": float(by_prompt.deviation(scores).mean()),
        "groups/without_variance": float(by_prompt.uniform(scores).double().mean()),
    }


def episode_metrics(
    *,
    turns: NDArray[np.int64],
    tokens: NDArray[np.int64],
    seconds: NDArray[np.float64],
    ended: Sequence[str],
    drawn: NDArray[np.bool_],
    mask: NDArray[np.bool_],
    rewritten: NDArray[np.float32] | None = None,
) -> dict[str, float]:
    """What a step's episodes were like, failed ones among them.

    Args:
        turns: [N], of the model, that the environment answered.
        tokens: [N], of the whole conversation after its prompt.
        seconds: [N], in the environment.
        ended: [N], why each ended (engines/data/results.py).
        drawn: [T], response tokens that an engine drew.
        mask: [T], those that can train.
        rewritten: [N], share of the tokens before the last turn that the chat template would have
            written otherwise; None: it leaves earlier turns as they were.

    Returns:
        episode/*. episode/drift is the share, of the tokens that are drawn or can train, that are
        not both. It is 0 as long as what the policy wrote stands as it was drawn.
        episode/template_drift is the mean of `rewritten`: what the policy reads while it trains and
        would not read in a server that renders each request anew.
    """
    drift = {} if rewritten is None else {"episode/template_drift": float(rewritten.mean())}
    either = int((drawn | mask).sum())
    return {
        **drift,
        "episode/drift": float((drawn != mask).sum() / max(either, 1)),
        "episode/turns_mean": float(turns.mean()),
        "episode/turns_max": float(turns.max()),
        "episode/tokens_mean": float(tokens.mean()),
        "episode/environment_seconds_mean": float(seconds.mean()),
        "episode/environment_seconds_max": float(seconds.max()),
        **{f"episode/ended_by_{why}": n / len(ended) for why, n in Counter(ended).items()},
    }
