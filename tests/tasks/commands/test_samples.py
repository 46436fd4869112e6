"""What reward functions logged of a sample, as text."""

from __future__ import annotations

from tasks.commands.samples import as_lines


def test_of_a_list_each_entry_has_its_line() -> None:
    assert as_lines(["Good.", None, 0.5, {"a": "é"}]) == 'Good.\nnull\n0.5\n{"a": "é"}'
    assert as_lines("whole") == "whole"
