"""A Prefect server that is too busy to answer in time is asked again."""

from __future__ import annotations

from unittest.mock import Mock

import httpx
import pytest

from tasks.launch.registration import ATTEMPTS, NotDeployed, patiently


def test_a_server_that_answers_late_is_asked_again() -> None:
    late = httpx.ReadTimeout("no answer")
    register = Mock(side_effect=[late] * (ATTEMPTS - 1) + [["refrain"]])
    assert patiently(register) == ["refrain"]


def test_one_that_never_does_is_named() -> None:
    register = Mock(side_effect=httpx.ReadTimeout("no answer"))
    with pytest.raises(
        NotDeployed, match=r"did not answer 3 times \(ReadTimeout.*PREFECT_API_REQUEST_TIMEOUT"
    ):
        patiently(register)
    assert register.call_count == ATTEMPTS


def test_what_the_server_refuses_is_not_asked_again() -> None:
    register = Mock(side_effect=NotDeployed("no such block"))
    with pytest.raises(NotDeployed, match="no such block"):
        patiently(register)
    assert register.call_count == 1
