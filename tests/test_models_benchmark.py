"""python -m benchmarks.models, by which the table of docs/models.md is made."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.families import FAMILIES
from benchmarks.models import BEGIN, COLUMNS, END, SUMMARY, summary

DOCS = Path(__file__).parents[1] / "docs" / "models.md"
NUMBER = r"\d\.\de[+-]\d\d"


def rows(table: str, columns: Sequence[str]) -> dict[str, list[str]]:
    """The cells of each family in a table of these columns."""
    lines = table.strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == list(columns)
    return {name: rest for name, *rest in cells[2:]}


def on_page(text: str) -> dict[str, list[str]]:
    """The cells of each family in a page's table."""
    return rows(text.split(BEGIN)[1].split(END)[0], SUMMARY)


def test_the_page_has_each_family() -> None:
    assert list(on_page(DOCS.read_text())) == list(FAMILIES)


def test_a_line_of_a_page_has_the_largest_difference() -> None:
    cells = {"packed": "2.9e-06", "gradient": "1.1e-05", "export": "3.8e-06"}
    cells |= {"transformers": "1.9e-06, 2.9e-06", "vllm": "6.3e-03, 6.4e-03", "lora": "3.8e-06"}
    cells["plan"] = "1.000, 0.995"
    assert summary("Qwen3", cells) == "| Qwen3 | 1.1e-05 | 6.4e-03 | 0.995 |"
    cells |= {
        "vllm": "refused: it drops heads",
        "lora": "refused: lora: no layer",
        "plan": "KeyError: x",
    }
    assert summary("Qwen3", cells) == "| Qwen3 | 1.1e-05, no LoRA | refused | KeyError |"
    assert summary("Doge", {"refused": "attention"}) == "| Doge | refused | | |"


@pytest.mark.slow
def test_a_family_is_measured_and_its_row_written(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(f"Before.\n{BEGIN}\nold\n{END}\nAfter.\n")
    words = ["Qwen3", "GPT-2", "--without-vllm", "--to", str(page)]
    command = [sys.executable, "-m", "benchmarks.models", *words]
    done = subprocess.run(command, check=True, timeout=600, stdout=subprocess.PIPE, text=True)
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("After.\n") and "old" not in text
    found = rows(done.stdout, ["family", *COLUMNS.values()])
    assert list(found) == list(on_page(text)) == ["Qwen3", "GPT-2"]
    *numbers, vllm, lora, plan = found["Qwen3"]
    told = [float(one) for cell in (*numbers, lora) for one in re.findall(NUMBER, cell)]
    assert len(told) == 6 and max(told) < 1e-4
    assert vllm == "" and found["GPT-2"][5].startswith("refused: lora: ")
    shares = [float(share) for each in (plan, found["GPT-2"][6]) for share in each.split(", ")]
    assert len(shares) == 4 and all(abs(share - 1) < 0.02 for share in shares)
    for name, cells in found.items():
        shown = dict(zip(COLUMNS, cells, strict=True))
        (row,) = (one for one in text.splitlines() if one.startswith(f"| {name} |"))
        assert row.split() == summary(name, shown).split()
