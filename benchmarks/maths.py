"""What the maths costs: estimators on a large batch, losses beside the logits, log-probs in chunks.

    python -m benchmarks.maths [--device cuda] [--threads 2] [--samples 4096] [--longest 8192]

Three tables: seconds of each estimator on a jagged batch of about 10 million tokens; seconds of
each loss, forward and backward, beside the log-probs that it follows; peak memory and seconds of
log-probs and entropy in chunks and in the plain form.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from pydantic import TypeAdapter
from torch import Tensor

from configs.algorithm.advantages import Advantage
from configs.algorithm.algorithm import AlgorithmConfig
from engines.algorithms.advantages import ADVANTAGES
from engines.algorithms.aggregation import Normaliser, Rows
from engines.algorithms.from_config import objective_of
from engines.algorithms.inputs import AdvantageBatch, PolicyBatch
from engines.algorithms.losses import POLICY_LOSSES
from engines.algorithms.objective import Objective
from engines.train.logprobs import token_statistics

REPEATS = 5


def seconds(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Median wall time and median processor time of a few runs after a first one, in seconds.

    On a machine with other work the processor time, shared by the threads, tells more.
    """
    walls, processors = [], []
    work()
    for _ in range(REPEATS):
        wall, processor = time.perf_counter(), time.process_time()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return median(walls), median(processors)


def large_batch(samples: int, longest: int, device: torch.device) -> AdvantageBatch:
    """Groups of eight; lengths skewed towards short ones, up to `longest`; a tenth masked."""
    torch.manual_seed(0)
    lengths = (torch.rand(samples) ** 2.2 * longest).long().clamp(min=1)
    lengths[0] = longest
    rows = Rows.of_lengths(lengths.to(device))
    total = rows.ids.numel()
    values = torch.randn(total, device=device)
    return AdvantageBatch(
        rows=rows,
        mask=torch.rand(total, device=device) > 0.1,
        rewards=torch.randint(0, 2, (samples,), device=device).float(),
        groups=torch.arange(samples, device=device) // 8,
        values=values,
        logprobs=-values.abs(),
        ref_logprobs=-values.abs(),
        sum_pi_squared=torch.rand(total, device=device),
        baselines=torch.rand(samples, device=device),
        steps=rows.within() // 256,
        states=rows.within() // 256 % 5,
        components={"a": torch.rand(samples, device=device)},
    )


def estimators(samples: int, longest: int, device: torch.device) -> None:
    """Print the time of each estimator."""
    batch = large_batch(samples, longest, device)
    print(f"\n{samples} samples, {batch.mask.numel() / 1e6:.1f} million tokens, {device}")
    for kind, estimator in ADVANTAGES.items():
        choice = TypeAdapter(Advantage).validate_python({"kind": kind})
        options = choice.arguments()
        wall, processor = seconds(partial(estimator, batch, **options), device)
        print(f"  {kind:36} {wall:7.3f} s   processor {processor:7.3f} s")


def losses(tokens: int, hidden: int, words: int, device: torch.device) -> None:
    """Print what each loss adds to the log-probs it follows, forward and backward."""
    states = torch.randn(tokens, hidden, device=device, requires_grad=True)
    head = torch.randn(words, hidden, device=device)
    labels = torch.randint(0, words, (tokens,), device=device)
    rows = Rows.of_lengths(torch.full((tokens // 256,), 256, device=device))
    mask = torch.ones(tokens, dtype=torch.bool, device=device)
    normaliser = Normaliser.of(mask, rows)

    def logprobs() -> Tensor:
        return token_statistics(states, head, labels, chunk=1024).logprobs

    base, processor = seconds(lambda: logprobs().sum().backward(), device)
    print(
        f"\n{tokens} tokens, {words} words, {device}: log-probs forward and backward {base:.3f} s "
        f"(processor {processor:.3f} s)"
    )
    old = logprobs().detach()
    noise = 0.1 * torch.randn_like(old)
    for kind in POLICY_LOSSES:
        recipe = {
            "loss": {"kind": kind},
            "kl": {"coefficient": 0.1},
            "correction": [{"kind": "truncate"}],
        }
        objective = objective_of(AlgorithmConfig.model_validate(recipe))

        def work(objective: Objective = objective) -> None:
            batch = PolicyBatch(
                rows=rows,
                mask=mask,
                logprobs=old.clone().requires_grad_(True),
                advantages=noise,
                old_logprobs=old + noise,
                rollout_logprobs=old - noise,
                ref_logprobs=old - noise,
            )
            objective(batch, normaliser)[0].backward()

        took, _ = seconds(work, device)
        print(f"  {kind:36} {1000 * took:7.2f} ms  {100 * took / base:6.2f} %")


def plain_statistics(states: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Log-probs and entropy with the whole [T, V] table in float32."""
    table = (states @ head.t()).float().log_softmax(-1)
    entropy = -(table.exp() * table).sum(-1)
    return table.gather(-1, labels[:, None]).sum() + 0.01 * entropy.sum()


def chunked_statistics(states: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """The same in chunks of 1024 tokens."""
    found = token_statistics(states, head, labels, chunk=1024, entropy_gradient=True)
    return found.logprobs.sum() + 0.01 * found.entropy.sum()


def memory_of(form: str, tokens: int, hidden: int, words: int, device: torch.device) -> None:
    """Print peak memory beyond the inputs and seconds of one form (in a process of its own)."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    states = torch.randn(tokens, hidden, device=device, dtype=kind, requires_grad=True)
    head = torch.randn(words, hidden, device=device, dtype=kind, requires_grad=True)
    labels = torch.randint(0, words, (tokens,), device=device)
    function = {"plain": plain_statistics, "chunked": chunked_statistics}[form]
    # Load the libraries' own buffers, and make the gradients of the inputs, first.
    chunked_statistics(states[:8], head, labels[:8]).backward()
    before = peak_bytes(device, reset=True)
    wall, processor = time.perf_counter(), time.process_time()
    function(states, head, labels).backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    size = (peak_bytes(device) - before) / 2**30
    print(f"  {form:8} {size:7.2f} GiB  {wall:7.2f} s   processor {processor:7.2f} s", flush=True)


def peak_bytes(device: torch.device, *, reset: bool = False) -> int:
    """Highest memory since the last reset, in bytes: of the process, or of the device's tensors."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts anew
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of losses and log-probs")
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--words", type=int, default=49152)
    parser.add_argument("--form", choices=["plain", "chunked"], help="only this form's memory")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    sizes = (options.tokens, options.hidden, options.words)
    if options.form:
        memory_of(options.form, *sizes, device)
        return
    estimators(options.samples, options.longest, device)
    losses(*sizes, device)
    print(f"\npeak memory beyond inputs and gradients: {sizes} tokens, hidden, words", flush=True)
    for form in ("plain", "chunked"):
        command = [sys.executable, "-m", "benchmarks.maths", *sys.argv[1:], "--form", form]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
