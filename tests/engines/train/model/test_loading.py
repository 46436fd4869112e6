"""Models loaded by rank: to the bit what transformers loads whole, and only the rank's bytes read."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    HrmTextConfig,
    HrmTextForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaPreTrainedModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from configs.model import PretrainedModel, RandomModel
from engines.models.checkpoints import load_for_training
from engines.train.batching.packed_batch import pack
from engines.train.fsdp_engine import FSDPEngine
from engines.train.model.loading import open_checkpoint
from engines.train.model.sequence_parallel import SequenceGroup
from engines.train.policy import Policy
from storage.batches.tensors import code_of
from storage.objects.errors import ObjectDamaged
from storage.objects.store import Store
from storage.objects.usage import COUNTER
from storage.runs.weights import tensor_digest, weights_digest
from storage.runs.weights_writing import publish
from tests.engines.train.train_ranks import Ranks, spec
from tests.ports import free_ports

# Three ranks have 2, 2 and 1 rows of what has 5, and none is left for the last one of 2.
SMALL = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 64,
}
IN_ONE = {"num_key_value_heads": 4, "num_layers_per_stack": 1, "num_hidden_layers": 8}
TOKENS = ([5, 6, 7, 8, 9, 3, 1], 3)
BYTES_MODEL = RandomModel(layers=4, hidden_size=192, heads=6, seed=3)  # 6 MB in float32


def engine_of(directory: Path, folder: Path) -> FSDPEngine:
    model = PretrainedModel(path=str(directory))
    return FSDPEngine(spec(folder).model_copy(update={"model": model}))


def joined(directory: Path, folder: Path) -> FSDPEngine:
    engine = engine_of(directory, folder)
    engine.join(0, 1, "127.0.0.1", 0, 1, 60.0)
    return engine


def stored_again(
    directory: Path, source: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> Path:
    """A copy of a model directory of one file, whose tensors were changed."""
    directory.mkdir()
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _head_instead(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


def _head_too(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def _without_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def _old_buffer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(1)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories by what is special about them."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(4)
    tied = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
    untied = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False))
    experts = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=3))
    tied.save_pretrained(folder / "tied")
    untied.save_pretrained(folder / "untied", max_shard_size="2KB")
    experts.save_pretrained(folder / "experts")  # each in tensors of its own
    # Several weights of the model are one tensor of its files.
    halves = HrmTextForCausalLM(HrmTextConfig(**SMALL | IN_ONE))
    halves.save_pretrained(folder / "converted")
    for dtype in (torch.bfloat16, torch.float16):
        untied.to(dtype).save_pretrained(folder / str(dtype).removeprefix("torch."))
    for name, change in (
        ("head only", _head_instead),
        ("head too", _head_too),
        ("no prefix", _without_prefix),
        ("old buffer", _old_buffer),
    ):
        stored_again(folder / name, folder / "tied", change)
    return {path.name: path for path in folder.iterdir()}


CASES = [
    *("tied", "untied", "bfloat16", "float16", "head only", "head too", "no prefix", "old buffer"),
    *("experts", "converted"),
]
BY_RANK_0 = {"converted"}


def digest_of(module: nn.Module) -> str:
    return weights_digest(
        (name, code_of(tensor.dtype), tuple(tensor.shape), tensor_digest(tensor))
        for name, tensor in module.state_dict().items()
    )


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank loaded."""

    digests: dict[str, str]  # by case
    scores: dict[str, list[float]]


def load_all(
    rank: int,
    world: int,
    _: list[int],
    ports: list[int],
    folder: Path,
    directories: dict[str, Path],
) -> Seen:
    digests, scores = {}, {}
    port = iter(ports)
    for case in CASES:
        engine = engine_of(directories[case], folder)
        engine.join(rank, world, "127.0.0.1", next(port), 1, 60.0)
        digests[case] = engine.digest()
        if case not in ("experts", "converted"):  # not multiplied in its order
            scores[case] = engine.score([TOKENS[0]], [TOKENS[1]])[0]
        engine.close()
    return Seen(digests=digests, scores=scores)


def whole_scores(directory: Path) -> list[float]:
    """Log-probs by the model that transformers loads, which no rank shares."""
    ids, prompt = np.array(TOKENS[0]), TOKENS[1]
    packed = pack([ids[:prompt]], [ids[prompt:]], torch.device("cpu"))
    policy = Policy(load_for_training(directory))
    with torch.no_grad():
        alone = SequenceGroup(group=None, rank=0, size=1, replica=0, replicas=1)
        return policy(packed, alone, temperature=1.0, chunk=1024, dtype=torch.float32)[0].tolist()


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_weights_are_those_that_transformers_loads(
    world: int, directories: dict[str, Path], tmp_path: Path
) -> None:
    ports = free_ports(len(CASES))
    if world == 1:
        parts = [load_all(0, 1, [], ports, tmp_path, directories)]
    else:
        ranks = Ranks(world)
        try:
            parts = ranks.run(load_all, ports, tmp_path, directories)
        finally:
            ranks.close()
    for case in CASES:
        digest = digest_of(load_for_training(directories[case]))
        assert {part.digests[case] for part in parts} == {digest}, case
        by_rows = open_checkpoint(directories[case]).tensors is not None
        assert by_rows == (case not in BY_RANK_0), case
    for case, scores in parts[0].scores.items():
        assert scores == whole_scores(directories[case]), case


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(LlamaConfig(**SMALL)),
        LlamaForCausalLM(
            LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
        ),
        LlamaForCausalLM(
            LlamaConfig(**SMALL, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
        ),
        Qwen2ForCausalLM(Qwen2Config(**SMALL)),
        Gemma3ForCausalLM(Gemma3TextConfig(**SMALL)),
    ],
    ids=["llama", "linear", "yarn", "qwen2", "gemma3"],
)  # fmt: skip
def test_buffers_are_those_that_transformers_computes(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    model.save_pretrained(tmp_path / "model")
    whole = load_for_training(tmp_path / "model")
    wanted = dict(whole.named_buffers())
    got = dict(joined(tmp_path / "model", tmp_path)._loaded().model.named_buffers())
    assert got.keys() == wanted.keys() and len(got) > 1
    for name, buffer in wanted.items():
        assert torch.equal(got[name], buffer) and got[name].dtype == buffer.dtype, name


def test_a_buffer_that_nobody_computes_is_refused(
    directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(ValueError, match=r"does not compute its buffer model\.rotary_emb"):
        joined(directories["tied"], tmp_path)


def characters_read() -> int:
    """Bytes that this process has read by system calls, from anything."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@dataclass(frozen=True, kw_only=True)
class Read:
    """Bytes that one rank has read."""

    joining: int  # for everything that it does when it joins
    version: int  # from the store, for a version's weights


def read_in_joining(engine: FSDPEngine, rank: int, world: int, ports: list[int]) -> int:
    """Bytes that a rank reads when it joins."""
    engine.join(rank, world, "127.0.0.1", ports.pop(), 1, 60.0)  # imports what is needed
    before = characters_read()
    engine.join(rank, world, "127.0.0.1", ports.pop(), 2, 60.0)
    return characters_read() - before


def load_and_count(rank: int, world: int, ports: list[int], folder: Path) -> Read:
    engine = FSDPEngine(spec(folder).model_copy(update={"model": BYTES_MODEL}))
    joining = read_in_joining(engine, rank, world, ports)
    digest, weights = engine.digest(), engine.export_weights(0, "float32")
    with torch.no_grad():
        for parameter in engine._loaded().parameters():
            parameter.zero_()
    before = COUNTER.total().bytes_read
    engine.load_weights(weights, 0)
    taken = COUNTER.total().bytes_read - before
    assert engine.digest() == digest
    return Read(joining=joining, version=taken)


def test_a_rank_reads_its_share(tmp_path: Path) -> None:
    pair = Ranks(2)
    try:
        read = pair.run(load_and_count, tmp_path)
    finally:
        pair.close()
    (file,) = (tmp_path / "models").glob("*/model.safetensors")
    size, small = file.stat().st_size, 2**17  # small: headers, config.json, the version's manifest
    assert size > 40 * small
    for rank in read:
        assert size // 2 - small < rank.joining < size // 2 + small
    files = tmp_path.glob("store/run/weights/*/*.safetensors")
    version = sum(part.stat().st_size for part in files)
    taken = [rank.version for rank in read]
    assert version < sum(taken) < version + 2 * small
    assert max(taken) < 0.55 * version


def _missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _unknown(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(5, 8)


def _other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(6, 8)


def _other_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_missing, r"the tensor model\.layers\.1\.mlp\.up_proj\.weight is not in its files"),
        (_unknown, r"model\.layers\.2\.mlp\.up_proj\.weight is in its files, but not in the model"),
        (_other_shape, r"model\.layers\.1\.mlp\.up_proj\.weight has (another )?shape.* in "),
        (_other_head, r"ties .*, whose values differ\. Set tie_word_embeddings to false"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(
    directories: dict[str, Path],
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    says: str,
) -> None:
    directory = stored_again(tmp_path / "changed", directories["tied"], change)
    with pytest.raises(ValueError, match=says) as caught:
        joined(directory, tmp_path)
    assert str(caught.value).startswith(f"{directory}: ") and "Set " in str(caught.value)


def test_quantised_weights_are_refused(directories: dict[str, Path], tmp_path: Path) -> None:
    directory = stored_again(tmp_path / "changed", directories["tied"], lambda tensors: None)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has a quantization_config.* Set model.path to"):
        engine_of(directory, tmp_path)


@pytest.fixture
def engine(directories: dict[str, Path], tmp_path: Path) -> Iterator[FSDPEngine]:
    engine = joined(directories["untied"], tmp_path)
    yield engine
    engine.close()


def test_a_damaged_version_is_not_taken(engine: FSDPEngine, tmp_path: Path) -> None:
    ref = engine.export_weights(0, "bfloat16")
    (file,) = (tmp_path / "store" / ref.key).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    os.chmod(file, 0o644)
    file.write_bytes(data)
    with pytest.raises(ObjectDamaged, match="digest does not match"):
        engine.load_weights(ref, 0)
    assert engine.version is None


def test_a_version_of_another_model_changes_nothing(engine: FSDPEngine, tmp_path: Path) -> None:
    store, before = Store(str(tmp_path / "store")), engine.digest()
    tensors = dict(load_for_training(engine._directory).state_dict())
    for version, (name, shape) in enumerate(
        {"lm_head.weight": None, "model.norm.weight": (9,), "other": (3,)}.items()
    ):
        changed = {n: -t for n, t in tensors.items() if n != name}
        if shape is not None:
            changed[name] = torch.zeros(shape)
        ref = publish(store, "run", version, changed.items(), {})
        with pytest.raises(RuntimeError, match=rf"ensor {name}\b.* Set model to the one"):
            engine.load_weights(ref, 0)
        assert engine.digest() == before
