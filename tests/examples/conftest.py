"""Runs of the documented commands, in a folder with copies of the example files."""

from __future__ import annotations

from tests.flows.conftest import launch, prefect_api

__all__ = ["launch", "prefect_api"]  # fixtures
