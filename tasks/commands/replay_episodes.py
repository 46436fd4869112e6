"""Stepping the environments of committed episodes again, and comparing what they say."""

from __future__ import annotations

from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import read_commit
from storage.runs.run_store import RunStore
from tasks.commands.command import Answer, heading, text
from tasks.run.roles import environment_spec
from tasks.run.run_record import settings_of


def replayed_episodes(files: RunStore, step: int) -> Answer:
    """Replay the episodes of a step: seed, row and the policy's turns as stored."""
    from engines.data.environment_engine import EnvironmentEngine

    config, commit = settings_of(files), read_commit(files, step)
    if config.episodes is None:
        raise ValueError(f"Run {files.run} plays no episodes: its answers have one turn.")
    samples = commit.refs["samples"]
    engine = EnvironmentEngine(environment_spec(config, config.episodes, files.store))
    try:
        answered = "turn_order" if "turn_order" in samples.names else "turn_rewards"
        turns = int(samples.lengths(files.store, answered).sum())
        differing = engine.replay(samples)
    except ObjectMissing as error:
        raise ValueError(
            f"The episodes of step {step} of run {files.run} cannot be stepped again: retention "
            f"removed them ({error}). Set store.keep_steps higher in a run to be replayed."
        ) from error
    finally:
        engine.close()
    said = (
        "the environments say the same again"
        if not differing
        else f"the environments of {len(differing)} say something else"
    )
    played = len(samples) // config.episodes.players
    shown = [heading(f"{played} episodes of {turns} turns, step {step} of {files.run}: {said}.")]
    shown += [text(f"  sample {sample}: {error}") for sample, error in differing]
    record = {
        "run": files.run,
        "step": step,
        "episodes": played,
        "turns": turns,
        "differing": [{"sample": sample, "error": error} for sample, error in differing],
    }
    return Answer(record=record, shown=shown, good=not differing)
