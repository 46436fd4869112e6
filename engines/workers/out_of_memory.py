"""Running out of memory as a failure of its own: told from other errors, and said in a sentence.

A gang that is built again runs out again at the same place, so no one retries it. torch and vLLM
are not imported here: their errors are known by the names of their classes and by their words.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping

from engines.failures import OutOfMemory
from engines.workers.engine import Engine, Memory

GIB = 2**30
# A device's, in torch's words and in vLLM's (0.32), whose engine is another process: its error comes
# as text.
_DEVICE = (
    "CUDA out of memory",
    "HIP out of memory",
    "CUDA error: out of memory",
    "desired GPU memory utilization",
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
)
_HOST = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def memory_that_ran_out(error: BaseException) -> Memory | None:
    """Which memory an error says there is not enough of; None for any other error."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
    if "torch.OutOfMemoryError" in names:
        return "device"
    if isinstance(error, MemoryError):
        return "host"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "host"
    text = str(error)
    if any(words in text for words in _DEVICE):
        return "device"
    if any(words in text for words in _HOST):
        return "host"
    return None


def described(held: Mapping[str, int]) -> str:
    """Bytes by what holds them, the largest first: "activations and logits 61.2 GiB, …"."""
    ordered = sorted(held.items(), key=lambda item: -item[1])
    return ", ".join(f"{what} {size_of(size)}" for what, size in ordered if size > 0)


def size_of(size: float) -> str:
    """Bytes in GiB, below one of those in MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.0f} MiB"


@contextlib.contextmanager
def memory_watched(
    what: str, payload: object, engine: Callable[[], Engine | type[Engine]]
) -> Iterator[None]:
    """Errors of the body that are want of memory become OutOfMemory, with what the engine says.

    Args:
        what: The call or build, and its worker; the sentence begins with it.
        payload: From what the engine is built.
        engine: The engine, or its class where it is not built yet; asked while the body's tensors
            still stand, which the error's traceback holds.
    """
    try:
        yield
    except OutOfMemory:
        raise
    except Exception as error:
        memory = memory_that_ran_out(error)
        if memory is None:
            raise
        found = engine()
        held = found.memory_held(memory) if isinstance(found, Engine) else {}
        by_what = f", held by: {described(held)}" if any(held.values()) else ""
        advice = found.memory_setting(payload, memory, held, str(error))
        raise OutOfMemory(f"{what} ran out of {memory} memory{by_what}. {advice}") from error
