"""What `--check` prints, at 80 columns and in a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from tasks.launch.check_page import memory_table, page
from tasks.launch.server import server_sentence
from tasks.memory.holders import Place
from tasks.run.features import Finding
from tests.flows.conftest import ROOT

GIB = 2**30
GPU = Place(
    what="a GPU of pool gpu",
    limit=80 * GIB,
    limited_by="nvidia-smi",
    taken={
        "actor's weights": 15 * GIB,
        "vLLM": 40 * GIB,
        "actor's activations and what else an update needs": 9 * GIB,
        "actor's head": GIB // 4,
        "actor's rest": GIB // 8,
    },
)
LONG = "One sentence of many words that no terminal of eighty columns can hold in a line. " * 3
FINDINGS = [
    Finding(check="settings", found="rollout.dtype = float32: this CPU is slow in bfloat16"),
    Finding(check="packages", found="torch 2.13"),
    Finding(check="model", found=LONG),
    Finding(check="rollout", found="rollout on 1 GPU in bfloat16"),
    Finding(check="training", found="actor on 1 GPU in bfloat16, compiled"),
    Finding(check="memory", found="actor, each of 2 ranks: holds weights 15.0 GiB"),
    Finding(check="memory", found="a GPU of pool gpu: 64.4 GiB of 80.0 GiB", place=GPU),
    Finding(check="warning", found="Something to be read."),
    Finding(check="references", found="Some answers are empty.", warning=True),
    Finding(check="of a feature to come", found="Found by it."),
    Finding(check="store", found=f"file:///{'long/' * 30}: an object was written"),
]


def test_each_part_of_a_place_has_a_row() -> None:
    assert memory_table(GPU) == [
        "    vLLM                                             40.0 GiB  ██████        50%",
        "    actor's weights                                  15.0 GiB  ██            19%",
        "    actor's activations and what else an update…      9.0 GiB  █             11%",
        "    2 smaller ones                                    384 MiB                 0%",
        "    free                                             15.6 GiB  ██            20%",
    ]
    assert all(len(row) <= 80 for row in memory_table(GPU))


def test_what_is_too_much_is_a_row_too() -> None:
    small = Place(what="this machine", limit=10 * GIB, limited_by="its memory", taken=GPU.taken)
    assert memory_table(small)[-1].split() == ["too", "much", "54.4", "GiB", "█" * 12, "544%"]
    unknown = Place(what="a GPU", limit=None, limited_by="", taken={"vLLM": GIB})
    assert [row.split()[0] for row in memory_table(unknown)] == ["vLLM"]


@pytest.mark.parametrize("width", [80, None])
def test_all_that_was_found_stands_in_its_group(width: int | None) -> None:
    config = load_recipe(GRPOConfig, "tiny")
    groups = dict(page(config, FINDINGS, width))
    assert list(groups) == [
        *("Model", "Rollout", "Training", "Memory", "Storage", "Decided for this machine"),
        *("Workers and machine", "Warnings"),
    ]
    joined = " ".join(" ".join(line.split()) for lines in groups.values() for line in lines)
    for finding in FINDINGS:
        assert finding.found.strip() in joined
    assert groups["Warnings"] == ["  Something to be read.", "  Some answers are empty."]
    assert groups["Memory"][0] == "  a GPU of pool gpu: 64.4 GiB of 80.0 GiB"
    assert groups["Memory"][1:6] == memory_table(GPU)
    assert groups["Rollout"][0].startswith(
        "  16 samples a step (4 prompts x 4) by transformers, of"
    )
    if width is None:
        assert groups["Model"] == [f"  {LONG}"], "a script reads whole lines"
    else:
        assert all(len(line) <= 80 or "/" in line for lines in groups.values() for line in lines)
        assert groups["Model"][1].startswith("    ")


def test_a_plan_that_does_not_fit_is_shown_before_what_to_set(tmp_path: Path) -> None:
    code = (
        "from configs.grpo import GRPOConfig\n"
        "from tasks.launch.command_line import main\n"
        "words = ['tiny', '--check', 'model.layers=400', 'model.hidden_size=8192', 'model.heads=64']\n"
        "raise SystemExit(main('flows.grpo:grpo', GRPOConfig, words))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    *rows, sentence = done.stderr.splitlines()
    assert sentence.startswith("By the memory plan this machine has to hold ")
    assert [row for row in rows if row.startswith("    too much ")]
    assert [row for row in rows if row.startswith("    actor's optimizer ")]


def test_a_login_in_the_servers_address_is_not_shown(
    tmp_path: Path,
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://me:secret@there:4200/api"}):
        assert server_sentence(tmp_path) == (
            "Prefect: the server of PREFECT_API_URL, http://there:4200/api, not asked"
        )
