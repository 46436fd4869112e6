"""Which samples are shown, and what reward functions logged of them, as text."""

from __future__ import annotations

import numpy as np

from tasks.commands.samples import as_lines, rows_of_episode


def test_of_a_list_each_entry_has_its_line() -> None:
    assert as_lines(["Good.", None, 0.5, {"a": "é"}]) == 'Good.\nnull\n0.5\n{"a": "é"}'
    assert as_lines("whole") == "whole"


def test_an_episode_is_found_by_the_sample_of_any_player() -> None:
    of_players = np.array([[20, 21, 22, 23], [20, 21, 20, 21]])  # sample_id, episode_id
    assert rows_of_episode(of_players, 23) == [1, 3]
    assert rows_of_episode(of_players, 20) == [0, 2]
    assert rows_of_episode(of_players, 24) == []
    assert rows_of_episode(of_players[:1], 22) == [2], "one player: the sample alone"
