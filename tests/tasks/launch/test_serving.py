"""What a version is served as: its folder, vLLM's command line, and when the version moves."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, change
from configs.recipe import load_recipe
from configs.serve import ServeConfig
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.weights import FILE_NAMES, BaseVersion, FileNames, Part, WeightsRef
from storage.runs.weights_writing import publish
from tasks.launch.serving import (
    Served,
    _check_proposals,
    _command,
    _environment,
    _remove_old,
    key_of,
    named,
    written,
)


def served(folder: Path) -> Served:
    weights = WeightsRef(version=3, key="run/weights/v000003", digest="xxh3:a", nbytes=4)
    return Served(run=RunStore(Store(f"file://{folder}"), "run"), number=3, weights=weights)


def test_a_version_that_never_moves_is_not_followed() -> None:
    for moving in ("run", "models:/demo@champion"):
        assert change(ServeConfig, {"version": moving, "follow": True}, []).follow
    with pytest.raises(ConfigError, match="never moves"):
        change(ServeConfig, {"version": "run@3", "follow": True}, [])


def test_the_command_names_the_version_and_takes_what_the_run_sampled_with(tmp_path: Path) -> None:
    config = change(
        ServeConfig, {"version": "run"}, ["engine_args={max_num_seqs: 8, enforce_eager: false}"]
    )
    settings = load_recipe(GRPOConfig, "tiny", [])
    words = _command(config, settings, served(tmp_path), tmp_path / "x")
    asked = dict(itertools.pairwise(words))
    assert asked["--model"] == str(tmp_path / "x") and asked["--host"] == "127.0.0.1"
    assert words[words.index("--served-model-name") + 1 :][:2] == ["run@3", "run"]
    assert (asked["--dtype"], asked["--max-model-len"]) == ("float32", "144")
    assert asked["--max-num-seqs"] == "8" and "--no-enforce-eager" in words
    assert "--no-enable-chunked-prefill" in words, "this pool has no GPU"


def test_proposed_tokens_are_refused_on_a_cpu() -> None:
    words = ["engine_args={speculative_config: {method: ngram, num_speculative_tokens: 4}}"]
    config = change(ServeConfig, {"version": "run"}, words)
    with pytest.raises(ConfigError, match="on a CPU vLLM's server draws wrong tokens"):
        _check_proposals(config, load_recipe(GRPOConfig, "tiny", []))
    _check_proposals(config, load_recipe(GRPOConfig, "gsm8k-qwen2.5", []))
    _check_proposals(
        change(ServeConfig, {"version": "run"}, []), load_recipe(GRPOConfig, "tiny", [])
    )


def test_what_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    with pytest.raises(ConfigError, match="There is no run gone"):
        named(change(ServeConfig, {"version": "gone@2"}, []), store)


@pytest.mark.parametrize("base", [False, True])
def test_a_version_with_stacked_experts_is_served_as_its_files(tmp_path: Path, base: bool) -> None:
    """Also one that is stored as the difference from another, which has no small files itself."""
    run = RunStore(Store(f"file://{tmp_path}/store"), "run")
    parts = (Part(name="experts.0.w", shape=(2,)), Part(name="experts.1.w", shape=(2,)))
    names = FileNames(stacks={"stack": parts}).model_dump_json().encode()
    first = publish(
        *(run.store, "run", 0, [("stack", torch.arange(4.0).bfloat16().view(2, 2))]),
        {"config.json": b"{}", FILE_NAMES: names},
    )
    weights = first
    if base:
        below = BaseVersion(key=first.key, digest=first.digest)
        moved = [("stack", torch.tensor([[0.0, 1.0], [2.0, 5.0]]).bfloat16())]
        weights = publish(run.store, "run", 1, moved, {}, base=below)
    folder = written(tmp_path / "served", Served(run=run, number=weights.version, weights=weights))
    (file,) = folder.glob("*.safetensors")
    found = load_file(file)
    assert found.keys() == {"experts.0.w", "experts.1.w"}
    assert found["experts.1.w"].tolist() == ([2.0, 5.0] if base else [2.0, 3.0])


def test_older_versions_are_removed_but_for_one_and_what_is_not_ours(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"v{number}").mkdir()
        (tmp_path / f"v{number}" / "manifest.json").touch()
        os.utime(tmp_path / f"v{number}", (number, number))
    (tmp_path / "mine").mkdir()
    _remove_old(tmp_path, tmp_path / "v3")
    assert {path.name for path in tmp_path.iterdir()} == {"v2", "v3", "mine"}


def test_a_key_is_made_for_this_machine_and_demanded_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(*words: str) -> ServeConfig:
        return change(ServeConfig, {"version": "run", "folder": str(tmp_path / "served")}, words)

    monkeypatch.delenv("REFRAIN_SERVE_KEY", raising=False)
    key = key_of(config())
    file = tmp_path / "served" / "key"
    assert file.stat().st_mode & 0o777 == 0o600 and len(key) == 64
    assert key_of(config()) == key, "the next server has the same"
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others than you"):
        key_of(config())
    file.unlink()
    file.symlink_to(tmp_path / "trap")
    with pytest.raises(ConfigError, match="cannot be read"):
        key_of(config())
    for host in ("0.0.0.0", "node7", "10.0.0.7"):
        with pytest.raises(ConfigError, match=f"host = {host} is reached by others"):
            key_of(config(f"host={host}"))
    monkeypatch.setenv("REFRAIN_SERVE_KEY", "short")
    with pytest.raises(ConfigError, match="5 characters, so it can be guessed"):
        key_of(config())
    monkeypatch.setenv("REFRAIN_SERVE_KEY", "k" * 32)
    assert key_of(config("host=0.0.0.0")) == "k" * 32


def test_the_key_is_on_no_command_line(tmp_path: Path) -> None:
    settings = load_recipe(GRPOConfig, "tiny", [])
    words = _command(
        change(ServeConfig, {"version": "run"}, []), settings, served(tmp_path), tmp_path
    )
    assert words[words.index("--middleware") + 1] == "engines.processes.key_guard.ServedKey"
    assert "k" * 32 not in words
    assert "k" * 32 in _environment(settings, tmp_path / "log", "k" * 32).values()
