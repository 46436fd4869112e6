"""A server for the runs of the scripts."""

from __future__ import annotations

from tests.flows.conftest import prefect_api

__all__ = ["prefect_api"]  # a fixture
