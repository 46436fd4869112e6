"""What the processes of users' code have in common."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection

import pytest

from engines.processes.user_code import answer_calls

DEADLINE = 10.0


def pair() -> tuple[Connection, Connection]:
    """Two ends of a socket, as an owner and its child have them."""
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())


@pytest.mark.parametrize("unread", [False, True])
def test_a_child_ends_quietly_however_its_owner_goes(unread: bool) -> None:
    """A killed owner leaves answers unread: what its child reads next is an error, no end of file."""
    owner, child = pair()
    answered, errors = threading.Event(), list[BaseException]()

    def answer(number: int) -> int:
        answered.set()
        return number + 1

    def serve() -> None:
        try:
            answer_calls(child, answer)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    owner.send(1)
    assert owner.poll(DEADLINE)
    if not unread:
        assert owner.recv() == 2
    owner.close()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert errors == []


def test_an_error_of_its_own_is_raised() -> None:
    owner, child = pair()
    owner.send(0)
    with pytest.raises(ZeroDivisionError):
        answer_calls(child, lambda number: 1 / number)
