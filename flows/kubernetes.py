"""The manifests of a run on Kubernetes, for kubectl.

    refrain kubernetes render [RECIPE] [--values FILE] [--name RUN] [--flow FLOW] [key=value …]

They are printed: service accounts and what they may, network policies, the run's settings, and the
Job of its flow, which begins the run RUN or goes on with it:

    refrain kubernetes render gsm8k-multinode --values values.yaml --name sums-1 | kubectl apply -f -
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from configs.overrides import ConfigError
from configs.recipe import DEMO, read_recipe
from configs.terminal_text import print_text
from tasks.reporting.output import until_nobody_reads

BAD_SETTINGS = 2  # exit code


@until_nobody_reads
def main(words: Sequence[str] = ()) -> int:
    """Print them; returns the exit code."""
    arguments = _parser().parse_intermixed_args(list(words) or sys.argv[1:])
    from tasks.launch import kubernetes
    from tasks.run.opening import new_name
    from tasks.run.run_record import load_flow, path_of, settings_class

    try:
        flow = load_flow(arguments.flow)
        rest = list(arguments.words)
        recipe = rest.pop(0) if rest and "=" not in rest[0] else DEMO
        shared = kubernetes.words_of(arguments.values) if arguments.values else []
        config = read_recipe(settings_class(flow), recipe, [*shared, *rest])
        name = arguments.name or new_name(config.name).lower().replace("_", "-").replace(".", "-")
        manifests = kubernetes.render(config, path_of(flow).partition(":")[0], name)
    except ConfigError as error:
        print_text(error, error=True)
        return BAD_SETTINGS
    for file in kubernetes.local_files(config):
        print_text(f"{file} has to be in the image, under the same path.", error=True)
    print_text(kubernetes.as_yaml(manifests), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="refrain kubernetes",
        usage="%(prog)s render [RECIPE] [key=value …] [--values FILE] [--name RUN] [--flow FLOW]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["render"], help="what to do")
    parser.add_argument(
        "words", nargs="*", metavar="RECIPE key=value", help=f"a recipe [{DEMO}], then settings"
    )
    parser.add_argument(
        "--values",
        metavar="FILE",
        help="YAML of settings that a team's runs have in common; they go before the recipe's, and "
        "those on the command line before them",
    )
    parser.add_argument("--name", metavar="RUN", help="name of the run [family and time]")
    parser.add_argument(
        "--flow",
        default="grpo",
        metavar="FLOW",
        help="what to run: grpo, ppo, dapo, or package.module:function of your own [grpo]",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
