"""Register the deployments of infra/prefect.yaml on the server that PREFECT_API_URL names.

    refrain deploy [NAME …] [key=value …] [--file deployment.yaml] [--notify TYPE/BLOCK]
    refrain deploy --flow package.module:function --recipe RECIPE [key=value …]

With them come their work pool and the automations of infra/automations.yaml. Doing it again brings
them up to date. Runs will work in the folder that this is called in. Settings are of all of them, as
tracking.uri=http://… of a team, or of the one that is named, as in refrain deploy prune days=7.
Where the folder has a deployment.yaml, or --file names one, its deployments are registered instead,
with its settings, schedules, tags and limits. The second form registers one deployment, of a flow of
your own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from configs.deployments import DEFAULT_FILE, DeploymentFile, read_deployments
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
        help="deployments; without: all. And settings key=value of them",
    )
    parser.add_argument(
        "--file", metavar="YAML", help=f"a team's deployments [{DEFAULT_FILE}, if it is there]"
    )
    parser.add_argument(
        "--flow", metavar="FLOW", help="package.module:function; or grpo, ppo, dapo"
    )
    parser.add_argument("--recipe", default=DEMO, help=f"settings of --flow [{DEMO}]")
    parser.add_argument(
        "--notify", metavar="TYPE/BLOCK", help="notification block that the automations use"
    )
    arguments = parser.parse_intermixed_args()
    words = [word for word in arguments.names if "=" in word]
    names = [word for word in arguments.names if word not in words]
    from prefect.client.orchestration import get_client  # late, so that --help answers at once
    from prefect.settings import PREFECT_API_URL

    from tasks.launch import registration
    from tasks.launch.registration import deployments
    from tasks.launch.server import ServerError

    try:
        declared, work_pools = None, [registration.POOL]
        if arguments.flow is None:
            team = _team(arguments.file)
            declared = deployments(registration.PREFECT_FILE, names, words, team)
            work_pools = declared.pools
        elif arguments.file is not None:
            raise ConfigError("--file and --flow exclude each other: name the flow in the file.")
        api = registration.check_server(PREFECT_API_URL.value())
        with get_client(sync_client=True) as client:
            pools = registration.patiently(lambda: registration.ensure_pools(client, work_pools))
        if declared is None:
            name = registration.register_flow(arguments.flow, arguments.recipe, arguments.names)
            print_text(f"Deployment   {name}")
        else:
            registration.register_deployments(declared)
            print_text(f"Registered   {', '.join(declared.names)}")
            for sentence in declared.warnings():
                print_text(f"Warning      {sentence}")
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


def _team(file: str | None) -> DeploymentFile | None:
    """The team's file: the one that is named, or the working folder's; None where it has none."""
    path = Path(file or DEFAULT_FILE)
    if file is None and not path.exists():
        return None
    print_text(f"By           {path}")
    return read_deployments(path)


if __name__ == "__main__":
    sys.exit(main())
