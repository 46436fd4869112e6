"""What `benchmarks.gpu` checks and measures, a function for each part; each runs in its own process.

Models have the shapes of published ones and random weights, so nothing is downloaded and speed is as
it is; nobody learns anything.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.algorithm.algorithm import AlgorithmConfig
from configs.model import PretrainedModel, RandomModel
from configs.rollout import RolloutConfig
from configs.train import TrainConfig
from engines.models import load_tokenizer, materialize
from engines.rollout.contract import RolloutRequest, RolloutSpec, Sampling
from engines.rollout.engine import RolloutEngine
from engines.train.compiled import lacking
from engines.train.fsdp_engine import FSDPEngine
from engines.train.spec import TrainSpec
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from tasks.commands.replay_demand import TOLERANCE, share_of_way

# layers, width, heads, key heads, MLP width, words; those of Qwen2.5
SHAPES = {
    "small": (2, 128, 4, 2, 256, 2048),
    "0.5b": (24, 896, 14, 2, 4864, 151936),
    "1.5b": (28, 1536, 12, 2, 8960, 151936),
    "7b": (28, 3584, 28, 4, 18944, 152064),
}
TIED = ("small", "0.5b", "1.5b")  # have one embedding for both ends
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a part works with."""

    shape: str  # of SHAPES
    folder: Path  # models and stores of all parts
    samples: int  # rows of an update, or of a rollout
    prompt: int  # tokens
    response: int  # tokens

    @property
    def small(self) -> bool:
        """Whether this only shows that it runs."""
        return self.shape == "small"

    @property
    def compute(self) -> str:
        """The format of matrix products; a CPU may take bfloat16 at a fiftieth of its speed."""
        return "bfloat16" if CUDA else "float32"

    def model(self) -> PretrainedModel:
        """The shape's model, drawn when it is first asked for."""
        return PretrainedModel(path=str(drawn(self.shape, self.folder)))

    def train_engine(
        self, rank: int = 0, world: int = 1, port: int = 0, **train: Any
    ) -> FSDPEngine:
        """A rank that has joined: NCCL on a GPU, Gloo on a CPU."""
        settings = {
            "compute_dtype": self.compute,
            "learning_rate": 1e-6,
            "micro_batch_tokens": 32768 if CUDA else 2048,
            "gradient_checkpointing": not self.small,
        }
        engine = FSDPEngine(
            TrainSpec(
                model=self.model(),
                model_cache=str(self.folder / "cache"),
                train=TrainConfig(**{**settings, **train}),
                role="actor",
                store_uri=f"file://{self.folder}/store",
                run=f"gpu-{self.shape}",
                threads=torch.get_num_threads(),
            )
        )
        engine.join(rank, world, "127.0.0.1", port, generation=1, timeout=300.0)
        return engine

    def rollout_engine(self, kind: str, sleeps: bool = False) -> RolloutEngine:
        """An engine without weights yet."""
        from engines.rollout.hf_engine import HFEngine
        from engines.rollout.vllm_engine import VllmEngine

        spec = RolloutSpec(
            model=self.model(),
            rollout=RolloutConfig(
                engine=kind,
                dtype=self.compute,
                max_sequences=self.samples,
                kv_cache_gib=0.1,
                gpu_memory_utilization=0.5,
            ),
            store_uri=f"file://{self.folder}/store",
            sleeps=sleeps,
            max_model_len=self.prompt + self.response,
        )
        return HFEngine(spec) if kind == "transformers" else VllmEngine(spec)


@dataclass(kw_only=True, slots=True)
class Found:
    """What a part found."""

    failed: str | None = None  # why a check did not hold
    skipped: str | None = None  # why it was not run
    metrics: dict[str, float | str] = field(default_factory=dict)


def drawn(shape: str, folder: Path) -> Path:
    """A checkpoint of a shape with random bfloat16 weights and the character tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    place = folder / "models" / shape
    if (place / "drawn").exists():
        return place
    characters = load_tokenizer(
        materialize(RandomModel(layers=1, hidden_size=32), folder / "cache")
    )
    layers, width, heads, keys, inner, words = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        max_position_embeddings=32768,
        tie_word_embeddings=shape in TIED,
        bos_token_id=characters.bos_token_id,
        eos_token_id=characters.eos_token_id,
        pad_token_id=characters.pad_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(place)
    characters.save_pretrained(place)
    (place / "drawn").touch()
    return place


def rows(job: Job, groups_of: int = 8) -> dict[str, Any]:
    """Prompts that `groups_of` responses share, of half to all of their length; drawn tokens."""
    random = np.random.default_rng(0)
    words = SHAPES[job.shape][-1]
    prompts, responses = [], []
    for number in range(job.samples):
        if number % groups_of == 0:
            prompt = random.integers(10, words, job.prompt)
        prompts.append(prompt)
        length = int(random.integers(job.response // 2, job.response + 1))
        responses.append(random.integers(10, words, length))
    return {
        "prompt_ids": prompts,
        "response_ids": responses,
        "advantages": [np.full(len(r), random.normal(), dtype=np.float32) for r in responses],
        "group_id": np.arange(job.samples) // groups_of,
    }


def stored(job: Job) -> BatchRef:
    """The rows as a batch."""
    store = Store(f"file://{job.folder}/store")
    return write_batch(store, f"rows-{job.shape}.safetensors", rows(job))


@contextmanager
def timed(metrics: dict[str, float | str], name: str) -> Iterator[None]:
    """Put the seconds of a block among the metrics."""
    began = time.perf_counter()
    yield
    if CUDA:
        torch.cuda.synchronize()
    metrics[name] = round(time.perf_counter() - began, 3)


# --- checks -----------------------------------------------------------------------------------------


def logprobs(job: Job) -> Found:
    """The packed forward pass against plain ones of transformers: no further from float32."""
    from transformers import AutoModelForCausalLM

    data = rows(job)
    some = list(range(0, job.samples, max(1, job.samples // 8)))
    pairs = [(data["prompt_ids"][n].tolist(), data["response_ids"][n].tolist()) for n in some]

    def plain(dtype: torch.dtype) -> torch.Tensor:
        model: Any = AutoModelForCausalLM.from_pretrained(job.model().path, dtype=dtype)
        model = model.to(DEVICE)
        parts = []
        for prompt, response in pairs:
            ids = torch.tensor([prompt + response], device=DEVICE)
            with torch.no_grad():
                table = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            parts.append(
                table.gather(1, torch.tensor(response, device=DEVICE)[:, None])[:, 0].cpu()
            )
        return torch.cat(parts)

    exact = plain(torch.float32)
    ordinary = plain(getattr(torch, job.compute))
    free()
    engine = job.train_engine()
    whole = [prompt + response for prompt, response in pairs]
    packed = engine.score(whole, [len(prompt) for prompt, _ in pairs])
    ours = torch.tensor([value for row in packed for value in row])
    engine.close()
    off, usual = (float((x - exact).abs().mean()) for x in (ours, ordinary))
    found = Found(metrics={"packed_off_nats": off, "plain_off_nats": usual, "tokens": len(exact)})
    if off > 1.5 * usual + 1e-4:
        found.failed = f"packed log-probs are {off:.2g} nats off float32, plain ones {usual:.2g}"
    return found


def round_trip(job: Job) -> Found:
    """Weights to the store and into the other engine: the same digest, the same log-probs."""
    found = Found()
    engine = job.train_engine()
    with timed(found.metrics, "publish_seconds"):
        weights = engine.export_weights(0, job.compute)
    found.metrics["gbytes"] = round(weights.nbytes / 1e9, 3)
    data = rows(job)
    sequences = [
        data["prompt_ids"][n].tolist() + data["response_ids"][n].tolist()[:32] for n in range(4)
    ]
    lengths = [job.prompt] * 4
    expected = engine.score(sequences, lengths)
    engine.close()
    free()
    for kind in ("transformers", "vllm") if has_vllm() else ("transformers",):
        with timed(found.metrics, f"{kind}_start_seconds"):
            rollout = job.rollout_engine(kind)
        try:
            with timed(found.metrics, f"{kind}_sync_seconds"):
                report = rollout.sync(weights)
            scores = rollout.score(sequences, lengths)
        finally:
            rollout.close()
            free()
        gap = max(
            abs(a - b)
            for x, y in zip(scores, expected, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        found.metrics[f"{kind}_gap_nats"] = gap
        if report.digest != weights.digest:
            found.failed = f"{kind} holds {report.digest}, published was {weights.digest}"
        elif gap > (0.5 if CUDA else 0.01):
            found.failed = f"{kind} scores a token {gap:.2g} nats away from the trainer"
    return found


def replay(job: Job) -> Found:
    """The same update twice from one snapshot: whether it is equal to the bit, and how far if not."""
    found = Found()
    for fixed in (False, True):
        name = "update_again" + "_deterministic" * fixed
        engine, batch = job.train_engine(learning_rate=1e-4, deterministic=fixed), stored(job)
        engine.save_state(0)
        engine.update(batch, AlgorithmConfig(), 1.0, job.response, 1)
        digest, weights = engine.digest(), engine.export_weights(100 + fixed, job.compute)
        engine.load_state(0)
        way = engine.compare(weights, job.compute)
        engine.update(batch, AlgorithmConfig(), 1.0, job.response, 1)
        equal = engine.digest() == digest
        share = share_of_way(engine.compare(weights, job.compute), way)
        engine.close()
        free()
        found.metrics[name] = "equal to the bit" if equal else "not equal to the bit"
        found.metrics[f"{name}_share_of_way"] = share
        if not way.differing:
            found.failed = "an update changed no weight"
        elif not equal and (fixed or not CUDA):
            found.failed = f"{name}: it is to be equal to the bit, and is not"
        elif share > TOLERANCE:
            found.failed = f"{name}: {share:.2%} of the way came out otherwise"
    return found


def ranks(job: Job) -> Found:
    """Two ranks, with rows of their own and sharing sequences, against one: the same gradient."""
    if CUDA and torch.cuda.device_count() < 2:
        return Found(skipped="there is one device; two ranks need two")
    stored(job)
    job.model()
    found = Found()
    for shared in (1, 2):
        (one, *_), many = _updated(job, 1, 1), _updated(job, 2, shared)
        how = "fsdp" if shared == 1 else "sequence_parallel"
        gap = max(abs(each / one - 1) for each in many)
        found.metrics[f"{how}_gradient_norm_off"] = gap
        if gap > (0.02 if CUDA else 1e-4):
            found.failed = f"two ranks ({how}) have a gradient of norm {many[0]:.6g}, one {one:.6g}"
    return found


def _updated(job: Job, world: int, shared: int) -> list[float]:
    """The gradient's norm of an update by so many ranks, as each of them says."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pools = [ProcessPoolExecutor(1, mp_context=context) for _ in range(world)]
    try:
        pending = [
            pool.submit(_update_of_rank, job, rank, world, port, shared)
            for rank, pool in enumerate(pools)
        ]
        return [one.result(timeout=240) for one in pending]
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _update_of_rank(job: Job, rank: int, world: int, port: int, shared: int) -> float:
    if CUDA:
        torch.cuda.set_device(rank)
    engine = job.train_engine(rank, world, port, sequence_parallel=shared)
    metrics = engine.update(stored(job), AlgorithmConfig(), 1.0, job.response, 1).metrics
    engine.close()
    return metrics["train/grad_norm"]


# --- measurements -----------------------------------------------------------------------------------


def update_compiled(job: Job) -> Found:
    """The same with compiled layers."""
    if lack := lacking(gpu=CUDA):
        return Found(skipped=lack)
    return update(job, compile=True)


def update(job: Job, **train: Any) -> Found:
    """Tokens a second, share of the device's peak and peak memory of an update."""
    engine, batch = job.train_engine(**train), stored(job)
    first: dict[str, float | str] = {}
    with timed(first, "first_seconds"):  # warms up, and compiles
        engine.update(batch, AlgorithmConfig(), 1.0, job.response, 1)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    metrics = engine.update(batch, AlgorithmConfig(), 1.0, job.response, 2).metrics
    engine.close()
    wanted = ("tokens", "tokens_per_second", "seconds", "flops_per_second", "mfu")
    found = Found(metrics={n: metrics[f"train/{n}"] for n in wanted if f"train/{n}" in metrics})
    found.metrics |= first
    for name, value in metrics.items():
        phase = name.removeprefix("train/")
        if phase.endswith("_seconds"):
            found.metrics[phase] = round(value, 3)
    if CUDA:
        found.metrics["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


def rollout(job: Job) -> Found:
    """Tokens a second of the rollout engines, all samples at once."""
    found, store = Found(), Store(f"file://{job.folder}/store")
    random = np.random.default_rng(0)
    groups = max(1, job.samples // 8)
    prompts = write_batch(
        store,
        f"prompts-{job.shape}.safetensors",
        {
            "prompt_ids": [random.integers(10, 90, job.prompt) for _ in range(groups)],
            "group_id": np.arange(groups),
            "prompt_row": np.arange(groups),
        },
    )
    engine = job.train_engine()
    weights = engine.export_weights(0, job.compute)
    engine.close()
    free()
    for kind in ("vllm", "transformers") if has_vllm() else ("transformers",):
        sampler = job.rollout_engine(kind)
        try:
            sampler.sync(weights)
            rates = []
            for number in range(2):  # the first warms up
                request = RolloutRequest(
                    prompts=prompts,
                    sampling=Sampling(n=8, max_new_tokens=job.response, ignore_eos=True),
                    out_key=f"samples-{job.shape}-{kind}-{number}.safetensors",
                    step=number,
                    shard=0,
                )
                began = time.perf_counter()
                stats = sampler.generate(request).stats
                rates.append(stats.tokens / (time.perf_counter() - began))
        finally:
            sampler.close()
            free()
        found.metrics[f"{kind}_tokens_per_second"] = round(rates[-1], 1)
    return found


def free() -> None:
    """Give back what is no longer used."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def has_vllm() -> bool:
    """Whether vLLM is installed, in whichever build."""
    return importlib.util.find_spec("vllm") is not None


PARTS: dict[str, Callable[[Job], Found]] = {
    "logprobs": logprobs,
    "round_trip": round_trip,
    "replay": replay,
    "ranks": ranks,
    "update": update,
    "update_compiled": update_compiled,
    "rollout": rollout,
}
