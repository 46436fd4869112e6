"""mini-swe-agent on coding tasks: its commands run in the workspace, and not on this machine.

    refrain grpo coding.yaml episodes.environment.path=mini_swe.py:solve \\
        episodes.python=mini/bin/python

mini/bin/python has mini-swe-agent and pydantic.
"""
# mypy: ignore-errors

from __future__ import annotations

import os

os.environ["MSWEA_SILENT_STARTUP"] = "1"
os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet at its start

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment_class
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

SYSTEM = "You put right what is wrong with a repository, by commands for bash."
INSTANCE = """{{task}}

Each command begins in the folder of the repository. When you are done, run
`echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`."""
SECONDS = 600.0  # that it waits for a turn


class InWorkspace(LocalEnvironment):
    """What mini-swe-agent calls an environment."""

    def __init__(self, workspace):
        super().__init__()
        self._workspace = workspace

    def execute(self, action, cwd="", *, timeout=None):
        """Run a command; raises Submitted where it says that the task is done."""
        ran = self._workspace.run(action.get("command", ""), timeout)
        code = -1 if ran.exit_code is None else ran.exit_code
        output = {"output": ran.output, "returncode": code, "exception_info": ran.stopped}
        self._check_finished(output)
        return output

    def get_template_vars(self, **variables):
        """Of this machine nothing is shown."""
        return variables


def solve(base_url, api_key, problem, workspace):
    """Work until the model submits, says nothing, or is at a limit; then the tests run."""
    settings = {"api_base": base_url, "api_key": api_key, "timeout": SECONDS}
    agent = DefaultAgent(
        LitellmModel(model_name="openai/policy", model_kwargs=settings),
        get_environment_class(f"{__name__}.InWorkspace")(workspace),
        system_template=SYSTEM,
        instance_template=INSTANCE,
        max_consecutive_format_errors=1,  # it forgets a turn without a command, and the past stays
    )
    try:
        agent.run(problem)
    except Exception as error:
        if "the episode is over" not in str(error):
            raise
    return workspace.reward()
