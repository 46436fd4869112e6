"""Adapters for seqlen_balancing.json: figures to reach or beat."""

from __future__ import annotations

from engines.train.batching.balancing import partition
from tests.parity.answers import Adapter, Answer
from tests.parity.vectors import Case


def partitions_case(case: Case) -> Answer:
    lengths = case.inputs["seqlen_list"]
    parts = partition(
        lengths, case.params["k_partitions"], equal_size=case.params.get("equal_size", False)
    )
    sums = [sum(lengths[i] for i in part) for part in parts]
    return {
        "max_sum": max(sums),
        "min_sum": min(sums),
        "greedy_max_sum": max(sums),
        "greedy_min_sum": min(sums),
        "mean_sum": sum(sums) / len(sums),
    }


def micro_batches_case(case: Case) -> Answer:
    lengths, budget = case.inputs["seqlen_list"], case.params["max_token_len"]
    divisor = case.params.get("num_batches_divided_by") or 1
    count = max(-(-sum(lengths) // budget), case.params.get("min_num_micro_batch") or 1)
    count = -(-count // divisor) * divisor
    while True:
        tokens = [sum(lengths[i] for i in part) for part in partition(lengths, count)]
        if max(tokens) <= budget:
            break
        count += divisor
    return {"num_micro_batches": count, "max_tokens": max(tokens), "min_tokens": min(tokens)}


ADAPTERS: dict[str, Adapter] = {
    "seqlen_balanced_partitions": partitions_case,
    "rearrange_micro_batches": micro_batches_case,
}
