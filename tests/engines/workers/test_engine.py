"""Contracts, calls and engine specs."""

import subprocess
import sys
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines.workers.engine import (
    Call,
    CallId,
    Engine,
    EngineSpec,
    Ranked,
    callable_methods,
    join_of,
    joined_by,
)
from tests.engines.workers.dummies import Dummy, Payload, dummy


class Counter(Engine):
    """A contract."""

    @abstractmethod
    def count(self, up_to: int) -> list[int]:
        """Numbers."""


class Counting(Counter):
    """Keeps it."""

    def __init__(self, payload: object = None) -> None:
        """There is nothing to build."""

    def count(self, up_to: int) -> list[int]:
        return list(range(up_to))

    def aside(self) -> None:
        """Not to be called from elsewhere."""


class Idle(Counter):
    """Does not keep it."""


def test_what_a_contract_promises_can_be_called_and_nothing_else():
    assert callable_methods(Counter) == ("count",)


def test_an_engine_that_lacks_a_promised_method_cannot_be_made():
    with pytest.raises(TypeError, match="abstract method '?count"):
        Idle()


def test_a_promised_method_says_what_it_takes_and_returns():
    with pytest.raises(TypeError, match=r"Bare\.count: up_to has no annotation"):

        class Bare(Engine):
            @abstractmethod
            def count(self, up_to) -> list[int]: ...


WRONG = """
from engines.data.contract import EnvironmentHost, Scorer
from engines.train.contract import TrainEngine
from engines.workers.engine import Call
from engines.workers.gang import Gang
from engines.workers.engine import CallId
from engines.workers.pool import EnginePool
from storage.runs.weights import WeightsRef

def use(pool: EnginePool[Scorer], call: CallId) -> None:
    pool.call(Scorer.row_digests, call, start=0, stop=5)
    pool.call(Scorer.row_digests, call, start=0, end=5)  # error: 9
    pool.call(Scorer.row_digests, call, start="0", stop=5)  # error: 10
    pool.call(EnvironmentHost.deal, call)  # error: 11
    text: str = pool.call(Scorer.row_digests, call, start=0, stop=5)  # error: 12

def train(gang: Gang[TrainEngine], weights: WeightsRef) -> None:
    gang.call(TrainEngine.compare, weights=weights, dtype="float32")
    gang.call(TrainEngine.compare, weights=weights, of="float32")  # error
    gang.call(Scorer.row_digests, start=0, stop=1)  # error
    found: str = gang.call(TrainEngine.compare, weights=weights, dtype="float32")  # error
    call: Call[int] = Call.of("role", TrainEngine.digest, None)  # error
"""


@pytest.mark.slow
def test_a_type_checker_compares_a_call_with_its_engine(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "wrong.py").write_text("from __future__ import annotations" + WRONG)
    command = [sys.executable, "-m", "mypy", "--no-incremental", str(tmp_path / "wrong.py")]
    said = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    wrong = {int(line.split(":")[1]) for line in said.stdout.splitlines() if ": error:" in line}
    due = [n for n, line in enumerate(WRONG.splitlines(), 1) if "# error" in line]
    assert wrong == set(due), said.stdout + said.stderr


def test_a_bare_return_is_refused():
    with pytest.raises(TypeError, match="the return value has no annotation"):

        class Wrong(Engine):
            @abstractmethod
            def update(self): ...


class Rows(Ranked):
    """A contract of ranks."""

    @abstractmethod
    @joined_by(lambda parts: [row for part in parts for row in part])
    def rows(self) -> list[int]:
        """Each rank's."""

    @abstractmethod
    def lead(self) -> list[int]:
        """Alike on all ranks."""


def test_a_contract_says_how_the_ranks_results_become_one():
    parts = [[1, 2], [3], []]
    assert join_of(Rows.rows)(parts) == [1, 2, 3]
    assert join_of(Rows.lead)(parts) == [1, 2]


def test_ranks_can_also_be_joined_and_leave_their_devices():
    assert callable_methods(Rows) == ("join", "offload", "onload", "rows", "lead")
    assert not {"join", "offload", "onload"} & set(callable_methods(Counter))


def test_of_a_call_the_names_travel():
    call = Call.of("role", Counter.count, CallId(run="run", epoch=1, step=2, call="c"), up_to=3)
    assert (call.label, call.arguments) == ("role.count", {"up_to": 3})
    assert call.at("here").id == CallId(run="run", epoch=1, step=2, call="c", incarnation="here")
    with pytest.raises(AssertionError, match="count: arguments are given by name"):
        Call.of("role", Counter.count, None, 3)


def test_a_spec_has_the_digest_of_class_and_payload():
    assert dummy("a") == dummy("a")
    assert dummy("a").digest != dummy("b").digest
    assert dummy("a").digest != EngineSpec.of("other:Dummy", Payload(tag="a"), Dummy).digest


def test_the_flow_process_imports_no_engine_library():
    code = (
        "import sys, engines.workers.gang, engines.workers.placement; "
        "print(sorted({'torch', 'vllm', 'transformers', 'prefect'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout == "[]\n"


def test_a_pydantic_payload_and_a_dataclass_payload_both_have_digests():
    from configs.cluster import PoolConfig

    @dataclass(frozen=True)
    class Nested:
        pool: PoolConfig

    two, three = PoolConfig(workers=2), PoolConfig(workers=3)
    assert EngineSpec.of("m:C", two, Engine).digest != EngineSpec.of("m:C", three, Engine).digest
    assert (
        EngineSpec.of("m:C", Nested(two), Engine).digest
        != EngineSpec.of("m:C", Nested(three), Engine).digest
    )
