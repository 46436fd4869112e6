"""Runs of recipes, each in a folder of its own."""

from __future__ import annotations

from tests.flows.conftest import launch, prefect_api

__all__ = ["launch", "prefect_api"]  # fixtures
