"""How trees grow, with a policy that is a table instead of an engine."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.tree import TreeSettings
from engines.trees.branching import (
    PROMPT,
    Branch,
    Noise,
    TreeNode,
    branches,
    by_weight,
    leaves,
    path_of,
    settle,
)

Sampler = Callable[[Branch], tuple[bool, float]]  # whether the path is over, and a mean log-prob
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


def grown(n: int, tree: TreeSettings, sampler: Sampler, seed: int | None = 0) -> list[TreeNode]:
    """A whole tree; the last segment of a path ends it, whatever the sampler says."""
    nodes: list[TreeNode] = []
    noise = Noise(seed, 1, 5)
    while wanted := branches(nodes, n, tree, noise):
        level = []
        for one in wanted:
            over, logprob = sampler(one)
            over = over or one.depth == tree.depth
            level.append(
                TreeNode(
                    number=one.number,
                    parent=one.parent,
                    depth=one.depth,
                    share=one.share,
                    over=over,
                    logprob=logprob,
                )
            )
        assert {one.depth for one in wanted} <= set(range(1, tree.depth + 1))
        nodes += settle(level, tree)
        assert len(nodes) <= n * (tree.depth + 1), "it comes to an end"
    return nodes


trees = st.builds(
    TreeSettings,
    depth=st.integers(1, 5),
    divergence=st.one_of(
        st.integers(1, 4).map(lambda width: {"kind": "fixed", "width": width}),
        st.tuples(st.integers(1, 3), st.integers(3, 5)).map(
            lambda pair: {"kind": "drawn", "fewest": pair[0], "most": pair[1]}
        ),
    ),
    by=st.just("logprob"),
    logprob_weight=st.sampled_from([1.0, -1.0, 0.0, 50.0]),
    fall_back=st.booleans(),
) | st.builds(TreeSettings, depth=st.integers(1, 5), by=st.just("even"), fall_back=st.booleans())


@EXAMPLES
@given(tree=trees, n=st.integers(1, 17), seed=st.integers(0, 10**6), ends=st.floats(0, 1))
def test_a_tree_has_exactly_n_leaves_whatever_ends(tree, n, seed, ends):
    chance = random.Random(seed)
    nodes = grown(n, tree, lambda _: (chance.random() < ends, -3 * chance.random()))
    found = leaves(nodes)
    assert len(found) == n
    assert [node.number for node in nodes] == list(range(1, len(nodes) + 1))
    known = {PROMPT} | {node.number for node in nodes}
    for node in nodes:
        assert node.parent in known and node.parent < node.number
        if node.parent != PROMPT:
            before = nodes[node.parent - 1]
            assert not before.over and node.depth == before.depth + 1
    if tree.fall_back:  # no leaf stands for another
        assert len(set(found)) == n
    for number in found:
        path = path_of(nodes, number)
        assert len(path) == nodes[number - 1].depth and path[-1] == number


@EXAMPLES
@given(tree=trees, n=st.integers(1, 17), seed=st.integers(0, 10**6), ends=st.floats(0, 1))
def test_a_branch_has_a_number_of_its_own_below_n(tree, n, seed, ends):
    """What its noise is drawn from: two branches of a node never draw the same."""
    chance = random.Random(seed)
    seen = []

    def sampler(one: Branch) -> tuple[bool, float]:
        seen.append((one.parent, one.place))
        return chance.random() < ends, -1.0

    grown(n, tree, sampler)
    assert len(set(seen)) == len(seen) and all(0 <= place < n for _, place in seen)


@EXAMPLES
@given(n=st.integers(1, 12), seed=st.integers(0, 10**6), ends=st.floats(0, 0.9))
def test_it_falls_back_only_when_no_path_goes_on(n, seed, ends):
    chance = random.Random(seed)
    tree = TreeSettings(depth=4)
    nodes: list[TreeNode] = []
    while wanted := branches(nodes, n, tree, Noise(3, 1, 5)):
        parents = {node.parent for node in nodes}
        going = {node.number for node in nodes if not node.over and node.number not in parents}
        if going:
            assert {one.parent for one in wanted} == going, "every path goes on, nothing else"
        elif nodes:
            assert sum(one.share for one in wanted) == n - sum(x.share for x in nodes if x.over)
            assert all(one.parent == PROMPT or not nodes[one.parent - 1].over for one in wanted)
        level = [
            TreeNode(
                number=one.number,
                parent=one.parent,
                depth=one.depth,
                share=one.share,
                over=one.depth == 4 or chance.random() < ends,
                logprob=-1.0,
            )
            for one in wanted
        ]
        nodes += settle(level, tree)


LETTERS = {"": {"a": 0.7, "b": 0.3}, "a": {"a": 0.2, "b": 0.8}, "b": {"a": 0.5, "b": 0.5}}


def segments(before: str, depth: int) -> dict[tuple[str, bool], float]:
    """What a toy policy writes next, and whether that ends it; after an "a" it does half the time."""
    found = {}
    for letter, p in LETTERS[before[-1:]].items():
        ends = 0.5 if letter == "a" else 0.0
        if depth == 0:  # the last segment
            found[letter, True] = p
        else:
            found |= {(letter, over): p * q for over, q in ((True, ends), (False, 1 - ends)) if q}
    return found


def texts(depth: int, before: str = "") -> Counter[str]:
    """Probability of each text of at most `depth` segments."""
    found: Counter[str] = Counter()
    for (letter, over), p in segments(before, depth - 1).items():
        if over:
            found[before + letter + "."] += p
        else:
            found.update({k: p * q for k, q in texts(depth - 1, before + letter).items()})
    return found


def expected(n: int, tree: TreeSettings, seed: int) -> Counter[str]:
    """Each text's expected number of leaves, over all that the policy can write in a tree."""
    found: Counter[str] = Counter()
    scripts: list[list[int]] = [[]]  # which of the outcomes, segment by segment
    while scripts:
        script = scripts.pop()
        written: dict[int, str] = {PROMPT: ""}
        odds: list[float] = []

        def sampler(one: Branch, script=script, written=written, odds=odds) -> tuple[bool, float]:
            outcomes = list(segments(written[one.parent], tree.depth - one.depth).items())
            if len(odds) == len(script):  # past its end: the first now, the others in runs to come
                scripts.extend([*script, other] for other in range(1, len(outcomes)))
                script.append(0)
            (letter, over), p = outcomes[script[len(odds)]]
            odds.append(p)
            written[one.number] = written[one.parent] + letter + ("." if over else "")
            return over, 0.0

        nodes = grown(n, tree, sampler, seed)
        for leaf in leaves(nodes):
            found[written[leaf]] += math.prod(odds)
    return found


@pytest.mark.parametrize(
    ("n", "depth", "divergence"),
    [
        (3, 3, {"kind": "fixed", "width": 2}),
        (4, 2, {"kind": "fixed", "width": 2}),
        (3, 2, {"kind": "fixed", "width": 1}),
        (3, 3, {"kind": "drawn", "fewest": 1, "most": 2}),
    ],
)
def test_without_fall_back_the_mean_over_leaves_is_unbiased(n, depth, divergence):
    """Against enumeration: a text's expected share of the leaves is its probability, exactly."""
    tree = TreeSettings(depth=depth, divergence=divergence, fall_back=False)
    exact = texts(depth)
    assert sum(exact.values()) == pytest.approx(1.0) and len(exact) > 4
    got = expected(n, tree, seed=2)
    assert set(got) == set(exact)
    for text, p in exact.items():
        assert got[text] / n == pytest.approx(p, abs=1e-12), text


def test_fall_back_is_biased_to_texts_that_go_on():
    """What the setting costs, so that the test above is one of the setting."""
    tree = TreeSettings(depth=2, divergence={"kind": "fixed", "width": 2})
    chance, ended = random.Random(1), 0
    for number in range(200):
        nodes = grown(4, tree, lambda one: (one.depth == 1 and chance.random() < 0.5, 0.0), number)
        ended += sum(nodes[leaf - 1].depth == 1 for leaf in leaves(nodes))
    assert ended / (4 * 200) < 0.45


def test_shares_by_log_probs():
    assert by_weight(7, [0.0, math.log(3)]) == [2, 5]
    assert by_weight(3, [0.0, -1000.0, 0.0]) == [1, 1, 1]
    assert by_weight(9, [0.0, -1000.0]) == [8, 1]
    level = [
        TreeNode(number=k, parent=0, depth=1, share=2, over=False, logprob=logprob)
        for k, logprob in enumerate((-0.1, -2.0, -0.1), 1)
    ]
    likely = TreeSettings(by="logprob", logprob_weight=20.0)
    assert [node.share for node in settle(level, likely)] == [3, 1, 2]
    unlikely = TreeSettings(by="logprob", logprob_weight=-20.0)
    assert [node.share for node in settle(level, unlikely)] == [1, 4, 1]


def test_what_a_path_leaves_over_goes_to_those_that_go_on():
    level = [
        TreeNode(number=1, parent=0, depth=1, share=4, over=True, logprob=0.0),
        TreeNode(number=2, parent=0, depth=1, share=3, over=False, logprob=0.0),
        TreeNode(number=3, parent=0, depth=1, share=1, over=False, logprob=0.0),
    ]
    assert [node.share for node in settle(level, TreeSettings())] == [1, 4, 3]
    alone = TreeSettings(fall_back=False)
    assert [node.share for node in settle(level, alone)] == [4, 3, 1]


def test_the_same_seed_grows_the_same_tree():
    tree = TreeSettings(depth=4, divergence={"kind": "drawn", "fewest": 1, "most": 4})

    def ends(one: Branch) -> tuple[bool, float]:
        return random.Random(f"{one.parent}/{one.place}").random() < 0.4, 0.0

    assert grown(8, tree, ends, seed=4) == grown(8, tree, ends, seed=4)
    others = [grown(8, tree, ends, seed=seed) for seed in range(5, 15)]
    assert any(a != b for a, b in itertools.pairwise(others))
