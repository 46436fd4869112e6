"""The weight-transfer engine `fsspec`: a vLLM worker reads a policy version from the store.

Or, where the trainer offers it, gets it from there (engines/weight_transfer).

Runs inside vLLM's worker processes (engines/rollout/vllm_plugin.py registers it there). vLLM drives
it: start_weight_update, update_weights, finish_weight_update; `WeightsReporter` lets the owner of
the engine ask what was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from engines.failures import WeightMismatch
from engines.models.tensor_files import CheckpointNames, checkpoint_names
from engines.rollout.read_back import LoadCheck
from engines.rollout.transferred_weights import take
from engines.rollout.weight_reader import IncomingWeights, LoadedWeights
from engines.weight_transfer.offer import TransferOffer
from engines.weight_transfer.receiver import Receiver
from storage.objects.node_cache import open_node_cache
from storage.objects.store import Store
from storage.objects.usage import COUNTER
from storage.runs.weights import ALL, FileNames, Share, WeightsRef, wait_until_readable

if TYPE_CHECKING:
    import torch
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    from storage.runs.weights import Adapter

logger = init_logger(__name__)
# Mixtures whose stacked experts vLLM 0.32 takes as transformers has them, which is fewer tensors.
KNOWN_FORMS = ("qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe")


@dataclass
class StoreAddress(WeightTransferInitInfo):
    """Where policy versions are; given once."""

    uri: str
    options: dict[str, Any] = field(default_factory=dict)
    node_cache_bytes: int = 0  # what this machine keeps of them, where the store is not local


@dataclass
class VersionToLoad(WeightTransferUpdateInfo):
    """The policy version of one update."""

    weights: dict[str, Any]  # WeightsRef as JSON
    base_held: str = ""  # digest of the base that is in the model, where adapters are beside it
    offer: dict[str, Any] | None = (
        None  # TransferOffer as JSON, where the trainer sends the version
    )


class StoreTransferEngine(WeightTransferEngine[StoreAddress, VersionToLoad]):
    """Streams a version's tensors, each one verified, into the model, layer by layer.

    Loading goes through vLLM's layerwise reload: on CPU the weights of a running model are
    repacked, and plain loading into them fails (vLLM 0.32; not reported).
    """

    init_info_cls = StoreAddress
    update_info_cls = VersionToLoad

    def init_transfer_engine(self, init_info: StoreAddress) -> None:
        self.store = Store(init_info.uri, init_info.options)
        self.cache = open_node_cache(self.store, init_info.node_cache_bytes)
        self.report: dict[str, Any] = {}
        self.names = CheckpointNames()
        self.file_names: FileNames | None = None
        self.reloading = False  # whether layers wait for their weights
        self.adapter: tuple[dict[str, torch.Tensor], Adapter | None] = ({}, None)
        self.check = LoadCheck(self.model, self.parallel_config.tensor_parallel_size)
        self.receiver = Receiver(self.device)

    def start_weight_update(self) -> None:
        self.report = {}
        self.adapter = ({}, None)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class's method synchronises torch.accelerator, which a CPU build does not have
        # (vLLM 0.32; not reported).
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            import torch

            torch.accelerator.synchronize()

    def receive_weights(self, update_info: VersionToLoad) -> None:
        """Load the version; on failure leave the model whole in form, though not in content."""
        ref = WeightsRef.model_validate(update_info.weights)
        try:
            self._load(ref, update_info.base_held, update_info.offer)
        except Exception as error:
            # vLLM keeps half-loaded layers for the next update otherwise, which then fails too.
            self._end_reload()
            self.report = {"failure": type(error).__name__, "message": str(error)}
            raise

    def finish_weight_update(self) -> None:
        if not self.reloading:
            return
        self._end_reload()
        try:
            read_back = self.check.end()
        except WeightMismatch as error:
            self.report = {"failure": type(error).__name__, "message": str(error)}
            raise
        self.report |= {"found": read_back.found, "unseen": read_back.unseen}
        if read_back.unseen:
            logger.info_once("Not comparable with the policy: %s", ", ".join(read_back.unseen))

    def load_adapter(self, manager: LRUCacheWorkerLoRAManager) -> None:
        """That of the version that was received, if it is to be beside its base; after the update,
        whose end takes adapters out of vLLM."""
        from engines.rollout.vllm_adapters import load

        factors, adapter = self.adapter
        try:
            load(manager, factors, adapter)
        except Exception as error:
            self.report = {"failure": type(error).__name__, "message": str(error)}
            raise

    def shutdown(self) -> None:
        """Leave the trainer's group; nothing else stays open between updates."""
        self.receiver.close()

    def _end_reload(self) -> None:
        if self.reloading:
            finalize_layerwise_reload(self.model, self.model_config)
            self.reloading = False

    def _load(self, ref: WeightsRef, base_held: str, offer: dict[str, Any] | None) -> None:
        before = COUNTER.total().bytes_read

        def load(transferred: IncomingWeights | None) -> IncomingWeights:
            self._end_reload()  # of layers that a transfer which failed has begun
            if transferred is None:
                return self._load_stored(ref, base_held)
            self._load_whole(ref, transferred)
            return transferred

        def wait() -> float:
            return 0.0 if self.cache is None else wait_until_readable(self.store, ref, self.cache)

        taken = take(
            self.receiver,
            None if offer is None else TransferOffer.model_validate(offer),
            load,
            wait,
        )
        incoming = taken.loaded
        if incoming.apart:
            self.adapter = (dict(incoming.factors), incoming.adapter)
        version = incoming.held()
        self.report = {
            "version": version.version,
            "digest": version.digest,
            "tensors": incoming.tensors,
            "nbytes": incoming.nbytes,
            "bytes_read": COUNTER.total().bytes_read - before,
            "base": incoming.base if incoming.apart else "",
            "waited": taken.waited,
            "transferred": taken.transferred,
            "missed": taken.missed,
        }

    def _load_stored(self, ref: WeightsRef, base_held: str) -> LoadedWeights:
        offered = self._offered(ref, base_held)
        if not offered.apart:  # layers are loaded whole
            offered = self._offered(ref, "")
        if offered.apart and offered.base == base_held:
            for name, _ in offered:
                raise AssertionError(f"{name} is of the base, which is loaded")
        else:
            self._load_whole(ref, offered)
        return offered

    def _offered(self, ref: WeightsRef, base_held: str) -> LoadedWeights:
        lora = self.vllm_config.lora_config
        return LoadedWeights(
            self.store,
            ref,
            self.cache,
            base_held,
            self._share,
            apart_to_rank=0 if lora is None else lora.max_lora_rank,
        )

    def _load_whole(self, ref: WeightsRef, offered: IncomingWeights) -> None:
        names = {_unwrapped(name) for name, _ in self.model.named_parameters()}
        self.check.begin()
        initialize_layerwise_reload(self.model)
        self.reloading = True
        tensors = self._as_in_files(self._but_unknown_head(offered))
        weights = self.check.watch(tensors, self.names.unused)
        loaded = cast(_LoadsWeights, self.model).load_weights(weights)
        missing = [] if loaded is None else sorted(names - {_unwrapped(name) for name in loaded})
        if missing:
            raise ValueError(f"policy version {ref.version} left {missing[0]} as it was")

    def _but_unknown_head(self, offered: IncomingWeights) -> Iterator[tuple[str, torch.Tensor]]:
        """Without an output head that is the embedding, where vLLM's model has none: Gemma 2's."""
        paths = (path.rpartition(".")[2] for path, _ in self.model.named_modules())
        has_head = "lm_head" in paths
        for name, tensor in offered:
            is_head = name.split(".")[-2:] == ["lm_head", "weight"]
            if has_head or not is_head or not offered.is_copy(name):
                yield name, tensor

    def _as_in_files(
        self, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As the checkpoint's files hold them, where vLLM does not know transformers' form."""
        if self.file_names is None:
            self.names = checkpoint_names(Path(self.model_config.model))
            self.file_names = self.names.untold(CheckpointNames())
            if self.model_config.hf_text_config.model_type in KNOWN_FORMS:
                self.file_names = self.file_names.model_copy(update={"stacks": {}})
        return self.file_names.apart(tensors)

    @property
    def _share(self) -> Share:
        """What this rank of the engine checks: of a local file all ranks map the same pages.

        Each copies its slices out of them. From elsewhere every rank has bytes of its own.
        """
        ranks = self.parallel_config
        if self.store.backend.remote or ranks.nnodes > 1:
            return ALL
        return ranks.rank % ranks.world_size, ranks.world_size


def _unwrapped(name: str) -> str:
    """Of a parameter, without the place that layers for adapters have for what they wrap."""
    return name.replace(".base_layer.", ".")


class _LoadsWeights(Protocol):
    """What vLLM's models have in common."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str] | None: ...


class WeightsReporter:
    """Mixed into vLLM's worker class (worker_extension_cls)."""

    weight_transfer_engine: StoreTransferEngine
    model_runner: LoRAModelRunnerMixin

    def weights_report(self) -> dict[str, Any]:
        """Of the last update: version, digest, tensors, nbytes, and what kinds of tensors were found
        or unseen when they were read back; or failure and message."""
        return self.weight_transfer_engine.report

    def load_adapter(self) -> None:
        """Of the last update, beside its base; the base alone where it brought no such adapter."""
        self.weight_transfer_engine.load_adapter(self.model_runner.lora_manager)

    def free_memory(self) -> int:
        """Bytes of this worker's device that nobody has."""
        import torch

        free: int = torch.accelerator.get_memory_info()[0]
        return free
