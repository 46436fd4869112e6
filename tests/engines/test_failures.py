"""Errors on their way from a worker to the flow process."""

import pickle
import sys

import pytest

from engines.failures import (
    CallDeadline,
    Failure,
    GangFailed,
    GangLost,
    InfrastructureError,
    NoProgress,
    NoWorkers,
    StaleCall,
    StaleIncarnation,
    WorkerLost,
    capture,
    revive,
)
from tests.engines.workers.dummies import NotYet


def travel(error):
    try:
        raise error
    except Exception as raised:
        return revive(pickle.loads(pickle.dumps(capture(raised))), "by x on worker w")


def test_an_exception_arrives_as_itself_with_the_workers_traceback():
    arrived = travel(KeyError("column"))
    assert type(arrived) is KeyError
    assert arrived.args == ("column",)
    assert "by x on worker w" in arrived.__notes__[0]
    assert "test_failures.py" in arrived.__notes__[0]


def test_an_exception_that_cannot_be_pickled_arrives_as_its_base():
    arrived = travel(NotYet(left=3))
    assert type(arrived) is InfrastructureError
    assert str(arrived) == "NotYet: 3 left"


def test_an_exception_of_a_module_that_is_not_loaded_imports_nothing():
    pickled = b"(cxdrlib\nError\n(Vno\ntt."  # (xdrlib.Error, ("no",))
    sys.modules.pop("xdrlib", None)
    failure = Failure(
        lineage=(("xdrlib", "Error"), ("builtins", "Exception")),
        message="no",
        text="Traceback: no",
        pickled=pickled,
    )
    arrived = revive(failure, "there")
    assert type(arrived) is Exception
    assert str(arrived) == "Error: no"
    assert "xdrlib" not in sys.modules


@pytest.mark.parametrize(
    ("base", "kind"), [(RuntimeError, RuntimeError), (UnicodeDecodeError, UnicodeError)]
)
def test_a_stand_in_is_of_the_nearest_base_that_takes_a_message(base, kind):
    lineage = tuple((one.__module__, one.__qualname__) for one in base.__mro__)
    failure = Failure(
        lineage=(("torch.distributed", "DistBackendError"), *lineage),
        message="closed by peer",
        text="",
        pickled=None,
    )
    arrived = revive(failure, "there")
    assert type(arrived) is kind
    assert str(arrived) == "DistBackendError: closed by peer"


@pytest.mark.parametrize(
    "error",
    [
        WorkerLost("rollout-0", "gone"),
        CallDeadline("rollout-0", 3.0, "rollout.generate"),
        NoProgress("rollout-0", 3.0, "rollout.build", "drawing"),
        NoWorkers("rollout", 60.0, 0, 2),
        GangLost(1, "train-1", "gone"),
        GangFailed(1, "train-1", "wrong"),
    ],
)
def test_our_own_errors_keep_their_fields(error):
    arrived = travel(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    fields = {key: value for key, value in vars(arrived).items() if key != "__notes__"}
    assert fields == vars(error)


def test_what_may_be_retried():
    for kind in (WorkerLost, CallDeadline, NoWorkers, GangLost, StaleIncarnation):
        assert issubclass(kind, InfrastructureError)
    for kind in (StaleCall, GangFailed):
        assert not issubclass(kind, InfrastructureError)
