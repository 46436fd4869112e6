"""Register the deployments of infra/prefect.yaml on the server that PREFECT_API_URL names.

    refrain deploy [NAME …] [--notify TYPE/BLOCK]
    refrain deploy --flow package.module:function --recipe RECIPE [key=value …]

With them come their work pool and the automations of infra/automations.yaml. Doing it again brings
them up to date. Runs will work in the folder that this is called in. The second form registers one
deployment, of a flow of your own.
"""

from __future__ import annotations

import argparse
import sys

from configs.overrides import ConfigError
from configs.recipe import DEMO
from configs.terminal_text import print_text
from tasks.reporting.output import until_nobody_reads


@until_nobody_reads
def main() -> int:
    """Register everything; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="refrain deploy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="deployments; without: all. With --flow: settings key=value",
    )
    parser.add_argument(
        "--flow", metavar="FLOW", help="package.module:function; or grpo, ppo, dapo"
    )
    parser.add_argument("--recipe", default=DEMO, help=f"settings of --flow [{DEMO}]")
    parser.add_argument(
        "--notify", metavar="TYPE/BLOCK", help="notification block that the automations use"
    )
    arguments = parser.parse_args()
    from prefect.client.orchestration import get_client  # late, so that --help answers at once
    from prefect.settings import PREFECT_API_URL

    from tasks.launch import registration
    from tasks.launch.server import ServerError

    try:
        api = registration.check_server(PREFECT_API_URL.value())
        with get_client(sync_client=True) as client:
            pools = registration.patiently(lambda: registration.ensure_pools(client))
        if arguments.flow is not None:
            name = registration.register_flow(arguments.flow, arguments.recipe, arguments.names)
            print_text(f"Deployment   {name}")
        else:
            registration.register_deployments(arguments.names)
        automations = registration.patiently(
            lambda: registration.register_automations(arguments.notify)
        )
    except (ServerError, ConfigError) as error:
        print_text(error, error=True)
        return 1
    print_text(f"Deployments  {api.removesuffix('/api')}/deployments")
    print_text(f"Automations  {', '.join(automations)}")
    for pool in pools:
        print_text(f"Start a worker:  prefect worker start --pool {pool} --type process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
