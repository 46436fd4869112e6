"""What a step cost, on its page of the dashboard; every number is one of its commit's metrics."""

from __future__ import annotations

from collections.abc import Mapping

from storage.tracking.cost import (
    CPU_SECONDS,
    DEVICE_HOURS,
    DEVICE_HOURS_SO_FAR,
    HELD,
    IDLE,
    IDLE_SHARE,
    JOULES,
    LOST,
    MONEY,
    MONEY_PER_SAMPLE,
    MONEY_SO_FAR,
    SECONDS,
    SECONDS_PER_SAMPLE,
    STARTING,
)
from tasks.markdown import escaped

Metrics = Mapping[str, float | None]


def cost_lines(metrics: Metrics, currency: str) -> list[str]:
    """Markdown: each pool's device-seconds by stage, and what they come to. [] of an old commit.

    What has no room in the table, which the dashboard cuts off, is said below it.
    """
    pools = [name.split("/")[-1] for name in metrics if name.startswith(f"{IDLE_SHARE}/")]
    if not pools:
        return []
    lines = [
        "| pool | device-seconds | at work | lost | starting | idle |",
        "|---|---|---|---|---|---|",
    ]
    for pool in pools:
        own = seconds_of(metrics, pool)
        work = {k: v for k, v in own.items() if k not in (HELD, IDLE, LOST, STARTING)}
        by_stage = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in work.items())
        lines.append(
            f"| {escaped(pool)} | {own[HELD]:.1f} | {by_stage or '-'} | {own[LOST]:.1f} "
            f"| {own[STARTING]:.1f} "
            f"| {own[IDLE]:.1f} ({number(metrics, f'{IDLE_SHARE}/{pool}'):.0%}) |"
        )
    processor = (
        f"{escaped(pool)} {number(metrics, f'{CPU_SECONDS}/{pool}'):.1f}" for pool in pools
    )
    energy = {pool: metrics.get(f"{JOULES}/{pool}") for pool in pools}
    told = ", ".join(
        f"{escaped(pool)} {joules:.0f}" for pool, joules in energy.items() if joules is not None
    )
    lines += [
        "",
        f"Processor-seconds: {', '.join(processor)}. Joules of GPUs: {told or 'no driver told'}.",
        "",
        f"Device-hours: {number(metrics, DEVICE_HOURS):.4g} of the step, "
        f"{number(metrics, DEVICE_HOURS_SO_FAR):.4g} of the version that it made; "
        f"{number(metrics, SECONDS_PER_SAMPLE):.3g} device-seconds for each sample; "
        f"{number(metrics, 'rollout/tokens'):.0f} tokens sampled.",
    ]
    if metrics.get(MONEY) is not None:
        lines[-1] += (
            f" {escaped(currency)} {number(metrics, MONEY):.4g} of the step, "
            f"{number(metrics, MONEY_SO_FAR):.4g} of the version, "
            f"{number(metrics, MONEY_PER_SAMPLE):.3g} for each sample."
        )
    return lines


def seconds_of(metrics: Metrics, pool: str) -> dict[str, float]:
    """Device-seconds of a pool by stage, HELD, IDLE, LOST and STARTING."""
    start = f"{SECONDS}/{pool}/"
    return {
        name.removeprefix(start): value or 0.0
        for name, value in metrics.items()
        if name.startswith(start)
    }


def number(metrics: Metrics, name: str) -> float:
    """A metric; 0 where there is none."""
    return metrics.get(name) or 0.0
