"""What a person finds on a step's page of the Prefect dashboard: shards, lineage, curves."""

from __future__ import annotations

import base64
import html
import re
from typing import TYPE_CHECKING

from prefect.artifacts import create_markdown_artifact, create_table_artifact

if TYPE_CHECKING:
    from storage.commits import Commit
    from tasks.results import Scored
    from tasks.retries import Attempt
    from tasks.run import Run


def key(run: str, what: str) -> str:
    """An artifact key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run}-{what}".lower()).strip("-")


def escaped(text: object) -> str:
    """Text that may come from a model or a user, made harmless in markdown and HTML."""
    return re.sub(r"([\\`*_{}\[\]()#+!|~-])", r"\\\1", html.escape(str(text)))


def show_step(run: Run, commit: Commit, scored: list[Scored], attempts: list[Attempt]) -> None:
    """The step's table of shards and its lineage note."""
    create_table_artifact(
        key=key(run.name, "shards"),
        table=[shard_row(number, shard) for number, shard in enumerate(scored, 1)],
        description=f"Shards of step {commit.step}: where each was sampled, and how.",
    )
    create_markdown_artifact(
        key=key(run.name, "lineage"),
        markdown=lineage(run, commit, attempts),
        description=f"What went into and came out of step {commit.step}.",
    )


def shard_row(number: int, shard: Scored) -> dict[str, str | int | float]:
    """One line of the table of shards."""
    stats = shard.sampled.stats
    return {
        "shard": number,
        "worker": stats.worker,
        "attempt": stats.attempt,
        "samples": stats.rows,
        "tokens": stats.tokens,
        "tokens/s": round(stats.tokens / max(stats.seconds, 1e-9), 1),
        "seconds": round(stats.seconds, 2),
        "truncated": stats.truncated,
        "scoring failed": shard.failures,
        "policy version": stats.version,
        "weights held": stats.digest,
    }


def lineage(run: Run, commit: Commit, attempts: list[Attempt]) -> str:
    """Markdown: versions, refs, counts and retries of a committed step."""
    lines = [
        f"### Step {commit.step} of {escaped(run.name)}",
        "",
        "| | version | digest | store |",
        "|---|---|---|---|",
    ]
    for name, weights in (("sampled with", commit.version_in), ("gave", commit.version_out)):
        if weights is None:
            continue
        lines.append(
            f"| {name} | {weights.version} | `{weights.digest}` | `{run.store.url(weights.key)}` |"
        )
    lines += ["", "| batch | rows | columns | objects |", "|---|---|---|---|"]
    for name, ref in commit.refs.items():
        objects = sorted(ref.objects)
        places = "<br>".join(f"`{place}`" for place in objects[:8])
        more = f"<br>and {len(objects) - 8} more" if len(objects) > 8 else ""
        columns = ", ".join(f"`{column}`" for column in ref.names)
        lines.append(f"| {name} | {len(ref)} | {columns} | {places}{more} |")
    ledger = commit.ledger
    lines += [
        "",
        f"Prompts so far: {ledger.drawn} drawn = {ledger.trained} trained + {ledger.filtered} "
        f"filtered + {sum(ledger.dropped.values())} dropped + {ledger.in_flight} in flight.",
    ]
    lines += reward_code(commit)
    if run.origin is not None:
        lines += ["", f"The run was forked from {escaped(run.origin)}."]
    command = f"python -m flows.lineage {run.name} --version {commit.version_out.version}"
    lines += ["", f"Sample by sample: `{command}`; made again and compared: "]
    lines[-1] += f"`python -m flows.replay {run.name} {commit.step}`."
    failures = [attempt for attempt in attempts if attempt.error]
    if failures:
        lines += ["", "| failed attempt | worker | seconds | cause |", "|---|---|---|---|"]
        lines += [
            f"| {attempt.stage} {attempt.shard or ''} | {escaped(attempt.assignment.worker)} "
            f"| {attempt.ended - attempt.started:.1f} | {escaped(attempt.error)[:300]} |"
            for attempt in failures
        ]
    return "\n".join(lines)


def reward_code(commit: Commit) -> list[str]:
    """Markdown lines: which reward functions, to the digest of their lines."""
    if not commit.reward_code:
        return []
    lines = ["", "| reward code | function | lines | file | packages |", "|---|---|---|---|---|"]
    for digest, functions in commit.reward_code.items():
        for one in functions:
            packages = one.get("packages")
            versions = packages.items() if isinstance(packages, dict) else ()
            lines.append(
                f"| `{digest}` | {escaped(one.get('name'))} | `{str(one.get('source'))[:17]}` "
                f"| `{str(one.get('module'))[:17]}` "
                f"| {escaped(', '.join(f'{name} {version}' for name, version in versions))} |"
            )
    return lines


def show_curves(run: Run, image: bytes) -> None:
    """The run's curves, as a picture inside a markdown artifact."""
    picture = base64.b64encode(image).decode()
    create_markdown_artifact(
        key=key(run.name, "curves"),
        markdown=f"![reward, KL and time by stage](data:image/png;base64,{picture})",
        description=f"Reward, KL and time by stage of {run.name}.",
    )
