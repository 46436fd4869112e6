"""A teacher for several runs: hold its model, score their samples in turn, say how it stands.

refrain teacher serve model.path=… [key=value …]
refrain teacher status URL [--json]
refrain teacher settings

The key is in the environment variable REFRAIN_TEACHER_KEY, the same for the service and its runs; a
run names the service by teachers.NAME.service=URL.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from configs.overrides import ConfigError, change
from configs.resolving import resolve, this_machine
from configs.settings_help import fields
from configs.teachers import KEY_VARIABLE, TeacherServiceConfig
from configs.terminal_text import print_text
from tasks.reporting.output import until_nobody_reads

BAD_SETTINGS = 2


@until_nobody_reads
def main(words: Sequence[str] = ()) -> int:
    """Do what the words say; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="refrain teacher",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve until Ctrl-C or SIGTERM")
    serve.add_argument("words", nargs="*", metavar="key=value")
    look = commands.add_parser("status", help="what is taught, and what each run has had of it")
    look.add_argument("url", help="address of the service, http://HOST:PORT")
    look.add_argument("--key-variable", default=KEY_VARIABLE, metavar="NAME")
    look.add_argument("--json", action="store_true", help="print one JSON object")
    commands.add_parser("settings", help="every setting of serve")
    arguments = parser.parse_args(list(words) or sys.argv[1:])
    try:
        return {"serve": _serve, "status": _status, "settings": _settings}[arguments.command](
            arguments
        )
    except (ConfigError, ValueError) as error:
        print_text(error, error=True)
        return BAD_SETTINGS


def _serve(arguments: argparse.Namespace) -> int:
    config = resolve(change(TeacherServiceConfig, {}, arguments.words), this_machine()).settings
    from tasks.teachers.service import serve  # late: a wrong setting is said at once

    return serve(config)


def _status(arguments: argparse.Namespace) -> int:
    from tasks.teachers.status import show

    return show(arguments.url, arguments.key_variable, arguments.json)


def _settings(arguments: argparse.Namespace) -> int:
    for name, kind, default, meaning in fields(TeacherServiceConfig):
        print_text(f"{name}  {kind}  [{default}]\n    {meaning}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
