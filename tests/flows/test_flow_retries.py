"""Prefect's own retries of a flow, on a command line: the run goes on from its last commit."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.flows.conftest import Launch

FLOWS = [Path(__file__).with_name(name) for name in ("my_flows.py", "my_retried_flow.py")]


@pytest.mark.slow
@pytest.mark.cluster
def test_a_flow_that_prefect_tries_again_goes_on_with_its_run(
    launch: Launch, tmp_path: Path
) -> None:
    for path in FLOWS:
        shutil.copy(path, tmp_path)
    run = launch("tiny", "steps=4", module="my_retried_flow")
    code, out = run.end()
    assert code == 0, out
    assert re.findall(r"^step (\d)/4", out, re.MULTILINE) == ["1", "2", "3", "4"]
    assert len(run.commits()) == 4  # of the only run in the store
    assert run.children() == []
