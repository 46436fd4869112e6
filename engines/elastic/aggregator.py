"""The aggregator of elastic training: it has weights and optimizer, and adds workers' gradients up.

An update is a conversation: `open_update` cuts the batch into units, `offer` says for each optimizer
step which gradients are wanted and with which weights, `apply` adds them up and makes the step,
`close_update` ends it. The units come from the batch alone, and gradients are added up in their
order, so the weights are the same whoever computed what, and however many did.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from engines.elastic.contract import Applied, GradientAggregator, LossCounts, Offered, Unit
from engines.elastic.gradients import Damaged, Summed, metric_sums
from engines.train.batching.packing import MiniBatch
from engines.train.contract import MadeOn, UpdateRequest, UpdateResult
from engines.train.fsdp_engine import DTYPES, FSDPEngine
from engines.train.updater import Updater
from storage.objects.documents import key_of
from storage.objects.errors import ObjectDamaged
from storage.runs.gradients import (
    Gradient,
    GradientsOf,
    discard_gradient,
    gradients_key,
    open_folder,
    read_gradient,
)
from storage.runs.weights import WeightsRef, find_manifest

# Settings that do not change what a gradient is.
NO_INPUTS = {"deadline", "unit_lease"}


@dataclass(kw_only=True, slots=True)
class OpenUpdate:
    """An update under way."""

    request: UpdateRequest
    updater: Updater
    steps: list[MiniBatch]  # one for each optimizer step, of one rank whose micro-batches are units
    inputs: str  # key
    began: float
    offered: Offered | None = None  # the optimizer step under way
    steps_made: int = 0  # optimizer steps
    made_on: set[MadeOn] = field(default_factory=set)  # of gradients that were added up


class Aggregator(FSDPEngine, GradientAggregator):
    """The only rank of its gang; see the module's docstring."""

    _open: OpenUpdate | None = None

    def offer_weights(self, under: int, version: int) -> WeightsRef:
        self._joined()
        name = self._spec.train.compute_dtype
        digest, published = self.digest(name), self._files.weights_key(version)
        manifest = find_manifest(self._store, published)
        if manifest is not None and manifest.digest == digest:
            return WeightsRef(
                version=version,
                key=published,
                digest=digest,
                nbytes=manifest.nbytes,
                base=manifest.base,
            )
        key = f"{gradients_key(self._files, under)}/weights-{digest.partition(':')[2]}"
        return self._versions().leave(version, DTYPES[name], key)

    def open_update(self, request: UpdateRequest) -> int:
        updater = self._begun(request)
        settings = self._spec.train.model_dump(mode="json", exclude=NO_INPUTS)
        self._open = OpenUpdate(
            request=request,
            updater=updater,
            steps=updater.optimizer_steps(request) if len(request.batch) else [],
            inputs=key_of(
                request.batch.to_json(),
                request.algorithm.model_dump(mode="json"),
                request.temperature,
                request.max_new_tokens,
                settings,
                self._spec.seed,
            ),
            began=time.perf_counter(),
        )
        return len(self._open.steps)

    def offer(self, under: int) -> Offered:
        now = self._now()
        step = now.request.step
        weights = self.offer_weights(under, step - 1 if not now.steps_made else step)
        of = GradientsOf(
            run=self._files.run,
            step=step,
            optimizer_step=now.steps_made,
            weights=weights.digest,
            inputs=now.inputs,
        )
        mini = now.steps[now.steps_made]
        counts = now.updater.normaliser(now.request, mini)
        name = f"{step:06d}.{now.steps_made}-{key_of(of.model_dump())}"
        now.offered = Offered(
            of=of,
            folder=f"{gradients_key(self._files, under)}/{name}",
            weights=weights,
            counts=LossCounts(tokens=counts.tokens, sequences=counts.sequences, rows=counts.rows),
            units=tuple(Unit(number=n, rows=rows) for n, rows in enumerate(mini.ranks[0])),
        )
        open_folder(self._store, now.offered.folder, of)
        return now.offered

    def apply(self) -> Applied:
        now = self._now()
        offered, began = now.offered, time.perf_counter()
        assert offered is not None
        markers = [self._read(offered, unit) for unit in offered.units]
        refused = {n: why for n, why in enumerate(markers) if isinstance(why, str)}
        gradients = [marker for marker in markers if isinstance(marker, Gradient)]
        nbytes = 0
        if not refused:
            try:
                nbytes = self._step(now, offered, gradients)
            except Damaged as damaged:
                refused = {damaged.unit: str(damaged)}
        for unit in refused:
            discard_gradient(self._files, offered.folder, unit)
        return Applied(refused=refused, nbytes=nbytes, seconds=time.perf_counter() - began)

    def close_update(self) -> UpdateResult:
        now = self._now()
        assert now.steps_made == len(now.steps), (now.steps_made, len(now.steps))
        self._open, self.version = None, now.request.step
        result = now.updater.result(now.request.step, time.perf_counter() - now.began)
        return replace(result, made_on=_together({result.made_on, *now.made_on}))

    def _read(self, offered: Offered, unit: Unit) -> Gradient | str:
        """A unit's marker, or why it is refused."""
        where = f"The gradient of unit {unit.number} in {offered.folder}"
        try:
            gradient = read_gradient(self._files, offered.folder, unit.number)
        except ObjectDamaged as error:
            return str(error)
        if gradient is None:
            return f"{where} is missing."
        why = offered.of.difference(gradient.of)
        if why is None and gradient.rows != key_of(list(unit.rows)):
            why = "it is of other rows"
        return gradient if why is None else f"{where} is refused: {why}."

    def _step(self, now: OpenUpdate, offered: Offered, gradients: list[Gradient]) -> int:
        """Make the optimizer step; returns the bytes read. Raises Damaged, with nothing changed."""
        tally = now.updater.tally
        finite = all(gradient.metrics.finite for gradient in gradients)
        optimizer = self._trained()
        shapes = {name: parameter.shape for name, parameter in optimizer.parameters.items()}
        with (
            tally.phase("optimizer"),
            Summed(self._files, offered.folder, gradients, self._device, shapes) as summed,
        ):
            report = optimizer.step_by_tensor(summed.first, summed.again, finite)
        for gradient in gradients:
            tally.add(metric_sums(gradient.metrics), gradient.metrics)
            now.made_on.add(
                MadeOn(device=gradient.device, torch=gradient.torch, fixed=gradient.fixed)
            )
        tally.reports.append(report)
        now.steps_made, now.offered = now.steps_made + 1, None
        return summed.nbytes

    def _now(self) -> OpenUpdate:
        if self._open is None:
            raise RuntimeError("No update is under way here. Call open_update first.")
        return self._open


def _together(parts: set[MadeOn]) -> MadeOn:
    """What an update was made on; where that is several kinds of device, all of them."""
    return MadeOn(
        device=", ".join(sorted({part.device for part in parts})),
        torch=", ".join(sorted({part.torch for part in parts})),
        fixed=all(part.fixed for part in parts),
    )
