"""Starting a run from a command line: words to settings, checks, server and engines, the flow."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from prefect.logging.configuration import setup_logging

from configs import recipes
from configs.grpo import GRPOConfig
from configs.recipes import ConfigError
from configs.storage import StoreConfig

HOME = Path(".refrain")
BAD_SETTINGS = 2  # exit codes
FAILED = 1
INTERRUPTED = 130


def main(run_flow: Callable[..., Any], model: type[GRPOConfig], words: Sequence[str] = ()) -> int:
    """Run a flow from the command line's words; returns the exit code."""
    arguments = _parser(model).parse_args(list(words) or sys.argv[1:])
    quiet_libraries()
    from tasks.preflight import check  # late, so that --help answers at once

    try:
        config = _settings(model, arguments)
        check(config)
        if arguments.check:
            print(f"{config.name}: the settings are good, and a run would start.")
            return 0
        return _run(run_flow, config, arguments.resume)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_SETTINGS


def _run(run_flow: Callable[..., Any], config: GRPOConfig, resume: str | None) -> int:
    """Start engines and server side by side, run the flow, say where everything is."""
    from prefect.exceptions import CancelledRun

    from engines.failures import CallCancelled
    from tasks.continuing import NothingNew
    from tasks.run import prepared
    from tasks.server import prefect_server
    from tasks.terminal import Terminal

    terminal = Terminal()
    name = resume or ""
    try:
        with prepared(config, terminal, resume) as run:
            name = run.name
            terminal.say(f"Run {name}: {config.steps} steps of {config.samples_per_step} samples")
            with prefect_server(HOME / "prefect") as dashboard:
                terminal.say(f"Dashboard {dashboard}")
                summary = run_flow(config, resume)
    except (KeyboardInterrupt, CancelledRun, CallCancelled):
        terminal.say(f"Stopped. To go on: python -m flows.grpo --resume {name}", style="yellow")
        return INTERRUPTED
    except NothingNew as nothing:
        terminal.say(str(nothing))
        return 0
    except RuntimeError as error:
        terminal.say(f"{type(error).__name__}: {error}", style="red")
        terminal.say(f"To go on from the last step: python -m flows.grpo --resume {name}")
        return FAILED
    terminal.facts(
        f"{name}: {summary.steps} steps are committed.",
        {
            "checkpoint": summary.checkpoint,
            "curves": summary.plot,
            "MLflow": summary.tracking,
            "Prefect": f"{summary.dashboard}  (later: python -m flows.dashboard)",
        },
    )
    return 0


def quiet_libraries() -> None:
    """Keep warnings of Prefect and others off the terminal; Prefect's server still gets its logs."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    setup_logging()  # Prefect read the environment when it was imported
    for name in ("distributed", "alembic", "mlflow", "httpx", "fsspec", "botocore"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _settings(model: type[GRPOConfig], arguments: argparse.Namespace) -> GRPOConfig:
    """The recipe of the words; for a resumed run without one, the settings that it began with."""
    words = list(arguments.words)
    recipe = words.pop(0) if words and "=" not in words[0] else None
    if arguments.resume is None or recipe is not None:
        return recipes.load(model, recipe or recipes.DEMO, words)
    from storage.runs import RunStore
    from storage.store import Store

    uri = StoreConfig().uri
    for word in words:
        key, _, value = word.partition("=")
        uri = value if key == "store.uri" else uri
    written = RunStore(Store(uri), arguments.resume).read_run()
    if written is None:
        raise ConfigError(
            f"There is no run {arguments.resume} in {uri}. Give --resume the name of a run of that "
            "store, or add store.uri=… of another."
        )
    return recipes.change(model, cast(dict[str, Any], written["config"]), words)


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
