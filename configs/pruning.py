"""What is removed from Prefect's database, and when."""

from __future__ import annotations

from pydantic import Field

from configs.base import Settings

OF_RUNS = ("grpo", "ppo", "dapo", "tree", "distill", "srpo")  # each has a flow of its steps too


class PruneConfig(Settings):
    """Which flow runs are removed from a Prefect server."""

    days: float = Field(
        30.0,
        ge=0,
        description="Flow runs that ended more than so many days ago are removed, with their task "
        "runs, logs and artifacts; steps of a run that still goes among them. Runs in the store, "
        "MLflow and deployments are left alone.",
    )
    flows: tuple[str, ...] = Field(
        (*OF_RUNS, *(f"{name}-step" for name in OF_RUNS), "evaluate", "evaluation", "prune"),
        min_length=1,
        description="Names of the flows whose runs these are; add those of your own flows and of "
        "their steps.",
    )
