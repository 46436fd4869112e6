"""What the commands that look at a stored run share: words, finding the run, output, exit codes.

A command is `refrain NAME RUN [store.uri=…] [--json]`. It exits with 0 when all is good, 1
when it found a difference or a problem, 2 for bad input, of which it says one sentence. Heavy
imports happen once the words are understood, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.environment import given
from configs.terminal_text import json_text, print_text, terminal_text
from tasks.reporting.output import until_nobody_reads

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from configs.storage import StoreConfig
    from storage.objects.store import Store
    from storage.runs.run_store import RunStore


GOOD, FOUND, BAD_INPUT = 0, 1, 2  # exit codes
WIDTH = 140  # columns of the output where it is no terminal


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a command found."""

    record: Any  # for --json
    shown: Sequence[RenderableType]  # for people, in order
    good: bool = True  # False: a difference or a problem was found


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a command was asked."""

    files: RunStore  # the run that was named; it is in the store
    store: StoreConfig
    cluster: Sequence[str]  # words cluster.…=…, for commands that start workers
    arguments: argparse.Namespace  # the command's own options


def parser(
    name: str,
    description: str,
    cluster: bool = False,
    after_run: tuple[str, str, str, Callable[[str], Any]] | None = None,
    at_step: bool = False,
    several: bool = False,
    of_store: bool = False,
    paged: bool = False,
) -> argparse.ArgumentParser:
    """The words that every such command takes; the command adds its own options.

    `cluster`: whether it starts workers. `after_run`: name, metavar, help and type of a word that
    follows the run's name. `at_step`: RUN@STEP names a step, which is then `arguments.step`.
    `several`: further runs may be named; they are then `arguments.others`. `of_store`: it looks at
    all runs of a store, none is named, and it is asked by a StoreRequest. `paged`: on a terminal its
    answer goes through a pager.
    """
    settings = "store.uri=… cluster.…=…" if cluster else "store.uri=…"
    parser = argparse.ArgumentParser(
        prog=f"refrain {name}",
        description=description,
        epilog="Exit code: 0 all is good, 1 a difference or a problem was found, 2 bad input.",
    )
    if at_step:
        parser.add_argument("run", metavar="RUN[@STEP]", help="name of the run [its last step]")
    elif not of_store:
        parser.add_argument("run", metavar="RUN", help="name of the run")
    if after_run is not None:
        word, metavar, meaning, kind = after_run
        parser.add_argument(word, metavar=metavar, help=meaning, type=kind)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN2 | key=value" if several else "key=value",
        help=f"settings of where it is: {settings} (default: the store that runs use)",
    )
    parser.set_defaults(starts_workers=cluster, at_step=at_step, step=None, several=several)
    parser.set_defaults(of_store=of_store, paged=paged)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


@dataclass(frozen=True, slots=True)
class Option:
    """A word of a command's own, as argparse takes it."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]

    def add_to(self, words: argparse._ActionsContainer) -> None:
        """Have it understood."""
        words.add_argument(*self.names, **self.settings)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Words of which one may be given."""

    options: tuple[Option, ...]
    required: bool

    def add_to(self, words: argparse._ActionsContainer) -> None:
        """Have them understood."""
        group = words.add_mutually_exclusive_group(required=self.required)
        for choice in self.options:
            choice.add_to(group)


def option(*names: str, **settings: Any) -> Option:
    """A command's own word; arguments as of argparse's add_argument."""
    return Option(names, settings)


def one_of(*options: Option, required: bool = False) -> OneOf:
    """A choice among words; `required`: one has to be given."""
    return OneOf(options, required)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRequest:
    """What a command was asked that looks at all runs of a store."""

    store: StoreConfig
    arguments: argparse.Namespace  # the command's own options


class Command:
    """The main function of a command that looks at a stored run."""

    def __init__(
        self, name: str, description: str, answer: str, *options: Option | OneOf, **frame: Any
    ) -> None:
        """
        Args:
            name: of the command.
            description: for --help.
            answer: module:function that answers a Request; imported once the words are understood.
            options: the command's own words.
            frame: what else it takes, as `parser` has it.
        """
        self.name, self.description, self.answer = name, description, answer
        self._options, self._frame = options, frame

    def __call__(self) -> int:
        """Carry it out by the words of the command line; returns the exit code."""
        words = parser(self.name, self.description, **self._frame)
        for choice in self._options:
            choice.add_to(words)
        return run(words, lambda request: answering(self.answer)(request))


def answering(path: str) -> Callable[[Any], Answer]:
    """The function that a command's path names; it takes what the command was asked."""
    module, _, name = path.partition(":")
    function: Callable[[Any], Answer] = getattr(importlib.import_module(module), name)
    return function


def _request(arguments: argparse.Namespace) -> Request | StoreRequest:
    from storage.objects.store import Store

    if arguments.of_store:
        return StoreRequest(store=store_of(arguments.words), arguments=arguments)
    cluster = [word for word in arguments.words if word.startswith("cluster.")]
    if not arguments.starts_workers:
        cluster = []  # refused below, as settings that mean nothing here
    if arguments.at_step:
        arguments.run, arguments.step = split_step(arguments.run)
    if arguments.several:
        arguments.others = [word for word in arguments.words if "=" not in word]
        arguments.words = [word for word in arguments.words if "=" in word]
    store = store_of([word for word in arguments.words if word not in cluster])
    files = find_run(Store(store.uri, store.options), arguments.run)
    return Request(files=files, store=store, cluster=cluster, arguments=arguments)


@until_nobody_reads
def run(
    words_of: argparse.ArgumentParser,
    work: Callable[[Any], Answer],
    argv: Sequence[str] | None = None,
) -> int:
    """Carry out a command, whose work takes what it was asked; returns the exit code."""
    arguments = words_of.parse_intermixed_args(argv)
    from configs.overrides import ConfigError

    try:
        answer = work(_request(arguments))
    except (ConfigError, ValueError) as error:
        return _refuse(error, BAD_INPUT)
    except RuntimeError as error:  # of the store or of workers: named errors with a sentence
        return _refuse(error, FOUND)
    if arguments.json:
        print(json_text(answer.record, _plain))
    else:
        out = console()
        with paged(out) if arguments.paged else nullcontext():
            for part in answer.shown:
                out.print(part)
    return GOOD if answer.good else FOUND


def _refuse(error: Exception, code: int) -> int:
    print_text(" ".join(str(error).split()), error=True)
    return code


def _plain(value: Any) -> Any:
    """Values of NumPy and sets, which JSON does not know."""
    return sorted(value) if isinstance(value, (set, frozenset)) else value.item()


def split_step(name: str) -> tuple[str, int | None]:
    """Run and step of RUN@STEP; no step where it names none. ConfigError."""
    from configs.overrides import ConfigError

    run, at, step = name.partition("@")
    if not at:
        return run, None
    if not step.isdecimal():
        raise ConfigError(f"{name} names no step. Write RUN@STEP, such as {run}@3.")
    return run, int(step)


def store_of(words: Sequence[str]) -> StoreConfig:
    """The settings store.… of a command line; ConfigError for others."""
    from pydantic import Field

    from configs.base import Settings
    from configs.overrides import change
    from configs.storage import StoreConfig

    class Words(Settings):
        store: StoreConfig = Field(default_factory=StoreConfig)

    return change(Words, {}, words).store


def find_run(store: Store, name: str) -> RunStore:
    """The run of that name; ConfigError that names near ones when there is none."""
    import difflib

    from configs.overrides import ConfigError
    from storage.runs.run_store import RUN_NAME, RunStore

    if RUN_NAME.fullmatch(name) and store.exists(RunStore(store, name).run_json_key):
        return RunStore(store, name)
    names = [child for child in store.children() if RUN_NAME.fullmatch(child)]
    near = [candidate for candidate in names if candidate.startswith(name)]
    near = near or difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near[-3:])}?" if near else "It holds no run of a like name."
    raise ConfigError(f"There is no run {name} in {store.uri}. {hint}")


def console() -> Console:
    """Where answers for people go: as wide as the terminal, and wide enough for a file."""
    from tasks.reporting.terminal import SafeConsole

    out = SafeConsole()
    return out if out.is_terminal else SafeConsole(width=WIDTH)


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table in the style of all commands; `right`: columns of numbers."""
    from rich import box
    from rich.table import Table

    columns_table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        columns_table.add_column(
            column, justify="right" if column in right else "left", overflow="fold"
        )
    return columns_table


def heading(line: str) -> RenderableType:
    """What stands above a table."""
    return text(line, "bold")


def text(line: str, style: str = "") -> RenderableType:
    """A line as it is: brackets in it are no markup."""
    from rich.text import Text

    return Text(terminal_text(line), style=style)  # Text itself would drop some, unseen


@contextmanager
def paged(out: Console) -> Iterator[None]:
    """On a terminal, have what is printed go through $PAGER, or `less`; `PAGER=cat` is none.

    As with git, `less` ends by itself where all fits on the screen (F) and shows colours (R), unless
    LESS is set.
    """
    words = shlex.split(given(["PAGER"]).get("PAGER", "less")) if out.is_terminal else []
    if not words or words == ["cat"] or shutil.which(words[0]) is None:
        yield
        return
    with out.capture() as captured:
        yield
    settings = {"LESS": "FRX", **os.environ}
    reader = subprocess.Popen(words, stdin=subprocess.PIPE, env=settings)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pager's to understand
    try:
        with suppress(BrokenPipeError):  # it was left before its end
            reader.communicate(captured.get().encode())
        reader.wait()
    finally:
        signal.signal(signal.SIGINT, before)
