"""SIGTERM ends the run's waits also while somebody else handles it, as Prefect's flows do."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tasks.run.life_cycle import signals_end


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_waits_end_whoever_handles_the_signal(number: signal.Signals) -> None:
    waits, theirs = threading.Event(), []
    with signals_end(waits, lambda: None):
        signal.signal(number, lambda *_: theirs.append(number))
        os.kill(os.getpid(), number)
        assert waits.wait(3)
        assert theirs == [number]


def test_a_signal_that_nobody_took_interrupts() -> None:
    waits, before = threading.Event(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), signals_end(waits, lambda: None):
        os.kill(os.getpid(), signal.SIGTERM)
    assert waits.is_set()
    assert signal.getsignal(signal.SIGTERM) == before
