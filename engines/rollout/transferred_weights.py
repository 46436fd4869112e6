"""Taking a policy version from its trainer: hashed as it comes, with the store behind it."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from engines.rollout.weight_reader import HeldVersion, IncomingWeights
from engines.weight_transfer.offer import UNHASHED, TransferFailed, TransferOffer
from engines.workers.device_memory import a_lane, by_lanes, told
from storage.objects.documents import Digester
from storage.runs.weights import tensor_digest, weights_digest

if TYPE_CHECKING:
    import torch

    from engines.weight_transfer.receiver import Receiver

THREADS = 8  # that hash

T = TypeVar("T")
logger = logging.getLogger(__name__)


class TransferredWeights(IncomingWeights):
    """The tensors that a trainer sends, with digests of the bytes that came.

    They are hashed beside the model's taking them. Iterating raises TransferFailed where they end.
    """

    def __init__(self, receiver: Receiver, offer: TransferOffer) -> None:
        self._receiver, self._offer = receiver, offer
        self._digests: dict[str, Future[str]] = {}

    @property
    def tensors(self) -> int:
        return len(self._digests)

    @property
    def nbytes(self) -> int:
        return sum(self._offer.tensors[name].nbytes for name in self._digests)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        waiting: deque[tuple[Future[str], int]] = deque()  # to be hashed, with their bytes
        unhashed, threads = 0, min(THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
            for name, tensor in self._receiver.tensors(self._offer):
                digest = pool.submit(_digest, tensor, told(tensor.device))
                self._digests[name] = digest
                waiting.append((digest, tensor.nbytes))
                unhashed += tensor.nbytes
                while unhashed > UNHASHED and len(waiting) > 1:
                    first, nbytes = waiting.popleft()
                    first.result()
                    unhashed -= nbytes
                yield name, tensor

    def is_copy(self, name: str) -> bool:
        """Of the tensors before it; a head comes after its embedding."""
        own = self._digests[name].result()
        return any(each.result() == own for other, each in self._digests.items() if other != name)

    def held(self) -> HeldVersion:
        outlines = self._offer.tensors
        digest = weights_digest(
            (name, outlines[name].dtype, outlines[name].shape, each.result())
            for name, each in self._digests.items()
        )
        return HeldVersion(version=self._offer.version, digest=digest)


def _digest(tensor: torch.Tensor, ready: torch.cuda.Event | None) -> str:
    if not by_lanes(tensor.device):
        return tensor_digest(tensor)
    digester = Digester()
    with a_lane(tensor.device, ready) as lane:
        for piece in lane.out(tensor, tensor.dtype):
            digester.update(piece)
    return digester.digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken(Generic[T]):
    """What a load gave, and where the version came from."""

    loaded: T
    transferred: bool
    missed: str = ""  # why it did not come from the trainer, where it was offered
    waited: float = 0.0  # seconds until the store had it


def take(
    receiver: Receiver,
    offer: TransferOffer | None,
    load: Callable[[TransferredWeights | None], T],
    wait: Callable[[], float],
) -> Taken[T]:
    """Load a version from its trainer, and from the store where that fails or was not offered.

    load: brings tensors into the model, from the store where it gets none. wait: returns once the
    store has the version, with the seconds that it took.
    """
    if offer is None:
        return Taken(loaded=load(None), transferred=False)
    try:
        return Taken(loaded=load(TransferredWeights(receiver, offer)), transferred=True)
    except TransferFailed as error:
        missed = str(error)
        logger.warning("Policy version %d is read from the store: %s", offer.version, missed)
    waited = wait()
    return Taken(loaded=load(None), transferred=False, missed=missed, waited=waited)
