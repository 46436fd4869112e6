"""python -m benchmarks.models, by which the table of docs/models.md is made."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.families import FAMILIES
from benchmarks.models import BEGIN, COLUMNS, END

DOCS = Path(__file__).parents[1] / "docs" / "models.md"
NUMBER = r"\d\.\de[+-]\d\d"


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each family in a page's table."""
    lines = text.split(BEGIN)[1].split(END)[0].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["family", *COLUMNS.values()]
    return {name: rest for name, *rest in cells[2:]}


def test_the_page_has_each_family() -> None:
    assert list(rows(DOCS.read_text())) == list(FAMILIES)


@pytest.mark.slow
def test_a_family_is_measured_and_its_row_written(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(f"Before.\n{BEGIN}\nold\n{END}\nAfter.\n")
    words = ["Qwen3", "GPT-2", "--without-vllm", "--to", str(page)]
    subprocess.run([sys.executable, "-m", "benchmarks.models", *words], check=True, timeout=600)
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("After.\n") and "old" not in text
    found = rows(text)
    assert list(found) == ["Qwen3", "GPT-2"]
    *numbers, vllm, lora, plan = found["Qwen3"]
    told = [float(one) for cell in (*numbers, lora) for one in re.findall(NUMBER, cell)]
    assert len(told) == 6 and max(told) < 1e-4
    assert vllm == "" and found["GPT-2"][5].startswith("refused: lora: ")
    shares = [float(share) for each in (plan, found["GPT-2"][6]) for share in each.split(", ")]
    assert len(shares) == 4 and all(abs(share - 1) < 0.02 for share in shares)
