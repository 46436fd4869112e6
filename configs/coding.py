"""Coding tasks: repositories with problems and tests, and workspaces in which agents edit them."""

from typing import Literal

from pydantic import Field

from configs.base import FileAddress, Settings
from configs.rewards import ProcessSandbox, SandboxConfig

AROUND_SECONDS = 10.0  # beyond deadlines, for starts of sandboxes and their files


class CodingSource(Settings):
    """Coding tasks: a row is a repository, a problem and tests (docs/coding-tasks.md)."""

    kind: Literal["coding"] = "coding"
    path: FileAddress = Field(
        description="A file of rows (.jsonl, .parquet), a folder of such files, or a folder of task "
        "folders of Harbor or Terminal-Bench; a path or an fsspec URL."
    )


def _sandbox() -> ProcessSandbox:
    return ProcessSandbox(memory_mib=1024, processes=64, timeout=10.0)


class WorkspaceConfig(Settings):
    """A row's repository in a sandbox of its own, for each episode; another one for its tests."""

    sandbox: SandboxConfig = Field(
        default_factory=_sandbox,
        description="Where commands and tests run, and what they may use; timeout: of a command.",
    )
    test_timeout: float = Field(
        20.0,
        gt=0,
        description="Deadline of all tests of an episode, and of the set-up, in seconds.",
    )
    output_characters: int = Field(
        8000, ge=200, description="Of a command's output, or of a file, what the agent is shown."
    )
    score: Literal["all", "share"] = Field(
        "all",
        description="1 if all tests of fail_to_pass and pass_to_pass pass, else 0; or the share of "
        "fail_to_pass that pass, 0 where one of pass_to_pass fails.",
    )

    @property
    def answer_seconds(self) -> float:
        """Longest answer: a command; or a reset, with set-ups of two sandboxes and tests."""
        return max(self.sandbox.timeout, 3 * self.test_timeout) + AROUND_SECONDS
