"""A dossier of a run: a folder that tells all of it, and a script that checks it without Refrain."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path

from pydantic import JsonValue

from storage.audit.all_curves import Point, as_csv, points_of
from storage.audit.audit import Audit, sources_of
from storage.audit.comparison import first_step
from storage.evaluations.results import newest_evaluations
from storage.evaluations.run_cost import cost_of_run
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import Commit, head, read_commit
from storage.runs.run_store import RunStore, committer, origin_of
from storage.runs.weights import MANIFEST, open_manifest_at
from storage.tracking.plots import progress_png

VERIFY, SUMS = "verify.py", "SHA256SUMS"
WINDOW = 16 * 2**20  # bytes of an object read at once


def write_dossier(run: RunStore, audited: Audit, folder: Path) -> str:
    """Write the dossier of a run that was audited into a new folder; SHA-256 of its list of sums.

    What the store no longer has is left out of objects.json, and counted in lineage.json.
    """
    commits = commits_of(run)
    points = points_of(run)
    record = run.read_run() or {}
    listed = objects_of(run, commits)
    origin = origin_of(run)
    documents: dict[str, object] = {
        "settings.json": record.get("config"),
        "lineage.json": {
            "run": run.run,
            "store": run.store.uri,
            "origin": None if origin is None else str(origin),
            "code": {name: record.get(name) for name in ("code", "flow", "git")},
            "steps": [step_of(run, commit) for commit in commits],
            "objects_removed_by_retention": audited.removed,
        },
        "objects.json": list(listed.values()),
        "data.json": {
            "source": setting(record, "data", "source"),
            "digest": commits[-1].cursor.get("digest"),
            "evaluation": setting(record, "evaluation"),
        },
        "reward_code.json": {key: code for c in commits for key, code in c.reward_code.items()},
        "evaluations.json": [
            {"suite": e.suite, "version": e.version, "on": e.on, "result": key, "metrics": e.metrics,
             "intervals_95": {name: [i.low, i.high] for name, i in e.intervals.items()}}
            for key, e in newest_evaluations(run).items()
        ],
        "software.json": software(commits),
        "audit.json": {
            "good": audited.good,
            "problems": [problem.message for problem in audited.problems],
            "objects_read": audited.read.objects,
        },
    }  # fmt: skip
    folder.mkdir(parents=True)
    for name, body in documents.items():
        (folder / name).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (folder / "curves.csv").write_text(as_csv(points), encoding="utf-8")
    picture = progress_png([p.step for p in points], [p.metrics for p in points], title=run.run)
    (folder / "curves.png").write_bytes(picture)
    script = Path(__file__).with_name("verify_dossier.py").read_text(encoding="utf-8")
    (folder / VERIFY).write_text(script, encoding="utf-8")
    (folder / "README.md").write_text(card(run, record, commits, points), encoding="utf-8")
    return seal(folder)


def seal(folder: Path) -> str:
    """List the SHA-256 of every file; returns that of the list."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    lines = [
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}" for name in names
    ]
    text = "".join(f"{line}\n" for line in lines)
    (folder / SUMS).write_text(text, encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def commits_of(run: RunStore) -> list[Commit]:
    """All commits of a run's past, ascending. ValueError for a run without a step."""
    last = head(run)
    if last is None:
        raise ValueError(f"Run {run.run} has no committed step, so there is nothing to tell of it.")
    return [read_commit(*committer(run, step)) for step in range(first_step(run), last + 1)]


def step_of(run: RunStore, commit: Commit) -> dict[str, object]:
    """A step in lineage.json: what went in, what came out, and by which objects."""
    owner, number = committer(run, commit.step)
    return {
        "step": commit.step,
        "commit": owner.commit_key(number),
        "sampled_with": commit.version_in.model_dump(mode="json", include={"version", "digest"}),
        "weights": commit.version_out.model_dump(
            mode="json", include={"version", "key", "digest", "nbytes"}
        ),
        "reward_code": sorted(commit.reward_code),
        "batches": {name: sorted(ref.objects) for name, ref in commit.refs.items()},
        "rows": commit.rows,
        "ledger": commit.ledger.model_dump(mode="json"),
    }


def objects_of(run: RunStore, commits: Iterable[Commit]) -> dict[str, dict[str, JsonValue]]:
    """Key -> size and SHA-256 of every object that makes the run, of those that are there."""
    objects: dict[str, dict[str, JsonValue]] = {}

    def take(key: str, **more: JsonValue) -> None:
        if key not in objects and run.store.exists(key):
            objects[key] = {"key": key, **hashed(run, key), **more}

    take(run.run_json_key)
    versions: set[str] = set()
    for commit in commits:
        owner, number = committer(run, commit.step)
        take(owner.commit_key(number))
        if commit.lists is not None:
            take(commit.lists.key)
        for key, source in sources_of(commit).items():
            take(key, head=source.head, digest=source.digest)
        versions |= {commit.version_in.key, commit.version_out.key}
    while versions:
        folder = versions.pop()
        try:
            manifest = open_manifest_at(run.store, folder)
        except ObjectMissing:
            continue  # retention removed it
        for name in (*manifest.files, MANIFEST):
            take(f"{folder}/{name}")
        if manifest.base is not None and f"{manifest.base.key}/{MANIFEST}" not in objects:
            versions.add(manifest.base.key)
    for key in newest_evaluations(run):
        take(key)
    return objects


def hashed(run: RunStore, key: str) -> dict[str, JsonValue]:
    """Size and SHA-256 of an object, a window at a time."""
    size, total = run.store.size(key), hashlib.sha256()
    for start in range(0, size, WINDOW):
        total.update(run.store.read_ranges([(key, start, min(start + WINDOW, size))])[0])
    return {"bytes": size, "sha256": total.hexdigest()}


def software(commits: list[Commit]) -> dict[str, object]:
    """What is installed where the dossier is made, and what the last update was made on."""
    return {
        "here": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": dict(
                sorted((package.name, package.version) for package in distributions())
            ),
        },
        "last_update_made_on": commits[-1].update.get("made_on"),
    }


def setting(record: Mapping[str, object], *names: str) -> object:
    """A setting of run.json by its path; None where there is none."""
    value: object = record.get("config")
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def card(
    run: RunStore, record: Mapping[str, object], commits: list[Commit], points: list[Point]
) -> str:
    """README.md: a model card."""
    last, metrics, cost = commits[-1], points[-1].metrics, cost_of_run(run)
    model = setting(record, "model")
    facts = {
        "Flow": record.get("flow"),
        "Refrain": record.get("code"),
        "Model trained": json.dumps(model),
        "Data": f"{json.dumps(setting(record, 'data', 'source'))}, `{last.cursor.get('digest')}`",
        "Steps": len(commits),
        "Last version": f"{last.version_out.version}, `{last.version_out.digest}`",
        "Prompts trained": last.ledger.trained,
        "Mean reward, first and last step": (
            f"{points[0].metrics.get('reward/mean', float('nan')):.4g}, "
            f"{metrics.get('reward/mean', float('nan')):.4g}"
        ),
        "Device-hours": "not recorded" if cost is None else f"{cost.device_hours:.4g}",
    }
    lines = ["---", "tags:", "- reinforcement-learning", "- refrain", "---", "", f"# {run.run}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "![Reward, KL and time by stage](curves.png)", "", "## What is here", ""]
    lines += [f"- `{name}`: {what}" for name, what in CONTENTS.items()]
    lines += [
        "",
        f"`python {VERIFY} --store FOLDER` checks every file here, and every object of the run in "
        "the store, without Refrain.",
    ]
    measured = newest_evaluations(run).values()
    if measured:
        lines += [
            "",
            "## Evaluations",
            "",
            "| suite | version | metric | value | 95 % |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {result.suite} | {result.version} | {name} | {value:.4g} | "
            + ("" if (at := result.interval(name)) is None else f"{at.low:.4g} to {at.high:.4g}")
            + " |"
            for result in measured
            for name, value in result.metrics.items()
        ]
    return "\n".join([*lines, ""])


CONTENTS = {
    "settings.json": "every setting",
    "lineage.json": "each step: its commit, weights, batches, ledger, reward code",
    "objects.json": "each object of the store: size, SHA-256, the digest that commits have of it",
    "data.json": "the sources of the data and their digest",
    "reward_code.json": "the reward functions: settings, digests of their code, packages",
    "curves.csv, curves.png": "every metric of every step",
    "evaluations.json": "every evaluation, with intervals",
    "software.json": "versions of what was installed",
    "audit.json": "what the audit found when the dossier was made",
    "verify.py, SHA256SUMS": "the check of all this",
}
