"""A process of a user's code that hangs says where, however busy the machine is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Timer

import psutil
import pytest

from engines.processes.child_process import CallTimedOut, ChildProcess, ProcessDied, Program
from engines.processes.user_code import Packed, begin, by_name, packed, unpacked


@dataclass(frozen=True)
class Message:
    """Of either side."""

    pid: int = 0


def main(socket: int, owner: int, dump: int) -> None:
    begin(owner, dump)
    with Connection(socket) as connection:
        connection.recv()
        connection.send(packed(Message(pid=psutil.Process().pid)))
        connection.recv()
        where_it_hangs()


def where_it_hangs() -> None:
    time.sleep(600)


def unpack(message: Packed) -> Message:
    found: Message = unpacked(message, by_name(Message))
    return found


@pytest.mark.parametrize("busy", [0.0, 1.0])
def test_stacks_of_a_call_that_hangs(busy: float) -> None:
    """`busy`: seconds for which the process gets no processor when it is asked where it hangs."""
    process: ChildProcess[Message, Message, Message] = ChildProcess(
        "code", Program(main=f"{__name__}:main"), None, unpack
    )
    child = psutil.Process(process.start().pid)
    if busy:
        Timer(1.0, child.suspend).start()
        Timer(1.5 + busy, child.resume).start()
    with pytest.raises(CallTimedOut, match=r"took longer than 1\.5 s") as found:
        process.call(Message(), 1.5)
    assert "where_it_hangs" in found.value.stacks
    assert not child.is_running()
    process.close()


def test_a_process_that_somebody_kills_leaves_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    process: ChildProcess[Message, Message, Message] = ChildProcess(
        "code 'a'\"b", Program(main=f"{__name__}:main"), None, unpack
    )
    child = psutil.Process(process.start().pid)
    assert child.name() == "refrain code"
    assert any("refrain: code" in word for word in child.cmdline())
    child.kill()
    while child.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    again = process.start().pid  # between two calls
    assert again != child.pid and process.losses == 1
    Timer(0.5, psutil.Process(again).kill).start()
    with pytest.raises(ProcessDied):  # in the middle of one
        process.call(Message(), 30.0)
    process.stop()  # by its owner
    process.close()
    first, second = [record.message for record in caplog.records]
    assert "was killed by SIGKILL between two calls; it is started anew (1 so far)" in first
    assert "was killed by SIGKILL; it is started anew (2 so far)" in second


def never_ready(socket: int, owner: int, dump: int) -> None:
    begin(owner, dump)
    where_it_hangs()


def test_one_that_is_closed_while_it_starts_is_not_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process: ChildProcess[Message, Message, Message] = ChildProcess(
        "code", Program(main=f"{__name__}:never_ready"), None, unpack
    )
    Timer(1.0, process.close).start()
    with pytest.raises(RuntimeError, match="The code has been closed"):
        process.start()
    assert process.losses == 0 and not caplog.records
