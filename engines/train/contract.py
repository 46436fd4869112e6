"""What the flow process asks of the engines that train, or that are frozen. Free of torch.

Kept by engines/train/fsdp_engine.py. Every rank gets the same arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from engines.train.spec import ColumnsResult
from engines.workers.engine import Ranked, joined_by

if TYPE_CHECKING:
    from engines.models.tokens import ModelTokens
    from engines.train.batching.mfu import CostModel
    from engines.train.spec import (
        LogprobRequest,
        TeachRequest,
        UpdateProfile,
        UpdateRequest,
        UpdateResult,
        WeightsComparison,
    )
    from engines.weight_transfer.offer import Transfer, TransferOffer, TransferReport
    from storage.runs.weights import WeightsRef


class TrainEngine(Ranked):
    """A policy, its frozen reference, a teacher, or what else is trained."""

    @abstractmethod
    @joined_by(ColumnsResult.together)
    def logprobs(self, request: LogprobRequest) -> ColumnsResult:
        """Write log-probs of response tokens under the weights held; all rows, in their order.

        The reference of an engine with adapters is its base.
        """

    @abstractmethod
    @joined_by(ColumnsResult.together)
    def teach(self, request: TeachRequest) -> ColumnsResult:
        """Write teacher_logprobs of all rows, in their order; with `top_k` the likeliest words too.

        teacher_topk_ids and teacher_topk_logprobs have [top_k] numbers for each token,
        teacher_tail_logprobs the probability of all other words, in nats. The words are among those
        that the student knows.
        """

    @abstractmethod
    def tokens(self) -> ModelTokens | None:
        """The tokens of the model; None where its files do not have them."""

    @abstractmethod
    def update(self, request: UpdateRequest) -> UpdateResult:
        """Train on a batch: train.epochs passes of train.mini_batches optimizer steps."""

    @abstractmethod
    def profile(self, request: UpdateRequest, key: str) -> UpdateProfile:
        """The same, recorded by torch's profiler; the store gets rank 0's trace under `key`."""

    @abstractmethod
    def cost(self) -> CostModel:
        """What plans are balanced by: the model's floating-point operations."""

    @abstractmethod
    def score(self, token_ids: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        """Log-probs, at temperature 1, of what follows the first prompt_lengths[i] tokens."""

    @abstractmethod
    def mismatch(self) -> str | None:
        """How log-probs of a few short samples differ from transformers' own; None: they do not.

        Nothing is said of layers that are compiled, which would be compiled once more for it, and
        of a policy that looks at images.
        """

    @abstractmethod
    def export_weights(self, version: int, dtype: str, whole: bool = False) -> WeightsRef:
        """Publish the weights held as a policy version; transformers and vLLM can load its folder.

        Engines on the ranks' machines may read it at once, others once it is settled. Unless `whole`
        some versions are stored as the difference from another one, if the settings say so; such a
        folder is read by this program only.

        Each rank writes the tensors that it gathers. The output head is among the tensors also where
        it is tied to the embedding.
        """

    @abstractmethod
    def settle_weights(self, version: int, dtype: str, whole: bool = False) -> WeightsRef:
        """Return once the store has what `export_weights` has published with these arguments."""

    @abstractmethod
    def offer_transfer(
        self, version: int, dtype: str, way: Transfer, receivers: int, timeout: float
    ) -> TransferOffer:
        """Listen for engines that get the weights held, as `export_weights` publishes them.

        receivers: processes that come; timeout: seconds in which they do, and in which the tensors
        travel then.
        """

    @abstractmethod
    def transfer_weights(self, version: int, dtype: str) -> TransferReport:
        """Send the weights held to those who have come for what was offered.

        One that fails is left out, and is named in the report. Returns after twice the offer's
        timeout at the latest.
        """

    @abstractmethod
    def digest(self, dtype: str | None = None) -> str:
        """Digest of all weights to the bit, whatever the number of ranks; cast to `dtype` first."""

    @abstractmethod
    def compare(self, weights: WeightsRef, dtype: str) -> WeightsComparison:
        """The weights held, cast to `dtype`, beside a published version's."""

    @abstractmethod
    def agree(self, weights: WeightsRef) -> int:
        """Take a published version's weights where those held are others in its number format.

        Where they are the same the digits that only a master has stay, as does the optimizer's state.
        Returns the number of tensors that differed.
        """

    @abstractmethod
    def save_state(self, step: int, run: str | None = None) -> None:
        """Store weights, optimizer and counters as a snapshot of this or another run."""

    @abstractmethod
    def load_state(self, step: int, run: str | None = None, version: int | None = None) -> None:
        """Go back (or on) to the snapshot after `step`, of this or another run.

        `version`: what the weights are called here, if not `step`.
        """

    @abstractmethod
    def load_weights(self, weights: WeightsRef, version: int) -> None:
        """Take the weights of a published policy version, with the optimizer as it is.

        An engine with adapters takes them as its base, below adapters that change nothing yet.
        """
