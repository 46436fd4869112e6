"""What runs in a process of environments: sessions, and calls into them answered one at a time.

The owner (engines/environments/process.py) kills the process when a call takes too long. Only the
standard library is imported here, and it runs under Python 3.10 too: environments may come with an
interpreter of their own. Libraries seed the global generators of random numbers: each session has
its own state of them, which is in place only while the session is called.
"""

from __future__ import annotations

import contextlib
import gc
import random
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from configs import imports
from configs.imports import described
from engines.environments import (
    adapters,
    agent_api,
    agent_protocols,
    agents,
    contract,
    library_adapters,
    openenv_adapter,
    tools,
)
from engines.environments.adapters import load
from engines.environments.contract import EnvironmentAdapter, Given, Lost, NotAllowed, checked
from engines.environments.protocol import (
    Act,
    Call,
    Close,
    Closed,
    EnvironmentStart,
    Finish,
    NoSession,
    OpenSession,
    Outcome,
    Reply,
    TokenizerAnswers,
    Turns,
    unpacked,
)
from engines.processes.user_code import Broken, answer_calls, begin, packed, traceback_of

# Files whose lines do not count in an error of the user's code.
OURS = (
    __file__,
    *(
        str(module.__file__)
        for module in (
            *(imports, adapters, agent_api, agent_protocols, agents, contract, tools),
            *(library_adapters, openenv_adapter),
        )
    ),
)
_NUMPY_SEEDS = 2**32  # numpy.random.seed takes numbers below


def main(socket: int, owner: int, dump: int) -> None:
    """Load the environment named by the first message, then answer calls until the owner is gone.

    `dump`: file descriptor that gets the stacks at a crash in native code, and at SIGUSR1.
    """
    begin(owner, dump, "refrain environment")
    with Connection(socket) as connection:
        start = unpacked(connection.recv())
        assert isinstance(start, EnvironmentStart)
        limit_memory(start.memory)
        try:
            loaded = load(start)
        except Exception as error:  # of a user's code: any
            said = str(error) if isinstance(error, ValueError) else described(error, ours=OURS)
            text = f"The environment {start.name} cannot be loaded: {said.rstrip('.')}."
            connection.send(packed(Broken(error=text)))
            return
        connection.send(packed(loaded.ready))
        sessions = Sessions(loaded.make)

        def answered(message: Any) -> object:
            call = unpacked(message)
            assert isinstance(call, (OpenSession, Act, Turns, TokenizerAnswers, Finish, Close))
            return packed(sessions.answer(call))

        answer_calls(connection, answered)


def limit_memory(size: int) -> None:
    """Have allocations fail (MemoryError) once this process has `size` bytes of its own.

    RLIMIT_DATA counts what a process may write of its own, which is close to what it uses.
    RLIMIT_AS counts address space too, of which libraries reserve many GiB that they never touch,
    and files that they map.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        size = min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


class Randomness:
    """One session's state of the global generators: of `random`, and of numpy once it is loaded."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the session's state in place in the body, and keep what becomes of it.

        A body that loads numpy gets numbers of numpy's own seed until it ends.
        """
        random.setstate(self._python)
        numpy = _numpy_random()
        if numpy is not None:
            if self._numpy is None:
                numpy.seed(self._seed % _NUMPY_SEEDS)
            else:
                numpy.set_state(self._numpy)
        try:
            yield
        finally:
            self._python = random.getstate()
            if numpy is not None:
                self._numpy = numpy.get_state()


def _numpy_random() -> Any:
    """numpy.random where the user's code has loaded numpy, which loads it only at its first use."""
    return import_module("numpy.random") if "numpy" in sys.modules else None


class Sessions:
    """The environments of this process that play episodes."""

    def __init__(self, make: Callable[[], EnvironmentAdapter]) -> None:
        self._make = make
        self._open: dict[str, tuple[EnvironmentAdapter, Randomness]] = {}

    def answer(self, call: Call) -> Reply:
        """The answer to a call. An error of the user's code is an Outcome that has failed."""
        if isinstance(call, Close):
            for session in call.sessions:
                self._close(session)
            return Closed()
        if not isinstance(call, OpenSession) and call.session not in self._open:
            return NoSession()
        try:
            return checked(
                self._open_one(call) if isinstance(call, OpenSession) else self._go_on(call)
            )
        except NotAllowed as error:
            return Outcome(failed=str(error))
        except Lost as error:
            return Outcome(failed=str(error), died=True)
        except MemoryError as error:
            trace = traceback_of(error, OURS)
            del error
            gc.collect()
            text = f"the environment's process has no memory left (episodes.memory_gib)\n{trace}"
            return Outcome(failed=text, out_of_memory=True)
        except Exception as error:  # of a user's code: any
            trace = traceback_of(error, OURS)
            return Outcome(failed=f"the environment raised {described(error, ours=OURS)}\n{trace}")

    def _open_one(self, call: OpenSession) -> Given:
        self._close(call.session)
        randomness = Randomness(call.seed)
        with randomness.in_place():
            adapter = self._make()
            self._open[call.session] = (adapter, randomness)
            return adapter.reset(call.row, call.seed)

    def _go_on(self, call: Act | Turns | TokenizerAnswers | Finish) -> Given:
        adapter, randomness = self._open[call.session]
        with randomness.in_place():
            if isinstance(call, Finish):
                return adapter.finish()
            if isinstance(call, Turns):
                assert isinstance(adapter, agents.AgentAdapter), "others are given one turn"
                return adapter.take(call.turns)
            if isinstance(call, TokenizerAnswers):
                assert isinstance(adapter, agents.AgentAdapter), "others ask no tokenizer"
                return adapter.tokenized(call.answers)
            if call.tokens is not None:
                taker = library_adapters.GymnasiumAdapter
                assert isinstance(adapter, taker), "others are not told tokens"
                adapter.see(call.tokens)
            return adapter.act(call.text, call.calls)

    def _close(self, session: str) -> None:
        adapter, randomness = self._open.pop(session, (None, None))
        if adapter is None or randomness is None:
            return
        try:
            with randomness.in_place():
                adapter.close()
        except Exception:  # the episode is over: nothing depends on it, but somebody may look
            traceback.print_exc()
