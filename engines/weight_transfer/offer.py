"""What a trainer offers engines that sample: the tensors of a policy version, past the store.

Free of torch: the flow process carries it from the one to the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from configs.base import Settings
from engines.failures import InfrastructureError
from storage.runs.weights import TensorOutline

# ipc: memory that trainer and engine share, by CUDA IPC or, on a CPU, a file in memory. nccl: a
# broadcast in a group of the trainer's rank 0 and all engines; on a CPU by Gloo.
Transfer = Literal["ipc", "nccl"]
PIECE = 64 * 2**20  # bytes sent at once
BUFFERS = 2  # of a piece on each side: one is filled while the other is read
UNHASHED = (
    256 * 2**20
)  # bytes of tensors that an engine holds until they are hashed, but for the last


class TransferFailed(InfrastructureError):
    """The tensors did not come, or not all of them; the store has them."""


class TransferOffer(Settings):
    """How to get a policy version from its trainer; good for one transfer."""

    way: Transfer = Field(description="How tensors travel.")
    host: str = Field(description="Where the trainer's rank 0 listens.")
    port: int = Field(description="At which port.")
    token: str = Field(repr=False, description="By which it lets a receiver in.")
    version: int = Field(description="Policy version.")
    receivers: int = Field(ge=1, description="Processes that the trainer waits for.")
    timeout: float = Field(
        gt=0, description="Seconds in which they have to be there, and the tensors then."
    )
    piece: int = Field(PIECE, gt=0, description="Bytes that are sent at once.")
    tensors: dict[str, TensorOutline] = Field(description="In the order in which they are sent.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferReport:
    """How a transfer went, as the trainer saw it."""

    receivers: int  # that it waited for
    served: int  # of them, that took all tensors
    seconds: float  # from the first tensor on
    why: str = ""  # what the first of the others missed
