"""Our functions against the reference vectors, values and gradients, in float32 and float64."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.parity.__main__ import main, outcomes
from tests.parity.known import KNOWN_DIFFERENCES, table
from tests.parity.vectors import read_folder

VECTORS = Path(__file__).parent / "vectors"
DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


@pytest.fixture(scope="module")
def results():
    """Every outcome."""
    return outcomes(list(read_folder(VECTORS)))


def test_every_vector_passes_or_is_a_known_difference(results):
    failed = [o for found in results.values() for o in found if o.verdict == "failed"]
    assert not failed, "\n".join(f"{o.case}: {o.why}" for o in failed)


def test_known_differences_are_few(results):
    count = Counter(o.verdict for found in results.values() for o in found)
    assert count["known"] == 40  # 20 cases, each in two dtypes
    assert count["passed"] >= 1000


def test_the_docs_have_the_table_of_differences():
    """Print it anew with `python -m tests.parity --differences`."""
    assert table() in DOCS.read_text()


def test_every_difference_names_the_vectors_that_show_it(results):
    seen = {o.case for found in results.values() for o in found if o.verdict == "known"}
    named = {name for k in KNOWN_DIFFERENCES for name in k.vectors.split(", ")}
    assert seen == named


def test_runner_reports_a_wrong_vector(tmp_path, capsys):
    content = json.loads((VECTORS / "value_entropy_kl.json").read_text())
    case = next(c for c in content["cases"] if c["name"] == "kl_penalty/k3")
    case["outputs"]["kl"][0][0] += 0.5
    (tmp_path / "mine.json").write_text(json.dumps(content | {"cases": [case]}))
    assert main([str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "kl_penalty" in text
    assert "failed: kl_penalty/k3" in text


def test_runner_passes_a_right_folder(tmp_path, capsys):
    (tmp_path / "mine.json").write_text((VECTORS / "reward_shaping.json").read_text())
    assert main([str(tmp_path), "--verbose"]) == 0
    assert "known: group_filter/tenths/acc" in capsys.readouterr().out


def test_runner_names_a_function_that_we_lack(tmp_path, capsys):
    case = {"name": "x", "function": "x", "dtype": "float32", "params": {}, "inputs": {}}
    (tmp_path / "mine.json").write_text(json.dumps({"cases": [case | {"outputs": {"y": 1.0}}]}))
    assert main([str(tmp_path)]) == 1
    assert "no function of ours" in capsys.readouterr().out


def test_runner_passes_over_vectors_of_another_form(tmp_path, capsys):
    (tmp_path / "mine.json").write_text((VECTORS / "reward_shaping.json").read_text())
    (tmp_path / "theirs.json").write_text(json.dumps({"cases": {"one": {"reward": 1.0}}}))
    assert main([str(tmp_path)]) == 0
    assert "theirs.json" in capsys.readouterr().out
