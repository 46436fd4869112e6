"""A set of tasks for verifiers 0.4, and an environment that gives the model a second try."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class Sum(vf.TaskData):
    """What verifiers knows of a task."""

    total: int = 0


class SumTask(vf.Task[Sum]):
    """A sum, right or wrong."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 if the last answer has the sum in it."""
        return float(str(self.data.total) in trace.last_reply)


class Sums(vf.Taskset[SumTask]):
    """Sums of two numbers below eight."""

    def load(self) -> Iterator[SumTask]:
        """All of them, in order."""
        for number in range(64):
            one, other = divmod(number, 8)
            yield SumTask(Sum(prompt=f"{one} + {other} =", total=one + other))


class SecondTry(vf.Env[vf.SingleAgentEnvConfig]):
    """Asks once more where the first answer was wrong."""

    async def run(self, task: SumTask, agents: vf.Agents) -> None:
        """One conversation of one or two turns."""
        async with agents.agent.interaction(task) as conversation:
            first = await conversation.turn()
            if not first.terminated and str(task.data.total) not in first.last_reply:
                await conversation.turn("No. Again:")


__all__ = ["SecondTry", "Sums"]
