"""What tests of flows start runs with."""

from tests.flows.conftest import launch, prefect_api

__all__ = ["launch", "prefect_api"]
