"""Adapters for reward_shaping.json."""

from __future__ import annotations

import torch

from configs.algorithm.corrections import OverlongPenalty
from engines.algorithms.aggregation import Rows
from engines.algorithms.reward_shaping import overlong_penalty, repetition_penalty
from engines.algorithms.sample_selection import informative_groups
from tests.parity.answers import Adapter, Answer
from tests.parity.vectors import Case


def dapo_overlong_case(case: Case) -> Answer:
    params = case.params
    if params["max_resp_len"] is None:
        raise ValueError("an overlong penalty needs the longest response's length")
    setting = OverlongPenalty(
        max_tokens=params["max_resp_len"],
        buffer=params["overlong_buffer_len"],
        factor=params["penalty_factor"],
        floor=None,
    )
    lengths, score = torch.tensor(case.inputs["response_length"]), case.tensor("score")
    penalty = overlong_penalty(lengths, **setting.model_dump()).to(case.dtype)
    # The reference puts the reward of an empty response into the last column.
    column = torch.where(lengths > 0, lengths - 1, params["response_width"] - 1)
    placed = torch.zeros(len(lengths), params["response_width"], dtype=case.dtype)
    placed[torch.arange(len(lengths)), column] = score + penalty
    return {"reward_tensor": placed, "overlong_reward": penalty, "overlong": penalty < 0}


def soft_overlong_case(case: Case) -> Answer:
    setting = OverlongPenalty(
        max_tokens=case.params["max_completion_len"], buffer=case.params["soft_punish_cache"]
    )
    lengths = torch.tensor(case.inputs["length"])
    return {"reward": overlong_penalty(lengths, **setting.model_dump())}


def repetition_case(case: Case) -> Answer:
    completions = case.inputs["completion_ids"]
    rows = Rows.of_lengths(torch.tensor([len(ids) for ids in completions]))
    ids = torch.tensor([token for ids in completions for token in ids], dtype=torch.int64)
    reward = repetition_penalty(
        ids, rows, ngram=case.params["ngram_size"], factor=-case.params["max_penalty"]
    )
    return {"reward": reward}


def group_filter_case(case: Case) -> Answer:
    groups = case.inputs["rewards"]
    names = list(groups)
    # With the metric "reward" the values pass through float32.
    dtype = torch.float32 if case.params["metric"] == "reward" else torch.float64
    values = torch.tensor([v for r in groups.values() for v in r], dtype=torch.float64).to(dtype)
    ids = torch.tensor([i for i, rewards in enumerate(groups.values()) for _ in rewards])
    keep = informative_groups(values, ids, keep_lone=True)
    kept = [name for i, name in enumerate(names) if bool(keep[ids == i].all())]
    by_value: dict[str, int] = {}
    for i, name in enumerate(names):
        if name not in kept:
            value = str(float(values[ids == i][0]))
            by_value[value] = by_value.get(value, 0) + 1
    return {
        "kept": kept,
        "dropped": [name for name in names if name not in kept],
        "dropped_by_value": by_value,
    }


ADAPTERS: dict[str, Adapter] = {
    "dapo_overlong": dapo_overlong_case,
    "soft_overlong_punishment": soft_overlong_case,
    "repetition_penalty": repetition_case,
    "group_filter": group_filter_case,
}
