"""A row's forest: its paths, what each token goes on after, and rows that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from storage.batches.forest import Forest, forest_of, read_forests
from storage.batches.writing import write_batch
from storage.objects.store import Store


def forest(prompt: int, lengths: list[int], parents: list[int]) -> Forest:
    return Forest(prompt=prompt, lengths=np.array(lengths), parents=np.array(parents))


EXAMPLE = forest(2, [3, 1, 2], [2, 4, 0])


def test_the_example_of_the_class() -> None:
    assert [path.tolist() for path in EXAMPLE.paths()] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [6, 7]]
    assert EXAMPLE.before.tolist() == [1, 2, 3, 3, -1, 6]
    assert EXAMPLE.positions.tolist() == [0, 1, 2, 3, 4, 4, 0, 1]
    assert EXAMPLE.path_lengths().tolist() == [5, 5, 2]
    assert EXAMPLE.context(1).tolist() == [0, 1, 2, 3]
    assert EXAMPLE.context(2).tolist() == []
    assert not EXAMPLE.one_path


def test_nodes_that_each_go_on_after_the_one_before_are_one_path() -> None:
    chain = forest(2, [3, 1], [2, 5])
    assert chain.one_path
    assert [path.tolist() for path in chain.paths()] == [[0, 1, 2, 3, 4, 5]]
    assert forest_of(2, 4, np.zeros(0, np.int64), np.zeros(0, np.int64)).one_path
    assert forest_of(2, 0, np.zeros(0, np.int64), np.zeros(0, np.int64)).paths() == []


def grown(seed: int) -> tuple[Forest, list[list[int]]]:
    """A random forest, made by growing lists, and of each of its tokens the list that ends with it."""
    draw = np.random.default_rng(seed)
    prompt = int(draw.integers(1, 5))
    histories = [list(range(end + 1)) for end in range(prompt)]
    lengths, parents = [], []
    for _ in range(int(draw.integers(1, 9))):
        parent = int(draw.integers(0, len(histories) + 1))
        history = histories[parent - 1] if parent else []
        lengths.append(int(draw.integers(1, 4)))
        parents.append(parent)
        for _ in range(lengths[-1]):
            history = [*history, len(histories)]
            histories.append(history)
    return forest(prompt, lengths, parents), histories


@pytest.mark.parametrize("seed", range(40))
def test_random_forests_against_lists_that_are_grown(seed: int) -> None:
    found, histories = grown(seed)
    paths = [path.tolist() for path in found.paths()]
    own = range(found.prompt, found.tokens)
    assert {token for path in paths for token in path if token >= found.prompt} == set(own)
    assert all(path == histories[path[-1]] for path in paths)
    whole = [set(path) for path in paths]
    assert not any(a < b for a in whole for b in whole), "a path within another is no path"
    assert found.path_lengths().tolist() == [len(path) for path in paths]
    assert found.positions.tolist() == [len(history) - 1 for history in histories]
    before = [([-1, *histories[token]])[-2] for token in own]
    assert found.before.tolist() == before
    for node, start in enumerate(found.starts.tolist()):
        assert found.context(node).tolist() == histories[start][:-1]


@pytest.mark.parametrize(
    ("lengths", "parents", "said"),
    [
        ([3, 1], [2], "2 node_lengths and 1 node_parents"),
        ([3, 0], [2, 5], "node_lengths of node 1 is 0"),
        ([3, 1], [2, 6], "node_parents of node 1 is 6; it is 0 to 5"),
        ([3, 1], [-1, 5], "node_parents of node 0 is -1"),
    ],
)
def test_what_is_no_forest_is_refused(lengths: list[int], parents: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        forest(2, lengths, parents)


def test_nodes_are_those_of_the_row() -> None:
    with pytest.raises(ValueError, match="add up to 6; its response has 7"):
        EXAMPLE.check_row(7)
    EXAMPLE.check_row(6, np.array([1, 1, 1, 1, 0, 1]))
    with pytest.raises(ValueError, match="Response token 4 begins a conversation of its own"):
        EXAMPLE.check_row(6, np.array([1, 1, 1, 1, 1, 1]))


def test_forests_of_stored_samples(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    plain = {"prompt_ids": [[1, 2], [1, 2]], "response_ids": [[3, 4, 5, 6, 7, 8], [9]]}
    assert read_forests(store, write_batch(store, "plain.safetensors", plain)) is None
    nodes = {"node_lengths": [[3, 1, 2], []], "node_parents": [[2, 4, 0], []]}
    found = read_forests(store, write_batch(store, "forest.safetensors", {**plain, **nodes}))
    assert found is not None
    assert [each.one_path for each in found] == [False, True]
    assert found[0].parents.tolist() == [2, 4, 0]
