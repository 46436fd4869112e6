"""One reward function in a process of its own (engines/processes/child_process.py)."""

from __future__ import annotations

from engines.processes.child_process import ChildProcess, Program
from engines.rewards.protocol import Reply, RewardCall, RewardReady, RewardStart, unpacked

PROGRAM = Program(main="engines.rewards.child:main")


class RewardProcess(ChildProcess[RewardReady, RewardCall, Reply]):
    """A process that loads one function, and scores samples by it."""

    def __init__(self, start: RewardStart, start_seconds: float = 180.0) -> None:
        super().__init__(f"reward function {start.name}", PROGRAM, start, unpacked, start_seconds)
        self.name = start.name
