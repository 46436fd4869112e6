"""Contracts, the REMOTE table and engine specs."""

import subprocess
import sys
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from engines.workers.engine import Engine, EngineSpec, Ranked, callable_methods
from tests.engines.workers.dummies import Dummy, Payload, Summing, dummy


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
    assert callable_methods(Counting) == ("count",)


def test_an_engine_that_lacks_a_promised_method_cannot_be_made():
    with pytest.raises(TypeError, match="abstract method '?count"):
        Idle()


def test_a_promised_method_says_what_it_takes_and_returns():
    with pytest.raises(TypeError, match=r"Bare\.count: up_to has no annotation"):

        class Bare(Engine):
            @abstractmethod
            def count(self, up_to) -> list[int]: ...


WRONG = """
from engines.data.contract import RewardModels, Scorer
from engines.workers.messages import CallId
from engines.workers.pool import EnginePool

def use(pool: EnginePool[Scorer], call: CallId) -> None:
    pool.call(Scorer.row_digests, call, start=0, stop=5)
    pool.call(Scorer.row_digests, call, start=0, end=5)  # error: 9
    pool.call(Scorer.row_digests, call, start="0", stop=5)  # error: 10
    pool.call(RewardModels.score, call)  # error: 11
    text: str = pool.call(Scorer.row_digests, call, start=0, stop=5)  # error: 12
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


def test_a_name_that_is_no_method_is_refused_when_the_class_is_created():
    with pytest.raises(TypeError, match=r"Wrong.REMOTE: 'updaet' names no method"):

        class Wrong(Engine):
            REMOTE: ClassVar = ("updaet",)

            def update(self) -> None: ...


def test_a_bare_argument_is_refused():
    with pytest.raises(TypeError, match="batch has no annotation"):

        class Wrong(Engine):
            REMOTE: ClassVar = ("update",)

            def update(self, batch) -> None: ...


def test_a_bare_return_is_refused():
    with pytest.raises(TypeError, match="the return value has no annotation"):

        class Wrong(Engine):
            REMOTE: ClassVar = ("update",)

            def update(self): ...


def test_what_is_joined_needs_a_static_method_concat():
    with pytest.raises(TypeError, match=r"CONCAT needs a static method concat"):

        class Wrong(Ranked):
            REMOTE: ClassVar = ("rows",)
            CONCAT: ClassVar = ("rows",)

            def rows(self) -> list[int]: ...

    with pytest.raises(TypeError, match=r"CONCAT: 'rows' is not in REMOTE"):

        class Other(Ranked):
            CONCAT: ClassVar = ("rows",)


def test_an_inherited_method_counts():
    class Child(Dummy):
        REMOTE: ClassVar = ("count",)

    assert callable_methods(Child) == ("count",)


def test_ranked_engines_can_also_be_joined():
    assert callable_methods(Summing) == ("join", *Summing.REMOTE)
    assert "join" not in callable_methods(Dummy)
    assert issubclass(Summing, Ranked)


def test_a_spec_has_the_digest_of_class_and_payload():
    assert dummy("a") == dummy("a")
    assert dummy("a").digest != dummy("b").digest
    assert dummy("a").digest != EngineSpec.of("other:Dummy", Payload(tag="a")).digest


def test_the_flow_process_imports_no_engine_library():
    code = (
        "import sys, engines.workers.gang, engines.workers.placement; "
        "print(sorted({'torch', 'vllm', 'transformers', 'prefect'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout == "[]\n"


def test_a_pydantic_payload_and_a_dataclass_payload_both_have_digests():
    from configs.cluster.cluster import PoolConfig

    @dataclass(frozen=True)
    class Nested:
        pool: PoolConfig

    two, three = PoolConfig(workers=2), PoolConfig(workers=3)
    assert EngineSpec.of("m:C", two).digest != EngineSpec.of("m:C", three).digest
    assert EngineSpec.of("m:C", Nested(two)).digest != EngineSpec.of("m:C", Nested(three)).digest
