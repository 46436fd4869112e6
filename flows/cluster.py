"""A whole run on Slurm: submit it, see where it stands, read its logs, stop it.

refrain cluster submit [--flow grpo|ppo|dapo|package.module:function] [RECIPE] [key=value …]
refrain cluster status [NAME]
refrain cluster logs NAME [WORKER]
refrain cluster stop NAME
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from configs.cluster import SlurmConfig
from configs.flows import program
from configs.overrides import ConfigError
from configs.recipe import DEMO, load_recipe
from configs.terminal_text import print_text, without_colours
from tasks.launch.submission import (
    BusySlurm,
    Submission,
    SubmissionStatus,
    Task,
    new_submission,
    submitted,
)
from tasks.reporting.output import until_nobody_reads

FOLDER = SlurmConfig().folder
FAILED = 1
BAD_SETTINGS = 2


@until_nobody_reads
def main(words: Sequence[str] = ()) -> int:
    """Do what the words say; returns the exit code."""
    arguments = _parser().parse_args(list(words) or sys.argv[1:])
    commands = {
        "submit": _submit,
        "status": _status,
        "logs": _logs,
        "stop": _stop,
        "work": lambda args: Submission(Path(args.name)).work(),
    }
    try:
        return commands[arguments.command](arguments)
    except (ConfigError, ValueError) as error:
        print_text(error, error=True)
        return BAD_SETTINGS
    except BusySlurm as error:
        print_text(f"Slurm's controller does not answer: {error}", error=True)
        return FAILED
    except KeyboardInterrupt:
        return 0


def _submit(arguments: argparse.Namespace) -> int:
    """Check the settings, then put the flow's job into the queue."""
    from tasks.run.preflight import check
    from tasks.run.run_record import load_flow, path_of, settings_class

    flow = load_flow(arguments.flow)
    words = list(arguments.words)
    recipe = words.pop(0) if words and "=" not in words[0] else DEMO
    config = load_recipe(settings_class(flow), recipe, words)
    module = path_of(flow).partition(":")[0]
    if config.cluster.kind != "slurm":
        raise ConfigError(
            f"cluster.kind = {config.cluster.kind}, but only runs on Slurm are submitted. Set "
            f"cluster.kind=slurm, or start the run by {program(module)}."
        )
    for finding in check(config):
        if finding.warning:
            print_text(finding.found, error=True)
    submission = new_submission(config, module, [recipe, *words])
    submission.submit()
    name = submission.name
    print_text(f"Submitted {name}: {config.steps} steps.")
    print_text(f"  state  refrain cluster status {name}")
    print_text(f"  log    refrain cluster logs {name}")
    print_text(f"  stop   refrain cluster stop {name}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    """One submission in full, or a line for each."""
    folder = Path(arguments.folder)
    if arguments.name is not None:
        print_text("\n".join(_described(Submission(folder / arguments.name).status())))
        return 0
    for path in submitted(folder):
        print_text(_described(Submission(path).status())[0])
    return 0


def _described(status: SubmissionStatus) -> list[str]:
    """A submission for a person: first a line, then its jobs."""
    state = "no job in the queue" if status.flow is None else _job(status.flow)
    if status.done:
        state = "finished"
    lines = [f"{status.name}: step {status.step}/{status.steps}, {state}"]
    if status.run is not None:
        lines.append(f"  run    {status.run}")
    for pool, tasks in sorted(status.pools.items()):
        states = Counter(task.state.lower() for task in tasks)
        lines.append(
            f"  {pool:<8} " + ", ".join(f"{n} {state_name}" for state_name, n in states.items())
        )
        lines += [f"    {_job(task)}" for task in tasks]
    return lines


def _job(task: Task) -> str:
    rest = "" if task.left is None else f", {task.left / 60:.0f} min left"
    return f"job {task.id} {task.state.lower()} ({task.reason.strip('()')}{rest})"


def _logs(arguments: argparse.Namespace) -> int:
    """The end of a log, and what is added to it if that is asked for."""
    path = Submission(Path(arguments.folder) / arguments.name).log(arguments.worker)
    text = path.read_text(errors="replace")
    print_text(without_colours("\n".join(text.splitlines()[-arguments.lines :])), flush=True)
    with path.open(errors="replace") as file:
        file.seek(0, 2)
        while arguments.follow:
            print_text(without_colours(file.read()), end="", flush=True)
            time.sleep(1.0)
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    """End flow and pools, and say what is left, if anything is."""
    submission = Submission(Path(arguments.folder) / arguments.name)
    jobs = submission.stop()
    if jobs:
        print_text(f"Jobs {', '.join(jobs)} are still ending; look again with squeue.", error=True)
        return FAILED
    again = submission.resume_command()
    print_text(
        f"Stopped {submission.name}; no job of it is left." + (again and f" To go on: {again}")
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="refrain cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    submit = commands.add_parser("submit", help="submit a run as jobs")
    submit.add_argument(
        "--flow",
        default="grpo",
        metavar="FLOW",
        help="what to run: grpo, ppo, dapo, or package.module:function of your own [grpo]",
    )
    submit.add_argument("words", nargs="*", metavar="RECIPE key=value")
    for command, about in (
        ("status", "where a run stands, or all of them"),
        ("logs", "what the flow or a worker printed"),
        ("stop", "end a run and all its jobs"),
    ):
        command_parser = commands.add_parser(command, help=about)
        command_parser.add_argument(
            "--folder", default=FOLDER, help=f"cluster.slurm.folder [{FOLDER}]"
        )
        command_parser.add_argument("name", nargs="?" if command == "status" else None)
        if command == "logs":
            command_parser.add_argument(
                "worker", nargs="?", help="such as rollout-0; none: the flow"
            )
            command_parser.add_argument("-n", "--lines", type=int, default=50)
            command_parser.add_argument("-f", "--follow", action="store_true")
    work = commands.add_parser("work")  # what the flow's job runs
    work.add_argument("name")
    return parser


if __name__ == "__main__":
    sys.exit(main())
