"""What the parts of `benchmarks.gpu` work with: models of published shapes, engines, rows.

Models have random weights, so nothing is downloaded and speed is as it is; nobody learns anything.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Iterator
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
from engines.models.checkpoints import load_tokenizer, materialize
from engines.models.facts import ModelShape
from engines.rollout.contract import RolloutSpec
from engines.rollout.engine import RolloutEngine
from engines.train.contract import TrainSpec, UpdateRequest
from engines.train.fsdp_engine import FSDPEngine
from engines.train.memory_plan import MemoryPlan, largest_batch, plan_rank
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

# layers, width, heads, key heads, MLP width, words; those of Qwen2.5
SHAPES = {
    "small": (2, 128, 4, 2, 256, 2048),
    "0.5b": (24, 896, 14, 2, 4864, 151936),
    "1.5b": (28, 1536, 12, 2, 8960, 151936),
    "7b": (28, 3584, 28, 4, 18944, 152064),
    "0.6b": (28, 1024, 16, 8, 3072, 151936),  # Qwen3's; the others are Qwen2.5's
}
# What makes the update's memory less, the cheapest first; each with those before it.
SMALLER: tuple[dict[str, Any], ...] = (
    {"micro_batch_tokens": 16384},
    {"micro_batch_tokens": 8192},
    {"micro_batch_tokens": 32768, "gradient_checkpointing": True},
    {"reshard_after_forward": True},
    {"micro_batch_tokens": 16384},
    {"optimizer_device": "host"},
    {"micro_batch_tokens": 8192},
    {"activation_offload": True},
)
ROOM = 0.94  # of a device: the plan does not count CUDA's context and the allocator's fragments
GROUP = 8  # samples of a prompt
TIED = ("small", "0.5b", "1.5b", "0.6b")  # have one embedding for both ends
HEAD_SIZES = {"0.6b": 128}  # where they are not the width's share; queries and keys are normed too
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
    device_gib: float | None = None  # of which the train engine may take no more; None: the GPU's

    @property
    def small(self) -> bool:
        """Whether this only shows that it runs."""
        return self.shape == "small"

    @property
    def compute(self) -> str:
        """The format of matrix products; a CPU may take bfloat16 at a fiftieth of its speed."""
        return "bfloat16" if CUDA else "float32"

    def device_bytes(self) -> int | None:
        """Memory of the GPU, or of one as small as it is to stand for; None on a CPU."""
        if not CUDA:
            return None
        there = torch.cuda.get_device_properties(0).total_memory
        return there if self.device_gib is None else min(there, int(self.device_gib * 2**30))

    def request(self, step: int, batch: BatchRef) -> UpdateRequest:
        """The update of a step by a batch, with the usual algorithm."""
        return UpdateRequest(
            step=step,
            batch=batch,
            algorithm=AlgorithmConfig(),
            temperature=1.0,
            max_new_tokens=self.response,
        )

    def model(self) -> PretrainedModel:
        """The shape's model, drawn when it is first asked for."""
        return PretrainedModel(path=str(drawn(self.shape, self.folder)))

    @property
    def store(self) -> str:
        """Address of the store of all parts."""
        return f"file://{self.folder}/store"

    def train_spec(self, **facts: Any) -> TrainSpec:
        """Of a policy, with settings by which it fits this device and with other facts than usual."""
        given = TrainSpec(
            model=self.model(),
            model_cache=str(self.folder / "cache"),
            train=settings_for(self, self.device_bytes()),
            role="actor",
            store_uri=self.store,
            run=f"gpu-{self.shape}",
            threads=torch.get_num_threads(),
        )
        return given.model_copy(update=facts)

    def train_engine(
        self, rank: int = 0, world: int = 1, port: int = 0, **train: Any
    ) -> FSDPEngine:
        """A rank that has joined: NCCL on a GPU, Gloo on a CPU."""
        spec = self.train_spec()
        own = TrainConfig(**{**spec.train.model_dump(), **train})
        return self.joined(spec.model_copy(update={"train": own}), rank, world, port)

    def joined(self, spec: TrainSpec, rank: int = 0, world: int = 1, port: int = 0) -> FSDPEngine:
        """The engine of a spec, which has joined."""
        if CUDA:
            share = (self.device_bytes() or 0) / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(share)
        engine = FSDPEngine(spec)
        engine.join(rank, world, "127.0.0.1", port, generation=1, timeout=300.0)
        return engine

    def rollout_engine(self, kind: str, sleeps: bool = False, **facts: Any) -> RolloutEngine:
        """An engine without weights yet; facts: of its spec, if other than usual."""
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
                enforce_eager=not CUDA,  # as a run has it
            ),
            store_uri=self.store,
            sleeps=sleeps,
            max_model_len=self.prompt + self.response,
        ).model_copy(update=facts)
        return HFEngine(spec) if kind == "transformers" else VllmEngine(spec)


def plan(job: Job, train: TrainConfig, on_gpu: bool = CUDA) -> MemoryPlan:
    """What a lone rank takes of the device in an update of the job's rows."""
    layers, width, heads, keys, inner, words = SHAPES[job.shape]
    shape = ModelShape(
        hidden=width,
        layers=layers,
        intermediate=inner,
        heads=heads,
        kv_heads=keys,
        head_size=HEAD_SIZES.get(job.shape, width // heads),
        vocabulary=words,
        tied=job.shape in TIED,
        head_norms=job.shape in HEAD_SIZES,
    )
    budget = train.micro_batch_tokens
    batch = largest_batch(budget, job.prompt, job.response, job.samples, GROUP, 1)
    return plan_rank(shape, train, batch, role="actor", ranks=1, on_gpu=on_gpu)


def settings_for(job: Job, device: int | None) -> TrainConfig:
    """The fastest settings of which the plan says that they fit a device with so many bytes.

    None, on a CPU: those of a small shape. Raises ValueError where none are enough.
    """
    usual: dict[str, Any] = {
        "compute_dtype": job.compute if device is None else "bfloat16",
        "learning_rate": 1e-6,
        "micro_batch_tokens": 2048 if device is None else 32768,
        "gradient_checkpointing": False,
    }
    if device is None:
        return TrainConfig(**usual)
    changed: dict[str, Any] = {}
    for more in ({}, *SMALLER):
        changed |= more
        found = TrainConfig(**{**usual, **changed})
        if plan(job, found, on_gpu=True).peak <= ROOM * device:
            return found
    raise ValueError(
        f"By the memory plan no settings let a {job.shape} model train on a device of "
        f"{device / 2**30:.1f} GiB. Leave it out of --shapes."
    )


@dataclass(kw_only=True, slots=True)
class Found:
    """What a part found."""

    failed: str | None = None  # why a check did not hold
    skipped: str | None = None  # why it was not run
    metrics: dict[str, float | str] = field(default_factory=dict)


def described(shape: str, folder: Path) -> Path:
    """The directory of a shape's checkpoint with its settings and the character tokenizer alone."""
    from transformers import Qwen2Config

    place = folder / "models" / shape
    if (place / "described").exists():
        return place
    characters = load_tokenizer(
        materialize(RandomModel(layers=1, hidden_size=32), folder / "cache")
    )
    layers, width, heads, keys, inner, words = SHAPES[shape]
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
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
    config.save_pretrained(place)
    characters.save_pretrained(place)
    (place / "described").touch()
    return place


def drawn(shape: str, folder: Path, device: str = DEVICE) -> Path:
    """A checkpoint of a shape with random bfloat16 weights and the character tokenizer.

    Its settings stay readable while its weights are drawn (`described`).
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    place = described(shape, folder)
    if (place / "drawn").exists():
        return place
    config = Qwen2Config.from_pretrained(place)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    made = place.with_name(f"{shape}-drawing")
    model.save_pretrained(made)
    for file in made.glob("*.safetensors*"):
        file.replace(place / file.name)
    (place / "drawn").touch()
    return place


def rows(job: Job, groups_of: int = GROUP) -> dict[str, Any]:
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
    return write_batch(Store(job.store), f"rows-{job.shape}.safetensors", rows(job))


@contextmanager
def timed(metrics: dict[str, float | str], name: str) -> Iterator[None]:
    """Put the seconds of a block among the metrics."""
    began = time.perf_counter()
    yield
    if CUDA:
        torch.cuda.synchronize()
    metrics[name] = round(time.perf_counter() - began, 3)


def free() -> None:
    """Give back what is no longer used."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def has_vllm() -> bool:
    """Whether vLLM is installed, in whichever build."""
    return importlib.util.find_spec("vllm") is not None
