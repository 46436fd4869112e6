"""Where the time of a committed step's update goes."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from configs.algorithm.distillation import recorded_algorithm
from configs.overrides import ConfigError
from storage.runs.run_store import RunStore
from tasks.commands.command import Answer, Request, heading, table, text
from tasks.commands.replay import lone_trainer, made_again, named_step, settings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from engines.train.contract import UpdateProfile

SHOWN = 15  # operations told on the terminal; --json has all


def answer(request: Request) -> Answer:
    """Profile the update of the step that was named. Raises ValueError where it cannot be made."""
    files, step = named_step(request)
    target = Path(request.arguments.to or f"{files.run}-{step}.json.gz").expanduser().absolute()
    if target.exists() or not target.parent.is_dir():
        why = "is there already" if target.exists() else "is in no folder that there is"
        raise ConfigError(f"--to: {target} {why}. Name a new file in a folder that is there.")
    commit = made_again(files, step)
    config = settings(files, commit, request.cluster)
    if config.train.engine == "elastic":
        raise ConfigError(
            "train.engine = elastic: units of an update are made by workers that come and go, and "
            "are not profiled. Profile a run with train.engine = fsdp."
        )
    # A rank is perhaps on another machine, so the trace comes by way of the store.
    key = f"{files.run}/profiles/{step:06d}-{secrets.token_hex(4)}.json.gz"
    try:
        with lone_trainer(files, config, step) as trainer:
            algorithm = recorded_algorithm(commit.algorithm)
            profile = trainer.profile(step, commit.refs["batch"], algorithm, key)
        target.write_bytes(files.store.read(key))
    finally:
        files.store.delete([key])
    record = _record(files, step, profile) | {"trace": str(target)}
    return Answer(record=record, shown=[*_shown(files, step, profile), text(f"  trace  {target}")])


def _record(files: RunStore, step: int, profile: UpdateProfile) -> dict[str, object]:
    return {
        "run": files.run,
        "step": step,
        "seconds": profile.seconds,
        "tokens": profile.tokens,
        "device_busy_share": profile.busy,
        "groups": profile.by_group(),
        "operations": [asdict(operation) for operation in profile.operations],
    }


def _shown(files: RunStore, step: int, profile: UpdateProfile) -> list[RenderableType]:
    summary = f"  {profile.seconds:.3g} s under the profiler, {profile.tokens} tokens"
    if profile.busy is not None:
        summary += f"; the GPU ran kernels in {profile.busy:.1%} of it"
    groups, longest = table("group", "seconds", "share"), table("operation", "group", "s", "calls")
    total = sum(profile.by_group().values()) or 1.0
    for group, seconds in profile.by_group().items():
        groups.add_row(group, f"{seconds:.4g}", f"{seconds / total:.1%}")
    operations = [operation for operation in profile.operations if operation.name]
    for row in operations[:SHOWN]:
        longest.add_row(row.name, row.group, f"{row.seconds:.4g}", str(row.calls))
    return [
        heading(f"The update of step {step} of {files.run}"),
        text(summary),
        groups,
        longest,
    ]
