"""What is trained: a gang of FSDP ranks, brought to any version by replay; and how it is opened.

What is frozen (the reference, teachers) is one too, and has version 0 alone. Another engine may have
its place, as the settings say.

The weights of version v are those after v updates. A fresh gang holds the model's own weights, which
are version 0 unless the run began at a step of another one. Any other version is reached from the
nearest snapshot below it, the parent's where the run began, by applying the stored batches of the
steps since again, never by sampling again. That is how a gang which lost a rank, or a resumed run,
gets its weights back. The step under way is not committed yet: its batch is remembered here, and a
snapshot of it is not built upon, for it may be of an attempt that another flow made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar

from configs.algorithm.algorithm import AlgorithmConfig
from configs.algorithm.distillation import recorded_algorithm
from engines.failures import GangFailed
from engines.models.tokens import ModelTokens
from engines.train.batching.mfu import CostModel
from engines.train.contract import LogprobRequest, TeachRequest, TrainEngine, UpdateRequest
from engines.weight_transfer.offer import Transfer, TransferOffer, TransferReport
from engines.workers.cluster import Cluster
from engines.workers.engine import CallId, EngineSpec
from engines.workers.gang import E, Gang
from storage.batches.refs import BatchRef
from storage.objects.errors import VersionTaken
from storage.runs.commit_log import head, read_commit
from storage.runs.run_store import RunStore, origin_of, start_of
from storage.runs.snapshots import ReplayStart, base_of
from storage.runs.weights import WeightsRef

if TYPE_CHECKING:
    from configs.cluster import Role
    from configs.grpo import GRPOConfig
    from engines.train.contract import (
        ColumnsResult,
        LogprobColumn,
        TrainSpec,
        UpdateProfile,
        UpdateResult,
        WeightsComparison,
    )
    from storage.runs.run_store import RunStore


P = ParamSpec("P")  # what a method takes
R = TypeVar("R")  # what it returns

UNTRAINED = -1  # the version held where the model's own weights are no version of the run


def _untold(step: int, last: int) -> None:
    """Nobody is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """How a trainer makes its calls."""

    epoch: int  # of the run's lease
    temperature: float
    max_new_tokens: int
    cancel: threading.Event | None = None  # ends every wait when it is set
    on_replay: Callable[[int, int], None] = _untold  # step and last, of each that is applied again
    # Version and tensors, where a committed version was rebuilt and its weights differ from those
    # that were published: these are taken then. None: nothing is compared.
    on_rounding: Callable[[int, int], None] | None = None
    caller: str | None = None  # in whose name, if not the run's: of another run that reads it


@contextlib.contextmanager
def taken_by_another() -> Iterator[None]:
    """Raises VersionTaken as itself, where all that failed is that a version is published already."""
    try:
        yield
    except GangFailed as failed:
        if isinstance(failed.__cause__, VersionTaken):
            raise failed.__cause__ from None
        raise


class Trainer:
    """Drives a gang. Its calls are serialised: a gang does one thing at a time."""

    def __init__(self, gang: Gang[TrainEngine], files: RunStore, settings: TrainerSettings) -> None:
        self._gang = gang
        self._spec = gang.spec
        self._files = files
        self._settings = settings
        self._base = 0
        self._caller = settings.caller or files.run
        self._version: int | None = None  # of the weights that the gang holds; None: not known
        # By step, of the steps that were not committed when they were updated.
        self._uncommitted: dict[int, UpdateRequest] = {}
        self._loads = 0  # of older states; tells calls that are repeated on purpose from retries
        self._cost: CostModel | None = None
        self._lock = threading.RLock()

    def at(self, version: int) -> None:
        """Bring the gang to a version: form it if need be, load the nearest snapshot, replay.

        Raises GangFailed where a rank dies or hangs, ObjectMissing or ObjectDamaged by the store.
        """
        with self._lock:
            if self._version is None or not self._gang.formed:
                self._form()
            if self._version == version:
                return
            committed = head(self._files) or start_of(self._files)
            base = base_of(self._files, min(version, committed))
            nearest = 0 if base is None else base.version
            if self._version_held > version or self._version_held < nearest:
                self._go_to(base)
            for step in range(self._version_held + 1, version + 1):
                self._settings.on_replay(step, version)
                self._update(self._stored(step) if step <= committed else self._uncommitted[step])
                if step == committed:
                    self._agree(step)

    def update(
        self,
        step: int,
        batch: BatchRef,
        algorithm: AlgorithmConfig,
        plan: BatchRef | None = None,
    ) -> UpdateResult:
        """Apply step's update to version step - 1; the gang then holds version step.

        plan: the micro-batches, where they were made before; a replay makes the same ones itself.
        """
        request = self._request(step, batch, algorithm)
        with self._lock:
            self.at(step - 1)
            self._uncommitted[step] = request
            return self._update(dataclasses.replace(request, plan=plan))

    def profile(
        self, step: int, batch: BatchRef, algorithm: AlgorithmConfig, key: str
    ) -> UpdateProfile:
        """Where the time of a step's update goes; the store gets a trace of it under `key`.

        The update is made once before, so that buffers and kernels are there, and the one that is
        looked at is of the same batch after it. The gang holds no version of the run then.
        """
        request = self._request(step, batch, algorithm)
        with self._lock:
            self.at(step - 1)
            self._update(request)
            self._version = None
            return self._call(TrainEngine.profile, step, request=request, key=key)

    def cost(self, version: int) -> CostModel:
        """What plans of micro-batches are balanced by; asked of the gang, at a version, once."""
        with self._lock:
            if self._cost is None:
                self.at(version)
                self._cost = self._call(TrainEngine.cost, version)
            return self._cost

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._gang.world

    @property
    def base(self) -> int:
        """Version of the stored state that the weights held were last rebuilt from."""
        return self._base

    def committed(self, step: int) -> None:
        """A step has been committed: its batch is found in the store from now on."""
        with self._lock:
            self._uncommitted = {
                later: update for later, update in self._uncommitted.items() if later > step
            }

    def logprobs(
        self,
        version: int,
        batch: BatchRef,
        column: LogprobColumn,
        out_key: str,
        squared: bool = False,
    ) -> BatchRef:
        """Log-probs of the responses [N, jagged] under a version, as a new column.

        `squared`: sum_pi_squared is a second one.
        """
        request = LogprobRequest(
            batch=batch,
            column=column,
            out_key=out_key,
            temperature=self._settings.temperature,
            squared=squared,
        )
        with self._lock:
            self.at(version)
            return self._logprobs(version, request)

    def teach(self, batch: BatchRef, out_key: str, top_k: int) -> BatchRef:
        """A teacher's scores of the responses [N, jagged], as new columns (TrainEngine.teach)."""
        temperature, cancel = self._settings.temperature, self._settings.cancel
        request = TeachRequest(batch=batch, out_key=out_key, temperature=temperature, top_k=top_k)
        with self._lock:
            self.at(0)
            call_id = self._call_id(f"teach-{out_key}", 0)
            return columns_of(self._gang.call(TrainEngine.teach, call_id, cancel, request=request))

    def tokens(self, version: int) -> ModelTokens | None:
        """The model's tokens; None where its files do not have them."""
        with self._lock:
            self.at(version)
            return self._call(TrainEngine.tokens, version)

    def export(self, version: int, dtype: str, whole: bool = False) -> WeightsRef:
        """Publish the weights of a version; `whole`: not as a difference.

        The store has them once `settle`, with the same arguments, has returned; until then only
        engines on the trainer's machine can read them, where it keeps versions. Raises VersionTaken
        where a gang that was lost has published other bits.
        """
        with self._lock, taken_by_another():
            self.at(version)
            return self._call(
                TrainEngine.export_weights, version, version=version, dtype=dtype, whole=whole
            )

    def settle(self, version: int, dtype: str, whole: bool = False) -> WeightsRef:
        """Return once the store has a version. A gang that was lost meanwhile publishes it again."""
        with self._lock, taken_by_another():
            self.at(version)
            return self._call(
                TrainEngine.settle_weights, version, version=version, dtype=dtype, whole=whole
            )

    def offer(
        self, version: int, dtype: str, way: Transfer, receivers: int, timeout: float
    ) -> TransferOffer:
        """Have the gang listen for engines that get a version's tensors from it (`send`)."""
        with self._lock:
            self.at(version)
            return self._once(
                TrainEngine.offer_transfer,
                version,
                version=version,
                dtype=dtype,
                way=way,
                receivers=receivers,
                timeout=timeout,
            )

    def send(self, version: int, dtype: str) -> TransferReport:
        """Send a version's tensors to the engines that have come for what was offered."""
        with self._lock:
            self.at(version)
            return self._once(TrainEngine.transfer_weights, version, version=version, dtype=dtype)

    def score(
        self, version: int, tokens: list[list[int]], prompt_lengths: list[int]
    ) -> list[list[float]]:
        """Log-probs of the response tokens of a few sequences under a version."""
        with self._lock:
            self.at(version)
            return self._call(
                TrainEngine.score, version, token_ids=tokens, prompt_lengths=prompt_lengths
            )

    def mismatch(self, version: int) -> str | None:
        """How log-probs under a version differ from transformers' own, as a clause; None: not."""
        with self._lock:
            self.at(version)
            return self._call(TrainEngine.mismatch, version)

    def snapshot(self, version: int, run: str | None = None, step: int | None = None) -> None:
        """Store the whole trainer state of a version: weights, optimizer, schedule, RNG.

        `run`, `step`: of which it is to be the snapshot, if not of this run's step `version`.
        """
        with self._lock:
            self.at(version)
            of = version if step is None else step
            self._call(TrainEngine.save_state, version, run=run, step=of)

    def compare(self, version: int, weights: WeightsRef, dtype: str) -> WeightsComparison:
        """The weights of a version, as the gang has them, beside published ones."""
        with self._lock:
            self.at(version)
            return self._call(TrainEngine.compare, version, weights=weights, dtype=dtype)

    def digest(self, version: int, dtype: str) -> str:
        """The digest that publishing a version in a number format would give it."""
        with self._lock:
            self.at(version)
            return self._call(TrainEngine.digest, version, dtype=dtype)

    def _stored(self, step: int) -> UpdateRequest:
        """A committed step's update."""
        done = read_commit(self._files, step)
        return self._request(step, done.refs["batch"], recorded_algorithm(done.algorithm))

    def _agree(self, step: int) -> None:
        """Take the published weights of the run's head where a rebuilt one has others.

        On another kind of CPU or GPU sums round otherwise; samples were drawn by what was published.
        """
        on_rounding = self._settings.on_rounding
        if on_rounding is None:
            return
        self._version = None
        weights = read_commit(self._files, step).version_out
        if differing := self._call(TrainEngine.agree, step, weights=weights):
            on_rounding(step, differing)
        self._version = step

    def _request(self, step: int, batch: BatchRef, algorithm: AlgorithmConfig) -> UpdateRequest:
        return UpdateRequest(
            step=step,
            batch=batch,
            algorithm=algorithm,
            temperature=self._settings.temperature,
            max_new_tokens=self._settings.max_new_tokens,
        )

    @property
    def _version_held(self) -> int:
        assert self._version is not None
        return self._version

    def _go_to(self, base: ReplayStart | None) -> None:
        """Bring the gang to a stored state, or to the beginning.

        Updates that follow are made again, not looked up.
        """
        self._loads += 1
        if base is None:
            self._form()
            self._base = 0
            return
        if base.weights is not None:
            if self._version_held != UNTRAINED:
                self._form()  # with a fresh optimizer
            self._version = None
            self._call(
                TrainEngine.load_weights, base.version, weights=base.weights, version=base.version
            )
        else:
            self._version = None
            self._call(
                TrainEngine.load_state,
                base.version,
                run=base.run,
                step=base.step,
                version=base.version,
            )
        self._version = self._base = base.version

    def _form(self) -> None:
        """Form the gang with the model's own weights, also on workers that hold trained ones."""
        self._version = None
        digest = f"{self._spec.digest}-{uuid.uuid4().hex[:8]}"
        self._gang.spec = dataclasses.replace(self._spec, digest=digest)
        self._gang.form(self._settings.cancel)
        origin, role = origin_of(self._files), self._files.role
        # Of a run that goes on with a policy's weights alone whatever else is trained begins anew.
        anew = role != "actor" and origin is not None and not origin.trainer_state
        first = role in ("ref", "teacher") or origin is None or anew
        self._version = 0 if first else UNTRAINED

    def _logprobs(self, version: int, request: LogprobRequest) -> BatchRef:
        call_id = self._call_id(f"{request.column}-{request.out_key}", version)
        cancel = self._settings.cancel
        return columns_of(self._gang.call(TrainEngine.logprobs, call_id, cancel, request=request))

    def _update(self, request: UpdateRequest) -> UpdateResult:
        # Whatever breaks in here, the gang is formed anew: no half-applied update stays.
        self._version = None
        result = self._call(TrainEngine.update, request.step, request=request)
        self._version = request.step
        return result

    def _call(
        self,
        method: Callable[Concatenate[TrainEngine, P], R],
        at: int,
        /,
        *nothing: P.args,
        **arguments: P.kwargs,
    ) -> R:
        """Call the gang for step `at`."""
        call_id = self._call_id(method.__name__, at)
        return self._gang.call(method, call_id, self._settings.cancel, *nothing, **arguments)

    def _once(
        self,
        method: Callable[Concatenate[TrainEngine, P], R],
        at: int,
        /,
        *nothing: P.args,
        **arguments: P.kwargs,
    ) -> R:
        """The same, made anew whenever it is asked for: what it returned before is of no use."""
        call_id = self._call_id(f"{method.__name__}-{uuid.uuid4().hex[:8]}", at)
        return self._gang.call(method, call_id, self._settings.cancel, *nothing, **arguments)

    def _call_id(self, name: str, step: int) -> CallId:
        return CallId(
            run=self._caller,
            epoch=self._settings.epoch,
            step=step,
            call=f"{name}@{self._gang.generation}.{self._loads}",
        )


def columns_of(result: ColumnsResult) -> BatchRef:
    """The columns that a pass over a batch has made."""
    assert result.batch is not None, "a batch has rows"
    return result.batch


T = TypeVar("T", bound=Trainer)

# Other values of train.engine, and where their `Opener` for the actor is.
OPENERS: Mapping[str, str] = {
    "elastic": "engines.elastic.trainer:elastic_trainer",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What a trainer is opened with."""

    cluster: Cluster
    config: GRPOConfig
    files: RunStore
    spec: TrainSpec
    name: str  # of its engines on the workers
    settings: TrainerSettings

    def gang(
        self, engine: EngineSpec[E], pool: str | None = None, world: int | None = None
    ) -> Gang[E]:
        """Workers of a pool as one gang; pool: None: of the role. world: None: all of them."""
        role, config = self.spec.role, self.config
        return Gang(
            self.cluster,
            config.cluster.roles.pool_of(role) if pool is None else pool,
            self.name,
            engine,
            config.train_of(role).deadline,
            start_timeout=config.cluster.start_timeout,
            world=world,
        )


Opener: TypeAlias = Callable[[Opening], T]  # builds nothing yet


def trainer_on(
    cluster: Cluster,
    config: GRPOConfig,
    files: RunStore,
    spec: TrainSpec,
    name: str,
    *,
    epoch: int,
    caller: str,
    on_replay: Callable[[int, int], None],
    opener: Opener[T],
    cancel: threading.Event | None = None,
    on_rounding: Callable[[int, int], None] | None = None,
) -> T:
    """A trainer, or what is frozen, on the pools of a cluster; nothing is built yet.

    name: of its engines on the workers; opener: see `opener_of`; the rest as of Trainer.
    """
    settings = TrainerSettings(
        epoch=epoch,
        temperature=config.rollout.temperature,
        max_new_tokens=config.longest_response,
        cancel=cancel,
        on_replay=on_replay,
        on_rounding=on_rounding,
        caller=caller,
    )
    return opener(
        Opening(
            cluster=cluster, config=config, files=files, spec=spec, name=name, settings=settings
        )
    )


def opener_of(config: GRPOConfig, role: Role) -> Opener[Trainer]:
    """What makes the trainer of a policy, or of what is frozen."""
    path = OPENERS.get(config.train.engine)
    if path is None or role != "actor":
        return ranked_trainer
    module, _, function = path.partition(":")
    opener: Opener[Trainer] = getattr(import_module(module), function)
    return opener


def ranked_trainer(opening: Opening) -> Trainer:
    """Ranks that hold the model together."""
    spec = opening.spec
    engine = EngineSpec.of("engines.train.fsdp_engine:FSDPEngine", spec, TrainEngine)
    return Trainer(opening.gang(engine), opening.files, opening.settings)
