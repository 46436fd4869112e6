"""Evaluating versions of the past from a command line: words, checks, a Prefect server, the flow."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from configs.credentials import credential_sentence
from configs.evaluation import BackFillConfig
from configs.flows import command
from configs.overrides import ConfigError, change
from configs.process import close_folder, close_to_others
from configs.terminal_text import json_text, print_text
from tasks.commands.command import console, heading, table, text
from tasks.reporting.output import until_nobody_reads

if TYPE_CHECKING:
    from rich.console import RenderableType

    from storage.evaluations.results import EvaluationResult
    from tasks.evaluation.back_fill import BackFilled
    from tasks.evaluation.summary import Compared

FAILED, BAD_INPUT = 1, 2  # exit codes


@until_nobody_reads
def main(flow: str) -> int:
    """Evaluate as the command line says; returns the exit code. `flow`: package.module:function."""
    arguments = _parser().parse_intermixed_args()
    store = [word for word in arguments.words if word.startswith("store.")]
    settings = {
        "run": arguments.run,
        "suites": [name for words in arguments.suite for name in words.split(",")],
        "versions": arguments.versions,
        "against": arguments.against,
        "settings": [word for word in arguments.words if word not in store],
    }
    try:
        return _carry_out(change(BackFillConfig, settings, store), flow, arguments.json)
    except ConfigError as error:
        print_text(error, error=True)
        return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(
        prog="refrain evaluate",
        description="Evaluate policy versions of a run in the store by suites, with workers that "
        "sample and score alone. Results go to the store and to the run's page in MLflow; what is "
        "there is not asked again.",
    )
    words.add_argument("run", metavar="RUN", help="name of the run")
    words.add_argument(
        "words",
        nargs="*",
        metavar="key=value",
        help="store.…: where the run is; others: settings of the run that are others now, such as "
        "cluster.pools.rollout.workers=4 or evaluation.suites.gsm8k.rows=100",
    )
    words.add_argument(
        "--suite",
        action="append",
        default=[],
        metavar="NAME",
        help="a suite of the run, or one that comes with Refrain; may be given several times",
    )
    words.add_argument(
        "--versions", default="last", metavar="V", help="as 0,10,20-25; all; or last [last]"
    )
    words.add_argument(
        "--against", metavar="RUN2[@V]", help="a second run, compared prompt by prompt"
    )
    words.add_argument("--json", action="store_true", help="print one JSON object")
    return words


def _carry_out(config: BackFillConfig, flow: str, as_json: bool) -> int:
    """Check everything, then run the flow against a Prefect server."""
    import httpx
    from prefect.exceptions import CancelledRun, PrefectException

    from tasks.evaluation.back_fill import subjects_of
    from tasks.launch.command_line import HOME, quiet_libraries
    from tasks.launch.server import prefect_server
    from tasks.run.life_cycle import CANCELLED, INTERRUPTED
    from tasks.run.run_record import load_flow

    if fault := credential_sentence(config):  # Prefect would show it
        raise ConfigError(fault)
    quiet_libraries()
    close_to_others()
    close_folder(HOME)
    subjects_of(config)  # every fault is said before a server starts
    again = "To go on: " + command("flows.evaluate", config.store, *_words(config))
    try:
        with prefect_server(HOME / "prefect") as dashboard:
            place = dashboard.link if sys.stderr.isatty() else dashboard.asking
            print_text(f"Dashboard {place}", error=True)
            call: Callable[..., Any] = load_flow(flow)
            outcome: BackFilled = call(config)
    except KeyboardInterrupt:
        print_text(f"Stopped. {again}", error=True)
        return INTERRUPTED
    except CancelledRun:
        print_text(f"Stopped. {again}", error=True)
        return CANCELLED
    except (RuntimeError, OSError, PrefectException, httpx.HTTPError) as error:
        print_text(f"{type(error).__name__}: {error}\n{again}", error=True)
        return FAILED
    if as_json:
        print(json_text(record_of(outcome)))
        return 0
    out = console()
    for part in shown(outcome):
        out.print(part)
    return 0


def _words(config: BackFillConfig) -> list[str]:
    """The words by which the same is asked again."""
    suites = [word for name in config.suites for word in ("--suite", name)]
    against = [] if config.against is None else ["--against", config.against]
    return [config.run, *suites, "--versions", config.versions, *against, *config.settings]


def record_of(outcome: BackFilled) -> dict[str, object]:
    """For --json."""
    return {
        "run": outcome.run,
        "evaluations": [
            {
                "suite": suite,
                "version": version,
                "key": result.key,
                "digest": result.weights.digest,
                "was_there": result.made_at < outcome.began,
                "metrics": result.metrics,
            }
            for (suite, version), result in outcome.results.items()
        ],
        "against": outcome.against,
        "compared": [asdict(comparison) for comparison in outcome.compared],
    }


def shown(outcome: BackFilled) -> list[RenderableType]:
    """For people."""
    extra = list(
        dict.fromkeys(
            name
            for result in outcome.results.values()
            for name in result.metrics
            if name.startswith(("mean@", "pass@"))
        )
    )
    counts = ("prompts", "samples", "failed", "tokens")
    columns = ("suite", "version", "reward", "95 % interval", *extra, *counts)
    rows = table(*columns, "made", right=columns[1:])
    for (suite, version), result in outcome.results.items():
        rows.add_row(suite, str(version), *_cells(result, extra), _when(result, outcome.began))
    lines: list[RenderableType] = [heading(f"Evaluations of {outcome.run}"), rows]
    if outcome.against is not None:
        lines += [
            heading(f"{outcome.run} less {outcome.against}, prompt by prompt"),
            *compared_table(outcome.compared, outcome.against),
        ]
    return lines


def compared_table(compared: Sequence[Compared], against: str) -> list[RenderableType]:
    """Paired tests; `against`: name of the other run."""
    names = ("suite", "version", "against", "prompts", "difference", "95 % interval", "p")
    pairs = table(*names, right=names[1:])
    for comparison in compared:
        test = comparison.found
        pairs.add_row(
            comparison.suite, str(comparison.version), f"{against}@{comparison.against}",
            str(test.prompts),
            f"{test.difference:+.4f}", f"{test.low:+.4f} to {test.high:+.4f}",
            f"{test.p_value:.4f}",
        )  # fmt: skip
    note = "p: of the two-sided permutation test over the signs of prompts' differences."
    return [pairs, text(note)]


def _cells(result: EvaluationResult, extra: list[str]) -> list[str]:
    metrics = result.metrics
    if "reward" not in metrics:
        mean, interval = "none scored", ""
    else:
        mean = f"{metrics['reward']:.4f}"
        interval = f"{metrics['reward_low']:.4f} to {metrics['reward_high']:.4f}"
    rest = [f"{metrics[name]:.4f}" if name in metrics else "" for name in extra]
    left_out = sum(map(len, result.dropped.values()))
    prompts = f"{result.asked} of {result.asked + left_out}" if left_out else str(result.asked)
    counts = [prompts, *(f"{metrics[name]:.0f}" for name in ("samples", "failed"))]
    return [mean, interval, *rest, *counts, f"{metrics['tokens']:.0f}"]


def _when(result: EvaluationResult, began: float) -> str:
    return "before" if result.made_at < began else "now"
