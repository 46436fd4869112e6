"""Serve a policy version over vLLM's OpenAI-compatible API, or whatever version an alias names.

refrain serve RUN[@VERSION]|models:/NAME@ALIAS [--follow] [key=value …]
"""

from __future__ import annotations

import argparse
import sys

from configs.overrides import ConfigError, change
from configs.serve import ServeConfig
from configs.settings_help import fields
from configs.terminal_text import print_text
from tasks.reporting.output import until_nobody_reads

BAD_SETTINGS = 2  # exit code


@until_nobody_reads
def main() -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code."""
    lines = [
        f"  {name}  [{default}]\n      {what}" for name, _, default, what in fields(ServeConfig)
    ]
    parser = argparse.ArgumentParser(
        prog="refrain serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["settings:", *lines]),
    )
    parser.add_argument("version", help="RUN@VERSION, RUN for its last, or models:/NAME@ALIAS")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings, as listed below")
    parser.add_argument(
        "--follow", action="store_true", help="serve another version when the alias, or RUN, moves"
    )
    arguments = parser.parse_intermixed_args()
    settings = {"version": arguments.version} | ({"follow": True} if arguments.follow else {})
    try:
        config = change(ServeConfig, settings, arguments.words)
        from tasks.launch.serving import serve  # late: a wrong setting is said at once

        return serve(config)
    except ConfigError as error:
        print_text(error, error=True)
        return BAD_SETTINGS


if __name__ == "__main__":
    sys.exit(main())
