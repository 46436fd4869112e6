"""Write a recipe with a comment on each setting, to begin one's own with; without a name, list them.

refrain recipe [NAME | FILE] [key=value …]

refrain recipe tiny steps=10 > mine.yaml
refrain grpo mine.yaml
"""

from __future__ import annotations

import argparse
import sys

from configs.commented_recipe import commented_recipe
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe_files import about_recipes
from configs.terminal_text import print_text
from flows.__main__ import commands, trains
from tasks.reporting.output import until_nobody_reads

BAD_SETTINGS = 2  # exit code
FIRST = "grpo"


def flows() -> list[str]:
    """Those that train, GRPO first: most recipes are its."""
    return sorted(filter(trains, commands()), key=lambda name: name != FIRST)


def settings_of(flow: str) -> type[GRPOConfig]:
    """The class of a flow's settings; of any but the first Prefect is imported."""
    if flow == FIRST:
        return GRPOConfig
    from tasks.run.run_record import load_flow, settings_class

    return settings_class(load_flow(flow))


@until_nobody_reads
def main() -> int:
    """Write it to standard output; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="refrain recipe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", metavar="NAME", help="a recipe, or a YAML file")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings that change it")
    arguments = parser.parse_args()
    try:
        if arguments.recipe is None:
            about = about_recipes()
            width = max(map(len, about))
            print_text("\n".join(f"{name:<{width}}  {what}" for name, what in about.items()))
        else:
            text = commented_recipe(arguments.recipe, arguments.words, flows(), settings_of)
            print_text(text.rstrip())
    except ConfigError as error:
        print_text(error, error=True)
        return BAD_SETTINGS
    return 0


if __name__ == "__main__":
    sys.exit(main())
