"""Hours that the recipes take on H100s or H200s, by a model of the seconds of a step. Nothing is run.

python -m benchmarks.recipe_hours

What it goes by was measured on one H200 (docs/gpu.md): updates at 0.35 to 0.53 of 989 TFLOP/s,
without what is computed again (here 0.4); a vLLM that takes 50 us for each token of each sequence,
since its host code is the limit; 1.1 s for a billion parameters' way to the engines. Lengths of
answers are as their sources tell them, else guessed. Several GPUs are taken to share the work without
loss, which was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.recipe import load_recipe
from configs.recipe_files import FOLDER, flow_of
from configs.resolving import ANY_MACHINE, resolve
from flows.recipe import settings_of

FLOPS = 0.4 * 989e12  # a second, of a GPU
HOST = 50e-6  # seconds of a vLLM for a token of a sequence
LEAST = 0.010  # seconds of its step, however few the sequences
READ = 3.3e12  # bytes of memory a second, of an H100
SYNC = 1.1  # seconds for a billion parameters: published, loaded, on the disk
STARTED = 0.05  # hours


@dataclass(frozen=True, slots=True)
class Size:
    """What of a model's sizes its seconds depend on."""

    billions: float  # of parameters
    layers: int
    width: int  # of all heads together
    kept: int  # of keys and values, in a layer


SIZES = {
    "Qwen/Qwen2.5-0.5B-Instruct": Size(0.49, 24, 896, 256),
    "Qwen/Qwen2.5-1.5B-Instruct": Size(1.54, 28, 1536, 512),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Size(1.78, 28, 1536, 512),
    "Qwen/Qwen2.5-3B-Instruct": Size(3.09, 36, 2048, 512),
    "Qwen/Qwen3-4B-Instruct-2507": Size(4.02, 36, 4096, 2048),
    "Qwen/Qwen2.5-7B-Instruct": Size(7.62, 28, 3584, 1024),
    "Qwen/Qwen2.5-7B": Size(7.62, 28, 3584, 1024),
}

TEACHERS: dict[str, str] = {
    "distill-7b-1.5b": "Qwen/Qwen2.5-7B-Instruct",
}

# Tokens of a mean sample: prompt, what the environment says, and what the model writes.
TOKENS = {
    "gsm8k-qwen2.5": (120, 250),
    "gsm8k-qwen2.5-1.5b": (120, 250),
    "gsm8k-lora-7b": (120, 250),
    "deepscaler-8k": (120, 3500),  # the authors': 5,500 at first, 3,500 after a while
    "deepscaler-16k": (120, 5000),
    "deepscaler-24k": (120, 6000),
    "dapo-math-17k": (150, 2500),
    "alphabet-sort": (400, 400),
    "calculator": (400, 250),
    "search": (1200, 250),
    "deepcoder": (600, 8000),
    "python-agent": (400, 900),
    "distill-7b-1.5b": (120, 250),
}


def flops(size: Size, tokens: float, length: float, passes: int) -> float:
    """Of products and causal attention: one pass is a forward one; a backward one counts as two."""
    each = 2e9 * size.billions + 2 * size.layers * size.width * length
    return passes * each * tokens


def hours(name: str) -> tuple[float, float]:
    """Of a recipe's whole run, and GPU hours."""
    kind = settings_of(flow_of(FOLDER / f"{name}.yaml") or "grpo")
    config = resolve(load_recipe(kind, name), ANY_MACHINE).settings
    assert config.model.kind == "pretrained"
    size, (read, written) = SIZES[config.model.path], TOKENS[name]
    gpus = config.cluster.pools["gpu"].workers
    samples, length = config.prompts_per_step * config.group_size, read + written
    # Of what a step draws in rounds, half is taken to teach nothing.
    sampled = 2 * samples if config.most_rounds > 1 else samples
    at_once = min(config.rollout.max_sequences, sampled / gpus)
    cache = 2 * size.layers * size.kept * at_once * (read + written / 2)  # bytes
    device = (2e9 * size.billions + cache) / READ + flops(size, at_once, length, 1) / FLOPS
    step = max(HOST * at_once, device, LEAST)
    sampling = max(sampled / gpus * written / at_once * step, config.rollout.max_new_tokens * LEAST)
    passes = 4 if config.train.gradient_checkpointing else 3
    passes += config.train.mini_batches > 1  # log-probs before the update
    passes += config.has_reference_engine
    update = flops(size, samples * length, length, passes) / FLOPS / gpus
    sync = SYNC * size.billions * (0.3 if config.lora else 1)
    teacher = 0.0
    if name in TEACHERS:
        teacher = flops(SIZES[TEACHERS[name]], samples * length, length, 1) / FLOPS
    seconds = sampling + update + sync + teacher
    found = STARTED + config.steps * seconds / 3600
    return found, found * sum(pool.workers for pool in config.cluster.pools.values() if pool.gpus)


def text(number: float) -> str:
    """Hours as recipes and pages have them."""
    return f"{number:.1f}" if number < 10 else f"{number:.0f}"


def main() -> None:
    """A line for each recipe."""
    for name in TOKENS:
        found, of_gpus = hours(name)
        print(f"{name:20} {text(found):>5} h {of_gpus:5.0f} GPU h")


if __name__ == "__main__":
    main()
