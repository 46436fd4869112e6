"""Micro-batches one after the other; while one is used, the next is read, packed and copied.

Each is reported as it is taken, so that who looks on knows how far the call is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from engines.start_progress import report
from engines.train.batching.micro_batch import MicroBatch, read_micro_batch
from engines.train.model.row_needs import PLAIN, RowNeeds
from storage.batches.refs import BatchRef
from storage.objects.store import Store


@contextlib.contextmanager
def read_ahead(
    store: Store,
    batch: BatchRef,
    parts: Sequence[Sequence[int]],
    columns: Sequence[str],
    device: torch.device,
    tree_training: bool = False,
    patches: int = 0,
    needs: RowNeeds = PLAIN,
) -> Iterator[Iterator[MicroBatch]]:
    """The micro-batches of these rows in their order, of which a thread has the next one ready.

    One more than the one in use is held. What the reading of a micro-batch raises is raised where
    that one is asked for; then, and when the body is left early, the thread ends with what it reads.

    Args:
        store: Where the batch's objects are.
        batch: [N] rows.
        parts: Row numbers of each micro-batch; may be empty.
        columns: Jagged columns over the response tokens that are wanted too.
        device: Where the tensors are put. On a GPU they are copied in a queue of their own.
        tree_training, patches, needs: As `read_micro_batch` takes them.
    """
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def made(rows: Sequence[int]) -> MicroBatch:
        return read_micro_batch(store, batch, rows, columns, device, tree_training, patches, needs)

    def read(
        rows: Sequence[int], free: torch.cuda.Event | None
    ) -> tuple[MicroBatch, torch.cuda.Event | None]:
        if copies is None:
            return made(rows), None
        with torch.cuda.stream(copies):
            assert free is not None
            # Memory that is let go of may be used again here, but by then not be read any more.
            copies.wait_event(free)
            return made(rows), copies.record_event()

    def done_so_far() -> torch.cuda.Event | None:
        return None if copies is None else torch.cuda.current_stream(device).record_event()

    def taken(thread: ThreadPoolExecutor) -> Iterator[MicroBatch]:
        coming = thread.submit(read, parts[0], done_so_far()) if parts else None
        for number, later in enumerate([*parts[1:], None], 1):
            if coming is None:
                return
            micro, copied = coming.result()
            if copied is not None:
                torch.cuda.current_stream(device).wait_event(copied)
            coming = None if later is None else thread.submit(read, later, done_so_far())
            report(f"micro-batch {number} of {len(parts)}")
            yield micro

    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        yield taken(thread)
