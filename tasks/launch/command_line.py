"""Starting a run from a command line: words to settings, checks, server and engines, the flow.

What --help and a refused setting need is imported first and nothing else: Prefect and Dask take
seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.base import Settings
from configs.flows import command, program, resume_command
from configs.form import no_form
from configs.grpo import GRPOConfig
from configs.help_topics import common_settings, help_on
from configs.imports import described
from configs.overrides import ConfigError, change, validate
from configs.process import begin_process, close_folder, close_to_others
from configs.recipe import DEMO, read_recipe, recipe_names
from configs.resolving import Resolved, resolve, this_machine
from configs.storage import StoreConfig
from configs.terminal_text import print_text
from engines.processes.process_setup import imports_uncollected
from tasks.reporting.output import until_nobody_reads

if TYPE_CHECKING:
    from tasks.reporting.terminal import Terminal
    from tasks.results import RunSummary
    from tasks.run.facts import OpenedRun
    from tasks.run.run import Run

HOME = Path(".refrain")
BAD_SETTINGS = 2  # exit codes
FAILED = 1


@until_nobody_reads
def main(flow: str, model: type[GRPOConfig], words: Sequence[str] = ()) -> int:
    """Run a flow from the command line's words; returns the exit code.

    Args:
        flow: Import path, package.module:function; imported once the words are found good.
        model: The class of its settings, the type of its parameter config.
        words: In place of those that the program was started with.
    """
    parser = _parser(flow, model)
    arguments = parser.parse_intermixed_args(list(words) or sys.argv[1:])
    if arguments.help is not None:
        return _help(parser, model, arguments.help)
    begin_process()  # flows of users begin here
    close_to_others()
    close_folder(HOME)
    try:
        config = _settings(flow, model, arguments)
        return _begin(flow, resolve(config, this_machine()), arguments)
    except ConfigError as error:
        print_text(error, error=True)
        return BAD_SETTINGS


def _help(parser: argparse.ArgumentParser, model: type[GRPOConfig], topic: str) -> int:
    try:
        if not topic:
            parser.epilog = common_settings(model, parser.prog)
        print_text(help_on(model, topic) if topic else parser.format_help().rstrip())
    except ConfigError as error:
        print_text(error, error=True)
        return BAD_SETTINGS
    return 0


def _begin(flow: str, resolved: Resolved[GRPOConfig], arguments: argparse.Namespace) -> int:
    """Check everything; then run the flow, unless only the checks were asked for."""
    from tasks.run.features import Finding
    from tasks.run.preflight import check_settings, check_world, models_tested, slow_here

    config, resume, fork = resolved.settings, arguments.resume, arguments.fork
    if arguments.name is not None:
        from tasks.run.opening import begun, finished

        if begun(config, arguments.name):
            resume, fork = arguments.name, None
            if sentence := finished(config, resume):
                print_text(sentence)
                return 0
    findings = [Finding(check="settings", found=str(decision)) for decision in resolved.decisions]
    with imports_uncollected(), _place_shown():
        findings += check_settings(config, resumed=resume is not None)
        with models_tested(config, resumed=resume is not None) as tested:
            with ThreadPoolExecutor(1) as beside:  # reward functions are loaded in other processes
                imported = beside.submit(_import_libraries)
                findings += check_world(config, resumed=resume is not None)
            imported.result()
            findings += tested()
    if resume is not None or fork is not None:
        findings += slow_here(config)
    from tasks.run.beginning import NothingNew
    from tasks.run.opening import open_run, told_kept

    try:
        opened = open_run(flow, config, resume, fork, arguments.name)
    except NothingNew as nothing:
        print_text(nothing)
        return 0
    except RuntimeError as error:  # of the store
        print_text(f"{type(error).__name__}: {error}", error=True)
        return FAILED
    if resume is not None:
        findings += told_kept(config, opened.config)
    if arguments.check:
        from tasks.launch.check_page import print_checks
        from tasks.launch.server import server_sentence

        print_checks(config, findings, server_sentence(HOME / "prefect"))
        print_text(f"{config.name}: the settings are good, and a run would start.")
        return 0
    for finding in findings:
        if finding.warning:
            print_text(finding.found, error=True)
    waits = arguments.name is not None and resume is not None
    if waits:
        from tasks.run.opening import wait_for_writer

        if sentence := wait_for_writer(opened.files):
            print_text(sentence)
    from tasks.run.run_record import load_flow

    with no_form():  # a flow has one for its deployments
        call = load_flow(flow)
    return _run(lambda run: call(config=config, resume=resume, fork=fork, run=run), opened, waits)


@contextlib.contextmanager
def _place_shown() -> Iterator[None]:
    """Where memory is too small, print what would be there, before it is said what to set."""
    from tasks.memory.check import DoesNotFit

    try:
        yield
    except ConfigError as error:
        if isinstance(error.__cause__, DoesNotFit):
            from tasks.launch.check_page import memory_table

            print_text("\n".join(memory_table(error.__cause__.place)), error=True)
        raise


def _run(call: Callable[[Run], Any], opened: OpenedRun, waits: bool) -> int:
    """Start engines and server side by side, run the flow, say where everything is.

    waits: for the end of another process that may have been killed.
    """
    import httpx
    from prefect.exceptions import PrefectException

    from tasks.launch.server import prefect_server
    from tasks.reporting.listeners import reporting_on
    from tasks.reporting.terminal import Terminal
    from tasks.run.life_cycle import started

    terminal, config, name = Terminal(), opened.config, opened.name
    again = resume_command(opened.flow, config.store, name)
    run: Run | None = None
    try:
        last_words = partial(_stopped, terminal, again)
        with started(opened, reporting_on(terminal), last_words, waits=waits) as run:
            most = f"{'' if config.same_sizes else 'up to '}{config.samples_per_step}"
            terminal.say(f"Run {name}: {config.steps} steps of {most} samples")
            if run.origin is not None:
                terminal.say(f"It begins after {run.origin}; {_data_of(run)}.")
            with prefect_server(HOME / "prefect") as dashboard:
                terminal.say(f"Dashboard {dashboard.asking}", shown=f"Dashboard {dashboard.link}")
                summary: RunSummary = call(run)
    except KeyboardInterrupt:
        return _stopped(terminal, again if run is not None else "")
    except (RuntimeError, OSError, PrefectException, httpx.HTTPError) as error:
        if run is not None and run.stopped:  # the error is a wait that was ended
            return _stopped(terminal, again, by_dashboard=run.cancelled_there.is_set())
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, httpx.HTTPError):
            what = f"The Prefect server does not answer ({what})."
        _failed(terminal, opened, what, again if run is not None else "")
        return FAILED
    except Exception as error:  # a mistake in a flow of the user's, or ours: the log has it whole
        if run is None:
            raise
        _failed(terminal, opened, described(error), again)
        return FAILED
    steps = f"{summary.steps} steps are committed."
    if summary.steps < summary.asked:
        steps = (
            f"{summary.steps} of {summary.asked} steps are committed; the data's epochs are over."
        )
    terminal.facts(
        f"{summary.run}: {steps}",
        {
            "checkpoint": summary.checkpoint,
            "curves": summary.plot,
            "MLflow": summary.tracking,
            "Prefect": f"{summary.dashboard}  (later: refrain dashboard)",
        },
    )
    return 0


def _failed(terminal: Terminal, opened: OpenedRun, what: str, again: str) -> None:
    """A run ended by an error; `again`: the command that goes on with it, if it had begun."""
    terminal.say(what, style="red")
    if again:
        store, name = opened.config.store, opened.name
        terminal.say(f"What it said, with tracebacks: {command('flows.logs', store, name)}")
        terminal.say(f"What was sampled: {command('flows.samples', store, name)}")
        terminal.say(f"To go on from the last step: {again}")


def _stopped(terminal: Terminal, again: str, by_dashboard: bool = False) -> int:
    """A person ended the run, which goes on by the command `again`; returns the exit code."""
    from tasks.run.life_cycle import CANCELLED, INTERRUPTED

    terminal.end_live()
    terminal.say("Stopped." + (again and f" To go on: {again}"), style="yellow")
    return CANCELLED if by_dashboard else INTERRUPTED


def _data_of(run: Run) -> str:
    """Which rows a run that begins after another one draws first."""
    if run.cursor.fresh:
        return f"{run.cursor.fresh} rows not seen before come first"
    assert run.origin is not None
    return "its data go on" if run.origin.cursor else "with other data, from their start"


def _import_libraries() -> None:
    """Import what a run needs in this process; a second of CPU."""
    quiet_libraries()
    for module in ("tasks.train", "tasks.launch.server"):
        importlib.import_module(module)


def quiet_libraries() -> None:
    """Keep warnings of Prefect and others off the terminal; Prefect's server still gets its logs."""
    from prefect.logging.configuration import setup_logging

    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    logging.raiseExceptions = False  # that a log cannot be sent is no news for the terminal
    setup_logging()  # Prefect read the environment when it was imported
    for name in ("distributed", "alembic", "mlflow", "httpx", "fsspec", "botocore"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # While a killed server starts again, events on their way to it are lost, with a page of text.
    logging.getLogger("prefect._internal").setLevel(logging.CRITICAL)


def _settings(flow: str, model: type[GRPOConfig], arguments: argparse.Namespace) -> GRPOConfig:
    """The recipe of the words; for a resumed run without one, the settings that it began with.

    What neither these nor the words set is still open.
    """
    words = list(arguments.words)
    recipe = words.pop(0) if words and "=" not in words[0] else None
    if arguments.resume is not None and arguments.fork is not None:
        raise ConfigError(
            "--resume goes on with a run and --fork begins a new one. Give one of them."
        )
    if arguments.resume is not None and arguments.name is not None:
        raise ConfigError(
            "--resume names a run that there is, and --name one that may begin. Give one of them."
        )
    earlier = arguments.resume or (arguments.fork or "").partition("@")[0]
    if not earlier or recipe is not None:
        return read_recipe(model, recipe or DEMO, words)
    from storage.objects.store import Store
    from storage.runs.run_store import RUN_NAME, RunStore
    from tasks.run.run_record import check_same_flow, stored_settings

    if not RUN_NAME.fullmatch(earlier):
        option = "--resume" if arguments.resume is not None else "--fork"
        raise ConfigError(f"{option} {earlier}: no run has such a name. refrain runs lists them.")
    store_words = [word for word in words if word.startswith("store.")]
    where = change(_Stored, {}, store_words).store
    files = RunStore(Store(where.uri, where.options), earlier)
    check_same_flow(files, flow, where, arguments.fork)
    settings = stored_settings(files)
    if (
        arguments.resume
    ):  # complete, also where an older Refrain stored less: nothing is decided anew
        settings = validate(model, settings).model_dump(mode="json")
    return change(model, settings, words)


class _Stored(Settings):
    """Where the run to be resumed is."""

    store: StoreConfig = StoreConfig()


def _parser(flow: str, model: type[GRPOConfig]) -> argparse.ArgumentParser:
    name = program(flow.partition(":")[0])
    demo = (
        "" if name.startswith("refrain ") else f"; without one, {DEMO}"
    )  # of a flow of the user's
    parser = argparse.ArgumentParser(
        prog=name,
        usage="%(prog)s [RECIPE] [key=value …] [--resume RUN | --fork RUN@STEP] [--name RUN] "
        "[--check] [--help [GROUP | SETTING | all]]",
        description="Post-train a language model by reinforcement learning, as a Prefect flow.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        metavar="GROUP",
        help="this text; of a group, a setting, or all, what they are",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RECIPE key=value",
        help=f"a recipe ({', '.join(recipe_names())}; or a YAML file), then settings that change "
        f"it{demo}",
    )
    parser.add_argument("--resume", metavar="RUN", help="go on with a run from its last commit")
    parser.add_argument(
        "--fork",
        metavar="RUN@STEP",
        help="begin a new run at a committed step of another one, whose settings it takes over "
        "with those changes that are given",
    )
    parser.add_argument(
        "--name",
        metavar="RUN",
        help="begin the run under this name; where the store has one of it, go on with that from "
        "its last commit, or do nothing if it is finished. The same command starts a run again",
    )
    parser.add_argument("--check", action="store_true", help="check everything, start nothing")
    return parser
