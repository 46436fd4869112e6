"""No file of a model's repository runs code here: pickled weights, modules, a template's words."""

from __future__ import annotations

import ast
import json
import pickle
import re
from pathlib import Path

import pytest

from configs.model import PretrainedModel, RandomModel
from engines.models import checkpoints
from engines.models.checkpoints import check_model, load_for_training, load_tokenizer, materialize

ROOT = Path(__file__).parents[3]


class Hostile:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.mark,))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = materialize(RandomModel(), tmp_path / "cache")
    assert any(directory.glob("*.safetensors"))
    return directory


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.pth"],
)
def test_pickled_weights_are_refused_and_not_read(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    mark = tmp_path / "ran"
    for file in checkpoint.glob("*.safetensors*"):
        file.unlink()
    (checkpoint / name).write_bytes(pickle.dumps(Hostile(mark)))
    with pytest.raises(ValueError, match="a pickle, which may run code.* Set model.path to"):
        check_model(PretrainedModel(path=str(checkpoint)))
    with pytest.raises(OSError, match="safetensors"):
        load_for_training(checkpoint)
    assert not mark.exists()


def test_a_pickle_beside_safetensors_is_not_read(checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(mark)))
    check_model(PretrainedModel(path=str(checkpoint)))
    load_for_training(checkpoint)
    assert not mark.exists()


def test_modules_of_a_models_repository_do_not_run(checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (checkpoint / "modeling.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for file, classes in (
        ("config.json", {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["modeling.T", None]}),
    ):
        told = json.loads((checkpoint / file).read_text())
        (checkpoint / file).write_text(json.dumps({**told, "auto_map": classes}))
    checkpoints.build_empty(checkpoint)
    load_for_training(checkpoint)
    load_tokenizer(checkpoint)
    assert not mark.exists()


def test_every_load_says_that_no_code_of_a_model_runs() -> None:
    """Left open, transformers asks on a terminal whether it may, and runs it at a y."""
    calls, without = 0, []
    for folder in ("engines", "tasks", "storage", "configs", "flows"):
        for path in sorted(ROOT.joinpath(folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                if ast.unparse(node.func) == "torch.load":
                    without.append(f"{place} {ast.unparse(node.func)}")
                built = node.func.attr in ("from_pretrained", "from_config")
                if built and re.search("auto|causal_models", ast.unparse(node.func.value), re.I):
                    calls += 1
                    words = {one.arg: ast.unparse(one.value) for one in node.keywords}
                    if words.get("trust_remote_code") != "False":
                        without.append(place)
    assert calls >= 8
    assert without == []
