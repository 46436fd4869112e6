"""Versions have the names of the checkpoint's files and all that they hold: who reads one reads the other."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
)

from benchmarks.families import make
from configs.algorithm.algorithm import AlgorithmConfig
from configs.model import PretrainedModel
from engines.failures import WeightMismatch
from engines.models.adapters import stream_whole
from engines.models.checkpoints import build_untied, load_for_training, tensor_shapes
from engines.models.tensor_files import checkpoint_names, stored_tensors
from engines.rollout.weight_reader import check_manifest
from engines.train.fsdp_engine import FSDPEngine
from storage.objects.errors import ObjectDamaged
from storage.objects.store import Store
from storage.runs.run_store import Origin, RunStore
from storage.runs.weights import FILE_NAMES, WeightsRef, open_manifest, stream
from storage.runs.weights_writing import copy_whole
from tasks.run.run_record import VERSION_NAMES as FIELD
from tasks.run.run_record import names_to_begin_with, version_names
from tests.engines.train.train_ranks import samples, spec, stored, update_of

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}


def _neox() -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, tie_word_embeddings=False))


def _qwen() -> PreTrainedModel:
    text = {
        **SIZES,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    vision = {**VISION, "depth": 1, "out_hidden_size": 32, "num_position_embeddings": 16}
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: 5 + number for number, name in enumerate(tokens)}
    config = Qwen3_5Config(text_config=text, vision_config=vision, **ids)
    return AutoModelForImageTextToText.from_config(config)


def _gemma() -> PreTrainedModel:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    text = {**SIZES, "num_key_value_heads": 1, "head_dim": 16}
    ids = {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
    return AutoModelForImageTextToText.from_config(config)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories by family; Qwen's has a layer for multi-token prediction besides."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(3)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1))
    made = {"gpt_neox": _neox(), "qwen3_5": _qwen(), "gemma3": _gemma(), "llama": llama}
    for name, model in made.items():
        model.save_pretrained(folder / name)
    file = folder / "qwen3_5" / "model.safetensors"
    tensors = load_file(file)
    tensors["mtp.norm.weight"] = torch.randn(32)
    save_file(tensors, file, metadata={"format": "pt"})
    return {name: folder / name for name in made}


def _engine(
    directory: Path, folder: Path, run: str = "run", names: str = "checkpoint"
) -> FSDPEngine:
    model = PretrainedModel(path=str(directory))
    own = spec(folder, run).model_copy(update={"model": model, "version_names": names})
    engine = FSDPEngine(own)
    engine.join(0, 1, "127.0.0.1", 0, 1, 60.0)
    return engine


def _files(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_what_the_files_call_otherwise_and_hold_besides(checkpoints: dict[str, Path]) -> None:
    neox = checkpoint_names(checkpoints["gpt_neox"])
    assert dict(neox.in_files) == {"lm_head.weight": "embed_out.weight"}
    assert not neox.unused

    qwen = checkpoint_names(checkpoints["qwen3_5"])
    assert qwen.in_files["model.norm.weight"] == "model.language_model.norm.weight"
    assert "mtp.norm.weight" in qwen.unused
    assert any(name.startswith("model.visual.") for name in qwen.unused)
    assert qwen.own("model.language_model.norm.weight") == "model.norm.weight"
    assert qwen.own("model.norm.weight") == "model.norm.weight"  # as older versions have it
    assert qwen.own("mtp.norm.weight") is None

    llama = checkpoint_names(checkpoints["llama"])
    assert not llama.in_files and not llama.unused


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3_5", "gemma3", "llama"])
def test_a_version_is_the_checkpoint_again(
    checkpoints: dict[str, Path], tmp_path: Path, family: str
) -> None:
    engine = _engine(checkpoints[family], tmp_path)

    weights = engine.export_weights(0, "float32")

    files = _files(checkpoints[family])
    version = dict(stream(engine._store, weights))
    assert files.keys() <= version.keys()
    assert version.keys() - files.keys() <= {"lm_head.weight"}  # of a tied head
    assert all(torch.equal(version[name], tensor) for name, tensor in files.items())
    assert engine.digest("float32") == weights.digest
    assert not engine.compare(weights, "float32").differing
    shapes, names = tensor_shapes(checkpoints[family]), checkpoint_names(checkpoints[family])
    check_manifest(engine._store, weights, shapes, names)


def test_what_is_trained_changes_and_the_rest_stays(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    engine = _engine(checkpoints["gpt_neox"], tmp_path)
    batch = stored(tmp_path, samples())
    engine.update(update_of(batch, AlgorithmConfig(), 1))

    weights = engine.settle_weights(1, "float32")

    folder = tmp_path / "store" / weights.key
    loaded, before = (
        AutoModelForCausalLM.from_pretrained(place).state_dict()
        for place in (folder, checkpoints["gpt_neox"])
    )
    held = engine._policy.model.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(loaded[name], value.full_tensor()) for name, value in held.items())
    assert not torch.equal(loaded["lm_head.weight"], before["lm_head.weight"])


def test_transformers_loads_a_version_of_a_wrapped_model_with_its_tower(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    engine = _engine(checkpoints["qwen3_5"], tmp_path)
    weights = engine.settle_weights(0, "float32")

    model, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "store" / weights.key, output_loading_info=True
    )

    assert not info["missing_keys"]
    tower = _files(checkpoints["qwen3_5"])["model.visual.patch_embed.proj.weight"]
    assert torch.equal(model.model.visual.patch_embed.proj.weight, tower)


def test_ranks_read_a_version_whatever_names_it_has(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    older = _engine(checkpoints["qwen3_5"], tmp_path, "older", names="model")
    newer = _engine(checkpoints["qwen3_5"], tmp_path, "newer")
    held = newer._policy.model.state_dict()["model.norm.weight"]  # type: ignore[union-attr]
    before = held.clone()
    assert (
        "model.norm.weight"
        in open_manifest(older._store, older.export_weights(0, "float32")).tensors
    )

    for engine in (older, newer):
        weights = engine.export_weights(0, "float32")
        held.add_(1.0)
        newer.load_weights(weights, 0)
        assert torch.equal(held, before)


def test_a_version_that_lacks_a_weight_is_refused_by_the_models_name(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    engine = _engine(checkpoints["qwen3_5"], tmp_path)
    weights = engine.export_weights(0, "float32")
    directory = checkpoints["qwen3_5"]
    shapes = {**tensor_shapes(directory), "model.other.weight": (3,)}

    with pytest.raises(WeightMismatch, match=r"has no tensor model\.other\.weight"):
        check_manifest(engine._store, weights, shapes, checkpoint_names(directory))


def test_a_run_goes_on_with_the_names_that_it_began_with(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    older, newer = RunStore(store, "older"), RunStore(store, "newer")
    older.write_run({"config": {}})
    newer.write_run({"config": {}, FIELD: "files"})
    between = RunStore(store, "between")
    between.write_run({"config": {}, FIELD: "checkpoint"})
    weights = WeightsRef(version=3, key="older/weights/v3", digest="d", nbytes=1)
    origin = Origin(
        run="older",
        step=3,
        at=3,
        commit_digest="c",
        weights=weights,
        trainer_state=True,
        cursor=True,
    )

    assert (version_names(older), version_names(newer)) == ("model", "files")
    assert version_names(between) == "checkpoint"
    assert names_to_begin_with(newer, None) == "files"
    assert names_to_begin_with(newer, origin) == "model"
    assert names_to_begin_with(older, origin.model_copy(update={"run": "newer"})) == "files"


# Mixtures whose files have each expert apart, and what lies in them that no code uses.
MIXTURES = {
    "Mixtral": "",
    "DeepSeek V3": "model.layers.61.mlp.experts.0.up_proj.weight",
    "Qwen3-Next": "mtp.layers.0.mlp.experts.0.up_proj.weight",
}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Their model directories."""
    folder = tmp_path_factory.mktemp("mixtures")
    made = {family: make(family, folder / family) for family in MIXTURES}
    for family, directory in made.items():
        if MIXTURES[family]:
            tensors = _files(directory) | {MIXTURES[family]: torch.randn(5, 3)}
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return made


def _exported(engine: FSDPEngine, weights: WeightsRef, folder: Path) -> dict[str, torch.Tensor]:
    store, target = engine._store, Store(f"file://{folder}")
    copy_whole(store, weights, target, "export", stream_whole(store, weights))
    assert not target.exists(f"export/{FILE_NAMES}")
    shards = sorted((folder / "export").glob("*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


@pytest.mark.parametrize("family", MIXTURES)
def test_a_version_of_stacked_tensors_is_exported_as_its_checkpoint(
    mixtures: dict[str, Path], tmp_path: Path, family: str
) -> None:
    directory = mixtures[family]
    engine = _engine(directory, tmp_path, names="files")
    weights = engine.settle_weights(0, "float32")
    files, version = _files(directory), dict(stream(engine._store, weights))
    stacks = checkpoint_names(directory).stacks
    assert stacks.keys() <= version.keys()
    assert set(MIXTURES[family].split()) <= version.keys()

    exported = _exported(engine, weights, tmp_path / "exports")

    assert files.keys() <= exported.keys() <= files.keys() | {"lm_head.weight"}
    assert all(torch.equal(exported[name], tensor) for name, tensor in files.items())
    check_manifest(engine._store, weights, tensor_shapes(directory), checkpoint_names(directory))


@pytest.mark.parametrize("names", ["model", "checkpoint", "files"])
def test_every_kind_of_names_is_read_and_exported_alike(
    mixtures: dict[str, Path], tmp_path: Path, names: str
) -> None:
    """Runs of older Refrains have the first two, which leave out what no code uses."""
    directory = mixtures["Qwen3-Next"]
    engine = _engine(directory, tmp_path, names=names)
    weights = engine.settle_weights(0, "float32")
    held = {name: whole.clone() for name, whole in _whole(engine).items()}
    for tensor in engine._policy.model.parameters():  # type: ignore[union-attr]
        tensor.data.add_(1.0)

    engine.load_weights(weights, 0)

    assert all(torch.equal(held[name], whole) for name, whole in _whole(engine).items())
    assert not engine.compare(weights, "float32").differing
    exported = _exported(engine, weights, tmp_path / "exports")
    besides = {MIXTURES["Qwen3-Next"]} if names != "files" else set()
    assert _files(directory).keys() - exported.keys() == besides


def _whole(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    state = engine._policy.model.state_dict()  # type: ignore[union-attr]
    return {name: value.full_tensor() for name, value in state.items()}


def test_transformers_loads_what_was_exported(mixtures: dict[str, Path], tmp_path: Path) -> None:
    engine = _engine(mixtures["Mixtral"], tmp_path, names="files")
    batch = stored(tmp_path, samples())
    engine.update(update_of(batch, AlgorithmConfig(), 1))
    weights = engine.settle_weights(1, "float32")

    exported = _exported(engine, weights, tmp_path / "exports")

    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in exported
    loaded = load_for_training(tmp_path / "exports" / "export").state_dict()
    assert all(torch.equal(loaded[name], whole) for name, whole in _whole(engine).items())


@pytest.mark.parametrize("names", ["files", "checkpoint"])
def test_biases_of_scores_are_not_rounded(
    mixtures: dict[str, Path], tmp_path: Path, names: str
) -> None:
    """An engine that samples would choose other experts; versions of older runs stay as they were."""
    engine = _engine(mixtures["DeepSeek V3"], tmp_path, names=names)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    held = dict(engine._policy.model.named_buffers())[bias]  # type: ignore[union-attr]
    held.copy_(torch.tensor([0.1, -0.3, 0.7, 0.001]))

    weights = engine.settle_weights(0, "bfloat16")

    version = dict(stream(engine._store, weights))
    assert version["model.norm.weight"].dtype == torch.bfloat16
    assert torch.equal(version[bias].float(), held) == (names == "files")
    assert engine.digest("bfloat16") == weights.digest
    assert not engine.compare(weights, "bfloat16").differing
    sampling = build_untied(mixtures["DeepSeek V3"], "bfloat16", "cpu")
    assert sampling.state_dict()[bias].dtype == torch.float32


def test_files_without_a_head_have_their_experts_below_the_models_names(tmp_path: Path) -> None:
    directory = make("Qwen3-MoE", tmp_path / "model")
    whole = _files(directory)
    bare = {
        name.removeprefix("model."): one for name, one in whole.items() if name != "lm_head.weight"
    }
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(bare, directory / "model.safetensors", metadata={"format": "pt"})
    engine = _engine(directory, tmp_path, names="files")
    weights = engine.settle_weights(0, "float32")
    exported = _exported(engine, weights, tmp_path / "exports")
    assert exported.keys() == {f"model.{name}" for name in bare} | {"lm_head.weight"}


def test_what_the_files_hold_besides_has_their_order(checkpoints: dict[str, Path]) -> None:
    """Versions of a run that goes on are compared with those that it made before, name by name."""
    unused = list(checkpoint_names(checkpoints["qwen3_5"]).unused)
    assert unused == [
        name for name in stored_tensors(checkpoints["qwen3_5"]) or {} if name in unused
    ]


def test_a_run_without_a_rate_keeps_the_biases_that_it_began_with(
    mixtures: dict[str, Path], tmp_path: Path
) -> None:
    engine = _engine(mixtures["DeepSeek V3"], tmp_path, names="files")
    held = dict(engine._policy.model.named_buffers())  # type: ignore[union-attr]
    bias = held["model.layers.1.mlp.gate.e_score_correction_bias"]
    bias.fill_(0.25)
    engine.version = 0
    engine.save_state(0)
    bias.zero_()
    engine.load_state(0)
    assert bias.tolist() == [0.25] * 4


def test_names_that_do_not_make_up_a_tensor_are_refused_by_its_name(
    mixtures: dict[str, Path], tmp_path: Path
) -> None:
    engine = _engine(mixtures["Mixtral"], tmp_path, names="files")
    weights = engine.settle_weights(0, "float32")
    file = tmp_path / "store" / weights.key / FILE_NAMES
    names = json.loads(file.read_text())
    stack, parts = next(iter(names["stacks"].items()))
    for damaged, said in (
        (parts[1:], re.escape(stack)),
        ([{"name": "a", "shape": [-1]}], re.escape(stack)),
        ("no list", FILE_NAMES),
    ):
        file.write_text(json.dumps({**names, "stacks": {**names["stacks"], stack: damaged}}))
        with pytest.raises(ObjectDamaged, match=said):
            _exported(engine, weights, tmp_path / "exports")
