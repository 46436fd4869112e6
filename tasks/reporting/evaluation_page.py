"""What people see of an evaluation on the page of its flow run."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from configs.flows import command
from configs.grpo import GRPOConfig
from storage.evaluations.results import EvaluationFiles, EvaluationResult
from storage.runs.run_store import RunStore
from tasks.markdown import code, escaped
from tasks.reporting.artifacts import key
from tasks.run.events import Listeners, VersionEvaluated

BOUNDS = ("reward_low", "reward_high")  # beside the reward


class EvaluationPages:
    """Notes of a run's evaluations on the pages of their flow runs."""

    def __init__(self, files: RunStore, config: GRPOConfig) -> None:
        self._files, self._config = files, config

    def listen(self, listeners: Listeners) -> None:
        """Hear what a run, or who evaluates its versions later, says."""
        listeners.on(VersionEvaluated, self.version_evaluated)

    def version_evaluated(self, event: VersionEvaluated) -> None:
        """Put a result on the page."""
        result, version = event.result, event.version
        create_markdown_artifact(
            key=key(self._files.run, f"evaluation-{result.suite}"),
            markdown=note(self._files, self._config, result, version),
            description=f"{result.suite} on version {version}",
        )


def note(files: RunStore, config: GRPOConfig, result: EvaluationResult, version: int) -> str:
    """Markdown: weights, metrics with their intervals, what it cost, and how its answers are read.

    version: the run's number of it.
    """
    run = files.run
    made = "" if result.asked_by == run else f", made for {escaped(result.asked_by)}"
    lines = [
        f"### {escaped(result.suite)} on version {version} of {escaped(run)}",
        "",
        f"- {result.asked} prompts, {result.metrics['samples']:.0f} samples by {result.engine}{made}",
        f"- Weights {code(result.weights.digest)}, which every engine attested",
        f"- Stored in {code(files.store.url(EvaluationFiles(files.store, result.key).folder))}",
        "",
        "| metric | value | 95 % interval |",
        "|---|---|---|",
    ]
    for name, value in result.metrics.items():
        interval = result.interval(name)
        bounds = "" if interval is None else f"{interval.low:.4f} to {interval.high:.4f}"
        bounds += "" if interval is None else f" ({interval.kind})"
        if name not in BOUNDS:
            lines.append(f"| {escaped(name)} | {value:.6g} | {bounds} |")
    lines += ["", *cost_lines(result, config.cluster.currency)]
    read = command(
        "flows.samples", config.store, run, "--evaluation", f"{result.suite}@{version}", "--worst"
    )
    return "\n".join([*lines, "", f"Its answers, the worst first: {code(read)}."])


def cost_lines(result: EvaluationResult, currency: str) -> list[str]:
    """Markdown: devices that its calls had. [] of an older Refrain's."""
    if not result.cost:
        return []
    seconds = {
        name.rpartition("/")[2]: value
        for name, value in result.cost.items()
        if name.startswith("device_seconds/")
    }
    parts = ", ".join(f"{escaped(pool)} {value:.1f}" for pool, value in seconds.items())
    money = result.cost.get("money")
    paid = "" if money is None else f", {escaped(currency)} {money:.4g}"
    return [
        f"Device-seconds of its calls: {parts}; {result.cost['device_hours']:.4g} device-hours{paid}."
    ]
