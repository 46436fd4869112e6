"""What people see of a run that does not begin, since there is nothing new to train on."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact
from prefect.states import Completed, State

from tasks.markdown import escaped
from tasks.run.beginning import NothingNew


def skipped(nothing: NothingNew) -> State[None]:
    """The final state of the flow run; also leaves the note on its page."""
    create_markdown_artifact(
        key="skipped", markdown=escaped(nothing), description="Why the run was skipped."
    )
    return Completed(name="Skipped", message=str(nothing))
