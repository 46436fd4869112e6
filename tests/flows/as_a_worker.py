"""A flow run as a server's worker makes it: by its id, with settings alone.

python -m tests.flows.as_a_worker FLOW_RUN package.module:function
"""

from __future__ import annotations

import sys
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow

from tasks.run.run_record import load_flow


def main() -> None:
    identity, path = sys.argv[1:]
    flow = load_flow(path)
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(UUID(identity))
    run_flow(flow, flow_run=flow_run, parameters=flow.validate_parameters(flow_run.parameters))


if __name__ == "__main__":
    main()
