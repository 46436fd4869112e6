"""Metrics of a step's samples, as a person reads them on a curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.algorithms.aggregation import Rows
from engines.algorithms.group_advantages import Groups
from engines.algorithms.reward_shaping import repetition_penalty
from engines.algorithms.sample_selection import Selected
from engines.data.column_reading import components, dense, drawn_tokens, jagged, policy_tokens
from storage.batches.columns import TASK, Author, SampleStatus
from storage.batches.refs import BatchRef
from storage.objects.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleValues:
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

    def at(self, selected: NDArray[np.bool_]) -> SampleValues:
        """Those of some samples."""
        return SampleValues(
            rewards=self.rewards[selected],
            components={name: part[selected] for name, part in self.components.items()},
            failed=self.failed[selected],
            truncated=self.truncated[selected],
            lengths=self.lengths[selected],
            groups=self.groups[selected],
            repeated=None if self.repeated is None else self.repeated[selected],
        )


def task_metrics(
    samples: SampleValues, tasks: NDArray[np.str_], right_from: float
) -> dict[str, float]:
    """The same of each task's samples, as task/NAME/…; and of these:

    task/NAME/prompts: groups. task/NAME/right: share of the samples that did not fail whose reward is
    at least right_from; absent where all failed.

    Args:
        samples: N of them.
        tasks: [N], the name of each one's task.
        right_from: a reward.
    """
    by_task: dict[str, float] = {}
    for name in np.unique(tasks).tolist():
        own = samples.at(tasks == name)
        metrics = {**sample_metrics(own), "prompts": float(len(np.unique(own.groups)))}
        if not own.failed.all():
            metrics["right"] = float((own.rewards[~own.failed] >= right_from).mean())
        by_task |= {f"task/{name}/{metric}": value for metric, value in metrics.items()}
    return by_task


def sample_metrics(samples: SampleValues) -> dict[str, float]:
    """Reward, length and group metrics of the samples of a step; a failed one counts nowhere.

    Returns:
        samples/total, samples/failed and samples/failed_fraction, and over the samples that did not
        fail, if there are any: response/*, reward/mean, std, min, max (std with the divisor n - 1);
        over the groups that have such samples: reward/group_std, the mean of their deviations
        (n - 1; 0 for one sample), and groups/without_variance, the share whose rewards are all
        equal. reward/<name>: the mean over the samples to which the function applies; absent where
        it applies to none.
    """
    rewards, failed, repeated = samples.rewards, samples.failed, samples.repeated
    metrics = {
        "samples/total": float(len(rewards)),
        "samples/failed": float(failed.sum()),
        "samples/failed_fraction": float(failed.mean()),
    }
    good = torch.from_numpy(~failed)
    if not bool(good.any()):
        return metrics
    scores = torch.from_numpy(rewards)[good]
    truncated = torch.from_numpy(samples.truncated)
    size = torch.from_numpy(samples.lengths)[good].double()
    metrics |= {
        "response/tokens_mean": float(size.mean()),
        "response/tokens_max": float(size.max()),
        "response/truncated_fraction": float(truncated[good].double().mean()),
        **_reward_metrics(scores, torch.from_numpy(samples.groups)[good]),
    }
    if repeated is not None:
        metrics["response/repeated_ngrams"] = float(
            torch.from_numpy(repeated)[good].double().mean()
        )
    for name, component in samples.components.items():
        values = torch.from_numpy(component)[good].double()
        if not bool(values.isnan().all()):
            metrics[f"reward/{name}"] = float(values.nanmean())
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
        ended: [N], why each ended (engines/episodes/contract.py).
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


def metrics_of(
    store: Store,
    samples: BatchRef,
    groups: NDArray[np.int64],
    status: NDArray[np.int64],
    right_from: float,
) -> dict[str, float]:
    """Reward and length metrics of all samples, before anything is left out but failures."""
    values = SampleValues(
        rewards=dense(store, samples, "reward"),
        components={name: part.numpy() for name, part in components(store, samples).items()},
        failed=status == SampleStatus.FAILED,
        truncated=status == SampleStatus.TRUNCATED,
        lengths=policy_tokens(store, samples),
        groups=groups,
        repeated=(
            dense(store, samples, "repeated_ngrams") if "repeated_ngrams" in samples.names else None
        ),
    )
    metrics = sample_metrics(values)
    if TASK in samples.names:
        tasks = np.array([str(name) for name in samples.fetch_list(store, TASK)])
        metrics |= task_metrics(values, tasks, right_from)
    if "author" in samples.names:
        authors, bounds = jagged(store, samples, "author")
        ended = (authors == Author.BUDGET).nonzero()[0]
        if len(ended) or "episode" not in samples.names:
            cut = len(np.unique(np.searchsorted(bounds, ended, side="right")))
            metrics["response/thoughts_ended_by_budget"] = cut / len(samples)
    if "episode" in samples.names:
        turns = "turn_order" if "turn_order" in samples.names else "turn_rewards"
        metrics |= episode_metrics(
            turns=samples.lengths(store, turns),
            tokens=samples.lengths(store, "response_ids"),
            seconds=dense(store, samples, "env_seconds"),
            ended=[str(why) for why in samples.fetch_list(store, "episode")],
            drawn=drawn_tokens(store, samples),
            mask=jagged(store, samples, "response_mask")[0].astype(bool),
            rewritten=(
                dense(store, samples, "past_rewritten")
                if "past_rewritten" in samples.names
                else None
            ),
        )
    return metrics


def selection_metrics(selected: Selected, filtered: int) -> dict[str, float]:
    """Samples kept, and left out by each step of the recipe's selection; groups left out."""
    remaining = float(selected.keep.sum())
    return {
        "selection/samples_kept": remaining,
        "selection/samples_left_out": float(selected.keep.numel()) - remaining,
        "selection/groups_left_out": float(filtered),
        **{f"selection/{name}": count for name, count in selected.metrics.items()},
    }


def dropped_by_length(
    store: Store, samples: BatchRef, left_out: BatchRef | None
) -> dict[str, float]:
    """The share that was dropped of each tenth of the step's samples by length, the shortest first.

    Not waiting for answers is biased against long ones; this is by how much. A dropped sample's
    length is what it had by then. Tenths without a sample are left out.
    """
    if left_out is None:
        return {}
    waited, dropped = (policy_tokens(store, ref) for ref in (samples, left_out))
    return drop_rates(waited, dropped)


def drop_rates(waited: NDArray[np.int64], dropped: NDArray[np.int64]) -> dict[str, float]:
    """[K], [D]: lengths in tokens. drop_rate/length_decile_1 … 10, and drop_rate/all.

    Lengths 1 … 8 kept and 9, 10 dropped: 0 in the first eight deciles, 1 in the last two.
    """
    lost = np.concatenate([np.zeros(len(waited), bool), np.ones(len(dropped), bool)])
    order = np.argsort(np.concatenate([waited, dropped]), kind="stable")
    decile = np.empty(len(order), np.int64)
    decile[order] = np.arange(len(order)) * 10 // len(order)
    rates = {
        f"drop_rate/length_decile_{number + 1}": float(lost[decile == number].mean())
        for number in range(10)
        if (decile == number).any()
    }
    return {"drop_rate/all": float(lost.mean()), **rates}


def staleness_metrics(store: Store, samples: BatchRef, version: int) -> dict[str, float]:
    """By how many versions the samples' oldest tokens lag behind the version that trains.

    Samples without a token, or whose versions are not known, are left out.
    """
    if "weight_spans" not in samples.names:
        return {}
    spans, offsets = samples.fetch_numpy(store, "weight_spans")
    assert offsets is not None
    first = np.asarray(offsets[:-1])[np.diff(offsets) > 0]  # of a sample's spans, in order
    if not len(first):
        return {}
    lags = version - np.asarray(spans)[first]
    return {"staleness/mean": float(lags.mean()), "staleness/max": float(lags.max())}


NGRAM = 4  # tokens


def repeated_ngrams(store: Store, samples: BatchRef) -> NDArray[np.float32]:
    """Of each sample's n-grams the share that came before, [N]: 1 - distinct n-grams / n-grams.

    0 for fewer than NGRAM tokens. Of an episode only what the policy wrote counts, as if its turns
    stood one after the other.
    """
    ids, offsets = jagged(store, samples, "response_ids")
    if "author" in samples.names:
        wrote = jagged(store, samples, "response_mask")[0] > 0
        ids, offsets = ids[wrote], np.concatenate([[0], np.cumsum(wrote)])[offsets]
    rows = Rows.of_offsets(torch.from_numpy(np.array(offsets)))
    penalty = repetition_penalty(torch.from_numpy(np.array(ids)), rows, ngram=NGRAM, factor=1.0)
    return (-penalty).numpy().astype(np.float32)
