"""What a run of coding tasks adds: the check of its sandbox, and of tasks that are left out."""

from __future__ import annotations

from collections.abc import Iterable

from configs.grpo import GRPOConfig
from configs.rewards import ProcessSandbox
from engines.environments.coding.judging import CodingTask, Unusable
from engines.environments.coding.workspace import check_judges
from engines.sandboxes.opening import prove
from engines.sandboxes.protocol import SandboxFailed
from storage.prompts.coding.rows import CodingRows
from storage.prompts.datasets import open_source
from tasks.run.features import Feature, Finding

TRIED = 2  # rows whose tests are run before a start


def check(config: GRPOConfig) -> Iterable[Finding]:
    """Open a workspace of the first rows and run their tests; name the task folders left out."""
    data = config.data.tasks or {"": config.data}
    for part, episodes in config.played.items():
        if (workspace := episodes.workspaces) is None:
            continue
        prove(workspace.sandbox, "episodes.workspace.sandbox")
        rows = open_source(data[part].source)
        assert isinstance(rows, CodingRows), "a rule asks for it"
        for name, why in rows.left_out.items():
            yield Finding(check="task", found=f"{name} is left out: {why}.", warning=True)
        if rows.left_out:
            folders = len(rows) + len(rows.left_out)
            yield Finding(check="tasks", found=f"{len(rows)} of {folders} task folders run")
        tried = range(min(TRIED, len(rows)))
        for number, row in zip(tried, rows.rows(tried), strict=True):
            try:
                task = CodingTask.of(row)
                if task.layout.links and not isinstance(workspace.sandbox, ProcessSandbox):
                    raise ValueError(
                        "Task folders have files at places of their own, which containers have not. "
                        "Set episodes.workspace.sandbox.kind = processes."
                    )
                check_judges(workspace, task)
            except (Unusable, SandboxFailed) as error:
                raise ValueError(f"Row {number} of {rows.name}: {error}.") from None
        said = f"the tests of {len(tried)} rows fail before a change, as they have to"
        yield Finding(check="coding", found=said)


FEATURE = Feature(check=check)
