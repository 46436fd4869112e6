"""Starting a run from a command line: words to settings, checks, server and engines, the flow."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs import recipes
from configs.grpo import GRPOConfig
from configs.recipes import ConfigError

HOME = Path(".refrain")
BAD_SETTINGS = 2  # exit codes
FAILED = 1
INTERRUPTED = 130


def main(run_flow: Callable[..., Any], model: type[GRPOConfig], words: Sequence[str] = ()) -> int:
    """Run a flow from the command line's words; returns the exit code."""
    arguments = _parser(model).parse_args(list(words) or sys.argv[1:])
    try:
        config = _settings(model, arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_SETTINGS
    # Imported late: --help and a bad setting answer at once.
    quiet_libraries()
    from tasks.preflight import PreflightError, check
    from tasks.run import prepared
    from tasks.server import prefect_server
    from tasks.terminal import Terminal

    terminal = Terminal()
    try:
        check(config)
        if arguments.check:
            terminal.say(f"{config.name}: the settings are good, and a run would start.")
            return 0
        signal.signal(signal.SIGTERM, _terminate)
        with (
            prepared(config, terminal, resume=arguments.resume),
            prefect_server(HOME / "prefect") as dashboard,
        ):
            terminal.say(f"Prefect  {dashboard}", style="dim")
            summary = run_flow(config, arguments.resume)
    except (ConfigError, PreflightError) as error:
        print(error, file=sys.stderr)
        return BAD_SETTINGS
    except KeyboardInterrupt:
        terminal.say("Stopped. The run can go on: add --resume and its name.", style="yellow")
        return INTERRUPTED
    summary.show(terminal)
    return 0


def quiet_libraries() -> None:
    """Keep warnings of Prefect and others off the terminal; Prefect's server still gets its logs."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "ERROR")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    for name in ("distributed", "alembic", "mlflow", "httpx", "fsspec", "botocore"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _terminate(signum: int, frame: object) -> None:
    """SIGTERM ends a run as Ctrl-C does."""
    raise KeyboardInterrupt


def _settings(model: type[GRPOConfig], arguments: argparse.Namespace) -> GRPOConfig:
    words = list(arguments.words)
    recipe = recipes.DEMO if not words or "=" in words[0] else words.pop(0)
    return recipes.load(model, recipe, words)


def _parser(model: type[GRPOConfig]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.grpo",
        usage="%(prog)s [RECIPE] [key=value …] [--resume RUN] [--check]",
        description="Post-train a language model by reinforcement learning, as a Prefect flow.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=settings_help(model),
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RECIPE key=value",
        help=f"a recipe ({', '.join(recipes.names())}; or a YAML file), then settings that change "
        f"it. Without a recipe: {recipes.DEMO}",
    )
    parser.add_argument("--resume", metavar="RUN", help="go on with a run from its last commit")
    parser.add_argument("--check", action="store_true", help="check everything, start nothing")
    return parser


def settings_help(model: type[GRPOConfig]) -> str:
    """Every setting with its type, default and meaning, as text for a terminal."""
    lines = ["settings (name, type, default; then what it means):"]
    for name, kind, default, meaning in recipes.fields(model):
        head = "  ".join(part for part in (name, kind, f"[{default}]" if default else "") if part)
        lines.append(f"  {head}")
        lines += textwrap.wrap(meaning, 92, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
