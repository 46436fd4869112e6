"""Why samples of a step could not be scored, in words, for a step that fails by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from configs.grpo import GRPOConfig
from engines.data.results import FAILED, PATHS, TOKENS, TURN_TOKENS, TURNS
from engines.rewards.runner import NO_FUNCTION
from engines.train.batching.packing import WHOLE
from storage.batches.columns import TASK, SampleStatus
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from tasks.results import Scored

MOST = 3  # causes that are told, those of the most samples


def causes_of(config: GRPOConfig, store: Store, samples: BatchRef, scored: Sequence[Scored]) -> str:
    """Sentences on what kept samples from a reward, by number; empty where nothing is known.

    samples: [N] of the step, scored; scored: the same by shards.
    """
    counts: Counter[str] = Counter()
    unrewarded = 0
    for shard in scored:
        for cause in shard.causes:
            if cause.error == NO_FUNCTION:
                unrewarded += cause.samples
            else:
                counts[f"{cause.function}: {cause.error}"] += cause.samples
    total = len(samples)
    said = [f"{count} of {total} samples: {cause}" for cause, count in counts.most_common(MOST)]
    if unrewarded and "episode" in samples.names:
        said += episode_causes(config, store, samples)
    elif unrewarded:
        said.append(f"{unrewarded} of {total} samples: {NO_FUNCTION}")
    failed = sum(shard.failures for shard in scored)
    if config.rewards.on_failure == "drop" and failed < total:
        said.append(
            "rewards.on_failure = drop leaves out a whole group for one such sample; in a new run "
            f"complete trains on its others ({total - failed} were scored here)"
        )
    return " ".join(f"{one.rstrip('.')}." for one in said)


def episode_causes(config: GRPOConfig, store: Store, samples: BatchRef) -> list[str]:
    """How episodes ended that have no reward, with the limit that ended them."""
    ends = list(map(str, samples.fetch_list(store, "episode")))
    errors = list(map(str, samples.fetch_list(store, "episode_error")))
    status, _ = samples.fetch_numpy(store, "status")
    tasks = [""] * len(samples)
    if TASK in samples.names:
        tasks = list(map(str, samples.fetch_list(store, TASK)))
    found: Counter[str] = Counter()
    for end, error, one, task in zip(ends, errors, status.tolist(), tasks, strict=True):
        if one == SampleStatus.FAILED:
            why = limit_of(config, end, task)
            found[why + (f": {error.splitlines()[0]}" if error else "")] += 1
    return [
        f"{count} of {len(ends)} episodes ended by {why} before the environment gave a reward"
        for why, count in found.most_common(MOST)
    ]


def limit_of(config: GRPOConfig, end: str, task: str = "") -> str:
    """What ended an episode, with the setting and its value; `task`: of several, its own."""
    episodes = config.played[task]
    longest = config.data.limits(config.rollout.max_new_tokens)
    settings = {
        TURNS: f"episodes.max_turns = {episodes.max_turns}",
        TURN_TOKENS: f"episodes.max_turn_tokens = {episodes.max_turn_tokens}",
        TOKENS: f"rollout.max_new_tokens = {longest.get(task, config.rollout.max_new_tokens)}"
        + (f", episodes.max_tokens = {episodes.max_tokens}" if episodes.max_tokens else ""),
        PATHS: f"{WHOLE} times train.micro_batch_tokens = {config.train.micro_batch_tokens}",
        "turn_seconds": f"episodes.turn_timeout = {episodes.turn_timeout:g}",
        "seconds": f"episodes.timeout = {episodes.timeout:g}",
        FAILED: "",
    }
    whose = f" of the task {task}" if task else ""
    return f"{end} ({settings[end]}{whose})" if settings.get(end) else (end or "nothing")
