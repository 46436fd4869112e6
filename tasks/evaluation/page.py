"""What people see of an evaluation: a line on the terminal, a note on the page of its flow run."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from configs.flows import command
from storage.evaluations.files import EvaluationFiles
from storage.evaluations.results import EvaluationResult
from tasks.evaluation.summary import sentence
from tasks.reporting.artifacts import key
from tasks.reporting.markdown import code, escaped
from tasks.reporting.run_view import Caller

BOUNDS = ("reward_low", "reward_high")  # beside the reward


def show(caller: Caller, result: EvaluationResult, version: int) -> None:
    """Say it, and put it on the page; `version`: the run's number of it."""
    caller.terminal.say(sentence(result.suite, version, result.metrics))
    create_markdown_artifact(
        key=key(caller.files.run, f"evaluation-{result.suite}"),
        markdown=note(caller, result, version),
        description=f"{result.suite} on version {version}",
    )


def note(caller: Caller, result: EvaluationResult, version: int) -> str:
    """Markdown: weights, metrics with their intervals, what it cost, and how its answers are read."""
    run, config = caller.files.run, caller.config
    made = "" if result.asked_by == run else f", made for {escaped(result.asked_by)}"
    lines = [
        f"### {escaped(result.suite)} on version {version} of {escaped(run)}",
        "",
        f"- {result.asked} prompts, {result.metrics['samples']:.0f} samples by {result.engine}{made}",
        f"- Weights {code(result.weights.digest)}, which every engine attested",
        f"- Stored in {code(caller.store.url(EvaluationFiles(caller.store, result.key).folder))}",
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
