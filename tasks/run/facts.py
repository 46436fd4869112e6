"""What a run is, from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass

from configs.grpo import GRPOConfig
from storage.objects.store import Store
from storage.prompts.source import PromptSource
from storage.runs.run_store import Origin, RunStore


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """See the module's docstring."""

    name: str
    flow: str  # package.module:function that makes it
    config: GRPOConfig
    files: RunStore
    source: PromptSource
    origin: Origin | None  # where it began, if not with the model's own weights
    start: int  # the version that it begins with
    epoch: int  # of the lease: how many processes have had it, this one included

    @property
    def store(self) -> Store:
        """That of its files."""
        return self.files.store
