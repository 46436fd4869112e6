"""Trees of completions in the store: what was sampled becomes nodes, and what is sampled next.

A node is a row with the tokens of its segment alone: it is stored once, with its parent. A level is
asked for as rows of prompts with the tokens that their paths have so far (`asked`), and comes back
from a rollout engine as those tokens and one segment more; neither is kept. Once all trees of a shard
have their leaves, each leaf becomes a sample as any other: the concatenation of its nodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from configs.tree import TreeSettings
from engines.models.routed_experts import write_by_prompt
from engines.rollout.samples import NOTHING, Completion, read_begun, token_columns
from engines.trees.branching import Branch, Noise, TreeNode, branches, leaves, path_of, settle
from engines.trees.contract import GrownTrees, Growth, TreeGrower, TreeSpec
from storage.batches.columns import PROMPT_COLUMNS, SEGMENT, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.run_store import DATA_SUFFIX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER, REPETITION = "answer", "repetition"  # finish reasons of paths that are ended here


@dataclass(slots=True)
class PromptTree:
    """The tree of a prompt as it stands; lists by the number of the node, less one."""

    group: int
    nodes: list[TreeNode]
    segments: list[Completion]
    workers: list[str]
    attempts: list[int]

    def path(self, number: int) -> Completion:
        """The tokens from the prompt to the end of a node."""
        tokens = NOTHING
        for node in path_of(self.nodes, number):
            tokens = tokens.followed_by(self.segments[node - 1])
        return tokens


class TreeEngine(TreeGrower):
    """Has trees grow by the model's tokenizer."""

    def __init__(self, spec: TreeSpec) -> None:
        from engines.models.checkpoints import load_tokenizer, materialize

        self._store = spec.open_store()
        self._tokenizer = load_tokenizer(materialize(spec.model, Path(spec.model_cache)))

    def grow(
        self,
        prompts: BatchRef,
        growth: Growth,
        out_key: str,
        before: GrownTrees | None = None,
        level: BatchRef | None = None,
    ) -> GrownTrees:
        """Take up a level of the trees of some prompts, and say what is sampled next."""
        return grow(self._store, prompts, growth, out_key, self._tokenizer, before, level)


def grow(
    store: Store,
    prompts: BatchRef,
    growth: Growth,
    out_key: str,
    tokenizer: PreTrainedTokenizerBase,
    before: GrownTrees | None = None,
    level: BatchRef | None = None,
) -> GrownTrees:
    """Take up a level of the trees of P prompts, and say what is sampled next.

    Args:
        store: of the batches.
        prompts: theirs, [P].
        growth: how they grow.
        out_key: of the nodes; what is asked for and the samples get keys beside it.
        tokenizer: the model's, for `tree.stop.answer`.
        before: what this function said of the level before; None: there is no tree yet.
        level: what a rollout engine made of `before.asked`, [B].
    """
    nodes = None if before is None else before.nodes
    trees = read_trees(store, prompts, nodes)
    if before is not None and before.asked is not None and level is not None:
        written = write_level(store, trees, growth, before.asked, level, tokenizer, out_key)
        nodes = written if nodes is None else BatchRef.concat([nodes, written])
    wanted = [
        (row, tree, branch)
        for row, tree in enumerate(trees)
        for branch in branches(
            tree.nodes, growth.n, growth.tree, Noise(growth.seed, growth.step, tree.group)
        )
    ]
    if wanted:
        key = f"{out_key.removesuffix(DATA_SUFFIX)}-asked{DATA_SUFFIX}"
        return GrownTrees(nodes=nodes, asked=write_asked(store, prompts, wanted, growth.n, key))
    key = f"{out_key.removesuffix(DATA_SUFFIX)}-samples{DATA_SUFFIX}"
    samples, truncated = write_leaves(store, prompts, trees, growth.n, key)
    return GrownTrees(nodes=nodes, samples=samples, truncated=truncated)


def read_trees(store: Store, prompts: BatchRef, nodes: BatchRef | None) -> list[PromptTree]:
    """The trees of P prompts, in their order."""
    groups = prompts.fetch_numpy(store, "group_id")[0].tolist()
    trees = {group: PromptTree(group, [], [], [], []) for group in groups}
    if nodes is None:
        return list(trees.values())
    names = ("group_id", "tree_node", "tree_parent", "tree_depth", "tree_share", "attempt")
    columns = [nodes.fetch_numpy(store, name)[0].tolist() for name in names]
    segments = read_begun(store, nodes, len(nodes))
    workers = nodes.fetch_list(store, "worker")
    rows = zip(*columns, segments, workers, strict=True)
    for group, number, parent, depth, share, attempt, segment, worker in rows:
        node = node_of(number, parent, depth, share, segment)
        add(trees[group], node, segment, str(worker), attempt)
    return list(trees.values())


def add(tree: PromptTree, node: TreeNode, segment: Completion, worker: str, attempt: int) -> None:
    """A further node of a tree; they come in the order of their numbers."""
    assert node.number == len(tree.nodes) + 1
    tree.nodes.append(node)
    tree.segments.append(segment)
    tree.workers.append(worker)
    tree.attempts.append(attempt)


def write_level(
    store: Store,
    trees: Sequence[PromptTree],
    growth: Growth,
    asked: BatchRef,
    level: BatchRef,
    tokenizer: PreTrainedTokenizerBase,
    out_key: str,
) -> BatchRef:
    """Add a level to the trees, and store its nodes, a row each."""
    by_group = {tree.group: tree for tree in trees}
    begun = asked.lengths(store, "response_ids").tolist()
    paths = read_begun(store, level, len(asked))
    names = ("group_id", "tree_node", "tree_parent", "tree_depth", "tree_share")
    columns = [asked.fetch_numpy(store, name)[0].tolist() for name in names]
    attempts = level.fetch_numpy(store, "attempt")[0].tolist()
    workers = level.fetch_list(store, "worker")
    sampled: dict[int, list[tuple[TreeNode, Completion, str, int]]] = {}
    rows = zip(*columns, begun, paths, workers, attempts, strict=True)
    for group, number, parent, depth, share, start, path, worker, attempt in rows:
        why = ended_by(path, growth.tree, tokenizer) if path.finish_reason == SEGMENT else ""
        segment = after(path, start, why or path.finish_reason)
        node = node_of(number, parent, depth, share, segment)
        sampled.setdefault(group, []).append((node, segment, str(worker), attempt))
    order = []
    for group, segments in sampled.items():
        now = settle([node for node, *_ in segments], growth.tree)
        for node, (_, segment, worker, attempt) in zip(now, segments, strict=True):
            add(by_group[group], node, segment, worker, attempt)
            order.append((group, node, segment, worker, attempt))
    nodes = [node for _, node, *_ in order]
    return write_batch(
        store,
        out_key,
        {
            "group_id": np.array([group for group, *_ in order], np.int64),
            "tree_node": np.array([node.number for node in nodes], np.int64),
            "tree_parent": np.array([node.parent for node in nodes], np.int64),
            "tree_depth": np.array([node.depth for node in nodes], np.int64),
            "tree_share": np.array([node.share for node in nodes], np.int64),
            **token_columns([segment for _, _, segment, *_ in order]),
            "weights_digest": [segment.digest for _, _, segment, *_ in order],
            "worker": [worker for *_, worker, _ in order],
            "attempt": np.array([attempt for *_, attempt in order], np.int64),
        },
    )


def write_asked(
    store: Store,
    prompts: BatchRef,
    wanted: Sequence[tuple[int, PromptTree, Branch]],
    n: int,
    out_key: str,
) -> BatchRef:
    """Rows of prompts with what their paths have so far, as `RolloutRequest.begun` takes them.

    wanted: the row of the prompt, its tree, and the segment to be sampled.
    """
    begun = [tree.path(branch.parent) for _, tree, branch in wanted]
    plan = [branch for *_, branch in wanted]
    written = write_batch(
        store,
        out_key,
        {
            **token_columns([path.followed_by(NOTHING) for path in begun]),  # it goes on
            "weights_digest": [path.digest for path in begun],
            "status": np.full(len(begun), SampleStatus.UNFINISHED, np.int64),
            "tree_node": np.array([branch.number for branch in plan], np.int64),
            "tree_parent": np.array([branch.parent for branch in plan], np.int64),
            "tree_depth": np.array([branch.depth for branch in plan], np.int64),
            "tree_share": np.array([branch.share for branch in plan], np.int64),
            # A node is followed by n segments at most: each leads to a leaf of its own.
            "branch_seed": np.array(
                [branch.parent * n + branch.place for branch in plan], np.int64
            ),
        },
    )
    rows = np.array([row for row, *_ in wanted])
    return of_prompts(prompts, rows).with_columns(written)


def write_leaves(
    store: Store, prompts: BatchRef, trees: Sequence[PromptTree], n: int, out_key: str
) -> tuple[BatchRef, int]:
    """The samples, n leaves of each tree in the order of their nodes, and how many were cut off."""
    samples_of = [
        (tree, number, tree.path(number), tree.group * n + place)
        for tree in trees
        for place, number in enumerate(leaves(tree.nodes))
    ]
    assert len(samples_of) == n * len(trees), "every tree has all of its leaves"
    whole = [path for _, _, path, _ in samples_of]
    paths = [path_of(tree.nodes, number) for tree, number, *_ in samples_of]
    cut = [path.finish_reason in ("length", REPETITION) for path in whole]
    written = write_by_prompt(
        store,
        out_key,
        {
            **token_columns(whole),
            "response_mask": [np.ones(len(path.tokens), np.uint8) for path in whole],
            "sample_id": np.array([sample for *_, sample in samples_of], np.int64),
            "status": np.where(cut, SampleStatus.TRUNCATED, SampleStatus.OK).astype(np.int64),
            "weights_digest": [path.digest for path in whole],
            "worker": [tree.workers[number - 1] for tree, number, *_ in samples_of],
            "attempt": np.array([tree.attempts[number - 1] for tree, number, *_ in samples_of]),
            "tree_path": [np.array(path, np.int64) for path in paths],
            "tree_lengths": [
                np.array([len(tree.segments[node - 1].tokens) for node in path], np.int64)
                for (tree, *_), path in zip(samples_of, paths, strict=True)
            ],
        },
        places := np.repeat(np.arange(len(prompts)), n),
    )
    samples = of_prompts(prompts, places).with_columns(written)
    return samples, sum(cut)


def of_prompts(prompts: BatchRef, rows: np.ndarray) -> BatchRef:
    """The columns that samples have of their prompts; rows: the prompt of each."""
    return prompts[[name for name in PROMPT_COLUMNS if name in prompts.names]].take(rows)


def after(path: Completion, start: int, finish_reason: str) -> Completion:
    """What a path has after `start` tokens, with spans counted from there."""
    experts = path.routed_experts
    if experts is not None and start:
        experts = experts[len(experts) - (len(path.tokens) - start) :]
    return Completion(
        tokens=path.tokens[start:],
        logprobs=path.logprobs[start:],
        spans=[
            (version, max(a - start, 0), b - start) for version, a, b in path.spans if b > start
        ],
        finish_reason=finish_reason,
        digest=path.digest,
        routed_experts=experts,
        sampling_mask=None if path.sampling_mask is None else path.sampling_mask.after(start),
    )


def node_of(number: int, parent: int, depth: int, share: int, segment: Completion) -> TreeNode:
    """A segment as a node; the log-prob of none of its tokens is 0."""
    return TreeNode(
        number=number,
        parent=parent,
        depth=depth,
        share=share,
        over=segment.finish_reason != SEGMENT,
        logprob=float(np.mean(segment.logprobs)) if segment.logprobs else 0.0,
    )


def ended_by(path: Completion, tree: TreeSettings, tokenizer: PreTrainedTokenizerBase) -> str:
    """Why a path that has a segment more is over; empty where it goes on."""
    stop = tree.stop
    if stop.answer is not None:
        text = str(tokenizer.decode(path.tokens, skip_special_tokens=True))
        if re.search(stop.answer, text):
            return ANSWER
    if stop.repetition is not None:
        longest, times = stop.repetition.tokens, stop.repetition.times
        if any(repeats(path.tokens, length, times) for length in range(1, longest + 1)):
            return REPETITION
    return ""


def repeats(tokens: Sequence[int], length: int, times: int) -> bool:
    """Whether the tokens end in the same `length` tokens, `times` times in a row."""
    tail = tokens[-length * times :]
    return len(tail) == length * times and all(
        a == b for a, b in zip(tail, tail[length:], strict=False)
    )
