"""The command of docs/security.md that converts pickled weights: it keeps tensors and runs nothing."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.flows.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FILE = "pytorch_model.bin"


class Command:
    """Runs a command of the shell as it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint as it was saved before safetensors."""
    folder = tmp_path / "old"
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
    )
    config.save_pretrained(folder)
    torch.save(LlamaForCausalLM(config).to(torch.bfloat16).state_dict(), folder / FILE)
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)
    return folder


def converted(old: Path, new: Path) -> subprocess.CompletedProcess[str]:
    """What the command says, as the page has it."""
    page = (ROOT / "docs/security.md").read_text()
    (command,) = re.findall(r"```\n(python -c .*?OLD NEW)\n```", page, re.DOTALL)
    command = command.removesuffix("OLD NEW") + f"{old} {new}"
    command = command.replace("python", sys.executable, 1)
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=500)


def test_tensors_stay_as_they_were(old: Path, tmp_path: Path) -> None:
    done = converted(old, tmp_path / "new")
    assert done.returncode == 0, done.stderr[-2000:]
    before = torch.load(old / FILE, weights_only=True)
    after = load_file(tmp_path / "new/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {one.dtype for one in after.values()} == {torch.bfloat16}
    assert not list((tmp_path / "new").glob("*.bin"))


@pytest.mark.parametrize("kind", ["zip", "older", "pickle"])
def test_a_hostile_pickle_runs_nothing(old: Path, tmp_path: Path, kind: str) -> None:
    ran, evil = tmp_path / "ran", tmp_path / "evil"
    shutil.copytree(old, evil)
    weights = {**torch.load(old / FILE, weights_only=True), "x": Command(f"touch {ran}")}
    if kind == "pickle":
        (evil / FILE).write_bytes(pickle.dumps({"x": Command(f"touch {ran}")}))
    else:
        torch.save(weights, evil / FILE, _use_new_zipfile_serialization=kind == "zip")
    done = converted(evil, tmp_path / "new")
    assert done.returncode != 0
    assert "weights_only" in done.stderr
    assert not ran.exists()
    assert not (tmp_path / "new").exists()
    with contextlib.suppress(RuntimeError):  # a plain pickle is no file of torch's, once it has run
        torch.load(evil / FILE, weights_only=False)
    assert ran.exists()
