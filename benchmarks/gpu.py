"""What a GPU machine shows of Refrain, in one command of at most ten minutes.

    python -m benchmarks.gpu [--shapes 0.5b 1.5b 7b] [--minutes 10] [--parts …] [--json FILE]
        [--device-gib 79]   on a GPU of more: settings of one of 79 GiB, and no more is taken
        [--folder FOLDER]   keeps models, stores and each part's log there; it must be new or empty
    python -m benchmarks.gpu --small            the same parts in small, on a CPU too

Needs torch and transformers; vLLM is used where it is installed. First the checks, on the first
shape: packed log-probs against plain forward passes, weights to the store and into the rollout
engines, an adapter merged against unmerged, whether an update made again is equal to the bit, and one
of bfloat16 weights with float32 masters to one of float32 weights, two
ranks (FSDP2, sequence parallelism) against one where there are two devices. Then, for each shape, an
update, and one of compiled layers (tokens a second, share of the device's peak, peak memory beside
the plan's), sampling (tokens a second), and weights on their ways to an engine. The train engine's
settings are those of which the memory plan says that they fit the device. Each part is a process of
its own with a limit, so that one that fails or hangs takes no other with it. Exit code 1 if a check
does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.processes.process_tree import descendants, kill_all

CHECKS = ("logprobs", "round_trip", "lora", "replay", "master_weights", "ranks")
MEASUREMENTS = ("update", "update_compiled", "rollout", "sync_paths", "transfer", "sleep")
LIMIT = 240.0  # seconds of one part
SMALL_LIMIT = 480.0  # on a CPU, which may be a busy one: an engine's start alone can take minutes
ENOUGH = 20.0  # seconds without which no part is begun
# samples, prompt and response tokens of each
SIZES = {
    "small": (16, 12, 24),
    "0.5b": (256, 256, 1024),
    "1.5b": (128, 256, 1024),
    "7b": (64, 256, 1024),
}


def one_part(part: str, shape: str, folder: Path, device_gib: float | None) -> int:
    """Run a part in this process and write what it found as JSON."""
    from dataclasses import asdict

    from benchmarks.gpu_job import Job
    from benchmarks.gpu_parts import PARTS
    from benchmarks.gpu_turns import sleep
    from benchmarks.gpu_versions import lora, sync_paths, transfer

    samples, prompt, response = SIZES[shape]
    job = Job(
        shape=shape,
        folder=folder,
        samples=samples,
        prompt=prompt,
        response=response,
        device_gib=device_gib,
    )
    of_versions = {"lora": lora, "sync_paths": sync_paths, "transfer": transfer}
    found = {**PARTS, "sleep": sleep, **of_versions}[part](job)
    result = folder / f"{part}-{shape}.json"
    result.write_text(json.dumps(asdict(found)))
    return 0


def outcome(
    part: str, shape: str, folder: Path, limit: float, device_gib: float | None = None
) -> dict[str, Any]:
    """What a part found in a process of its own; how it ended where it found nothing."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--one", part, shape, str(folder)]
    command += [] if device_gib is None else ["--device-gib", str(device_gib)]
    log = folder / f"{part}-{shape}.log"
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            code: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = f"no end in {limit:.0f} s"
        finally:
            _end(process)
    result = folder / f"{part}-{shape}.json"
    if result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
    else:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        found = {"failed": f"{code}: {' '.join(last)}"[:600], "skipped": None, "metrics": {}}
    return {"part": part, "shape": shape, "seconds": time.monotonic() - began, **found}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part with all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _told_to_end(*_: object) -> None:
    """End with all that is below, a part that is just being started too."""
    kill_all(descendants(os.getpid()))
    sys.exit(128 + signal.SIGTERM)


def line(found: dict[str, Any]) -> str:
    """One part for people."""
    metrics = ", ".join(
        f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in found["metrics"].items()
    )
    word = "FAILED" if found["failed"] else "not run" if found["skipped"] else "ok"
    why = found["failed"] or found["skipped"] or ""
    where = f"{found['part']} {found['shape']} ({found['seconds']:.0f} s)"
    return f"{word:<8}{where:<28}{'; '.join(part for part in (why, metrics) if part)}"


def machine() -> dict[str, str]:
    """Versions and the device."""
    import torch
    import transformers

    try:
        import vllm

        version = str(vllm.__version__)
    except ImportError:
        version = "not installed"
    device = "CPU"
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return {
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "vllm": version,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print what they find."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=[*SIZES], default=["0.5b", "1.5b", "7b"])
    parser.add_argument("--small", action="store_true", help="only a shape that suits a CPU")
    parser.add_argument("--parts", nargs="+", choices=[*CHECKS, *MEASUREMENTS])
    parser.add_argument("--minutes", type=float, default=10.0, help="after which nothing is begun")
    parser.add_argument("--json", type=Path, help="file to which everything is written")
    parser.add_argument(
        "--device-gib", type=float, help="train as on a GPU of so many GiB, and take no more"
    )
    parser.add_argument("--folder", type=Path, help="new; keeps models, stores and logs")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        part, shape, folder = options.one
        return one_part(part, shape, Path(folder), options.device_gib)
    if options.folder and options.folder.exists() and any(options.folder.iterdir()):
        parser.error(
            f"--folder {options.folder} is not empty, and what it has would be taken for found now. "
            "Give a new one."
        )
    signal.signal(signal.SIGTERM, _told_to_end)
    shapes = ["small"] if options.small else options.shapes
    wanted = options.parts or [*CHECKS, *MEASUREMENTS]
    until = time.monotonic() + 60 * options.minutes
    # Checks, then the measurements of each shape: what takes longest is last.
    queue = [(part, shapes[0]) for part in CHECKS if part in wanted]
    queue += [(part, shape) for shape in shapes for part in MEASUREMENTS if part in wanted]
    about = machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    results = []
    kept = options.folder and contextlib.nullcontext(options.folder.absolute())
    with kept or tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for part, shape in queue:
            left = until - time.monotonic()
            if left < ENOUGH:
                found: dict[str, Any] = {
                    "part": part,
                    "shape": shape,
                    "seconds": 0.0,
                    "metrics": {},
                }
                found |= {"failed": None, "skipped": "no time left"}
            else:
                limit = min(SMALL_LIMIT if options.small else LIMIT, left)
                found = outcome(part, shape, Path(folder), limit, options.device_gib)
            results.append(found)
            print(line(found), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps({**about, "parts": results}, indent=1))
    return 1 if any(found["failed"] for found in results) else 0


if __name__ == "__main__":
    sys.exit(main())
