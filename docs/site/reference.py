"""The pages of docs/reference/, made from the code: settings, metrics, columns, commands and more."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, zip_longest
from unittest import mock

from configs.settings_help import fields
from engines.environments import agent_api, agent_protocols
from flows.__main__ import commands as names_of_commands
from flows.__main__ import trains
from flows.recipe import FIRST, flows, settings_of
from storage.batches.columns import COLUMNS, EXTRA, SCORE
from storage.tracking.metric_meanings import MEANINGS

Setting = tuple[str, str, str, str]  # name, type, default, meaning
MOST_ROWS = 30  # of a group that is one table

# Settings that no flow that trains has, by where they are written: module and class.
OF_COMMANDS = {
    "refrain evaluate": ("configs.evaluation", "BackFillConfig"),
    "refrain serve": ("configs.serve", "ServeConfig"),
    "refrain teacher serve": ("configs.teachers", "TeacherServiceConfig"),
    "refrain prune": ("configs.pruning", "PruneConfig"),
    "deployment.yaml": ("configs.deployments", "DeploymentFile"),
}

ABOUT_SETTINGS = f"""\
What a recipe, or `key=value`, may say of `refrain {FIRST}` and of the other flows that train; after
it what each of these has besides. In a terminal: `refrain {FIRST} --help GROUP`, `--help SETTING`,
`--help all`. Capitals stand for a name of yours, 0 for a number in a list.
[Algorithms](../algorithms.md) has the equations."""

ABOUT_METRICS = """\
What a commit has of its step, what MLflow shows, and what guards may watch. Capitals stand for a
name: of a reward function, a pool, a stage. Reward functions log metrics of their own under the
names that they give. [Prometheus's](../monitoring.md) have other names."""

ABOUT_COLUMNS = """\
N rows. A dense column has one value or array a row, a jagged one a list of any length (tokens,
turns), str and json a text. Types are those of safetensors."""

AGENT_API = """\
# The API that agents ask

An agent's function gets `base_url`, `http://127.0.0.1:PORT/v1`, and `api_key`, which is its episode's
alone (`Authorization: Bearer`). The model is called `{model}`; any name is taken. Each request is a
turn and has to continue the one before. [Agents](../episodes.md) says how to write one.

| route | asks | answers |
| --- | --- | --- |
| `GET /v1/models`, `GET /v1/models/{model}` | nothing, without a key | the one model |
| `POST {chat}` | `messages`, `tools`; `logprobs`, `return_token_ids`, `stream` | a chat completion; \
`finish_reason` is `tool_calls`, `length` or `stop` |
| `POST {responses}` | `input`, `instructions`, `tools`, `previous_response_id`; `stream` \
| a response, or its events |
| `POST {messages}` | `messages`, `system`, `tools`; `stream`; the key as `x-api-key` too \
| a message, or its events |
| `POST {completions}` | `prompt`, a list of token ids; `logprobs`, `stream` | a text completion \
with `token_ids` and `prompt_token_ids` |
| `POST {tokenize}` | `messages`, `tools`; or `prompt`; `return_token_strs` | `tokens`, `count` and \
`max_model_len`, as vLLM's server |
| `POST {detokenize}` | `tokens` | `prompt` |
| `POST {count}` | `messages`, `system`, `tools` | `input_tokens` |
| `POST {generate}` | `token_ids`; no `stream` | `token_ids`, `prompt_token_ids` and `logprobs`, as \
vLLM's server |

Temperature and limits of tokens are the recipe's, whatever a request asks. A stream begins once the
turn is whole. Log-probs are those of sampling, each token as `token_id:NUMBER`.
[By field](../agent-protocols.md).

| status | when |
| --- | --- |
| 400 | the request cannot be answered, or the episode is at a limit (`context_length_exceeded`) |
| 401 | the key is of no episode |
| 403 | the episode is over |
| 404 | there is no such route |
| 411, 413 | no `Content-Length`, or a body of more than {mebibytes} MiB |

A connection that has shown no key has {seconds:g} s for a request, and {strangers} of these are
served at once.
"""


def pages() -> dict[str, str]:
    """Markdown by file name."""
    return {
        "settings.md": settings(),
        "commands.md": commands(),
        "metrics.md": metrics(),
        "columns.md": columns(),
        "agent-api.md": agent_routes(),
    }


def settings() -> str:
    """Every setting of every flow that trains, by group, and of commands that have their own."""
    shared = list(fields(settings_of(FIRST)))
    text = ["# Settings", ABOUT_SETTINGS, *_groups(shared)]
    for flow in flows():
        if own := [one for one in fields(settings_of(flow)) if one not in shared]:
            text += [f"## Besides: refrain {flow}", _settings_table(own)]
    for name, (module, model) in OF_COMMANDS.items():
        if find_spec(module):  # of a feature that was taken out there is none
            found = fields(getattr(import_module(module), model))
            text += [f"## Of {name}", _settings_table(found)]
    return _joined(text)


def commands() -> str:
    """Every command with its words and options."""
    text = ["# Commands", "`refrain NAME` is also `python -m flows.NAME`."]
    found = sorted(names_of_commands().items(), key=lambda one: not trains(one[0]))
    for name, about in found:
        parser = parser_of(name)
        more = (parser.description or "").partition("\n")[2].strip()
        shown = [f"```text\n{more}\n```"] if more else []
        text += [f"## refrain {name}", _plain(about), *_options(parser), *shown]
    return _joined(text)


def metrics() -> str:
    """Every metric with its meaning, by the part before the slash."""
    text = ["# Metrics", ABOUT_METRICS]
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, meaning in MEANINGS.items():
        groups.setdefault(name.partition("/")[0], []).append((f"`{name}`", _plain(meaning)))
    for group, rows in groups.items():
        text += [f"## {group}", _table(("metric", "is"), rows)]
    return _joined(text)


def columns() -> str:
    """Every column of stored batches."""
    rows = [
        (f"`{name}`", one.kind, " or ".join(filter(None, (one.dtype, one.wide))), one.meaning)
        for name, one in COLUMNS.items()
    ]
    rows += [
        (f"`{SCORE}FUNCTION`", "dense", "F32", "what a reward function gave, [N]; NaN: nothing"),
        (f"`{EXTRA}FUNCTION/COLUMN`", "json", "U8", "what it gave to log_extra; null: nothing"),
    ]
    table = _table(
        ("column", "kind", "type", "holds"),
        ((name, kind, dtype, _plain(meaning)) for name, kind, dtype, meaning in rows),
    )
    return _joined(["# Columns of stored batches", ABOUT_COLUMNS, table])


def agent_routes() -> str:
    """What the server that agents ask answers."""
    return AGENT_API.format(
        model=agent_protocols.MODEL,
        chat=agent_protocols.CHAT,
        responses=agent_protocols.RESPONSES,
        messages=agent_protocols.MESSAGES,
        completions=agent_protocols.COMPLETIONS,
        generate=agent_protocols.GENERATE,
        tokenize=agent_protocols.TOKENIZE,
        detokenize=agent_protocols.DETOKENIZE,
        count=agent_protocols.COUNT,
        mebibytes=agent_api.MOST_BODY // 2**20,
        seconds=agent_api.STRANGER_SECONDS,
        strangers=agent_api.STRANGERS,
    )


class _Found(BaseException):
    """Stops a command where it would read its words."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """What a command reads its words with: it is started, and stopped there."""

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Found(parser)

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(argparse.ArgumentParser, "parse_intermixed_args", stop),
        mock.patch.object(sys, "argv", ["refrain"]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # runpy's, of modules that were imported before
        try:
            runpy.run_module(f"flows.{command}", run_name="__main__", alter_sys=True)
        except _Found as found:
            return found.parser
    raise AssertionError(f"refrain {command} reads no words")


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Those of a parser, by name."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:  # argparse names no other way
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    yield f"```console\n{usage}\n```"
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        word = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        if action.option_strings:
            head = ", ".join(action.option_strings)
            word = f"{head} {word}" if action.nargs != 0 else head
        helped = parser._get_formatter()._expand_help(action) if action.help else ""
        rows.append((f"`{word}`", _plain(helped)))
    if rows:
        yield _table(("word", "is"), rows)
    for name, inner in subcommands(parser).items():
        yield f"### {parser.prog} {name}"
        yield from _options(inner)


def _groups(found: Iterable[Setting]) -> Iterator[str]:
    """A heading and a table for each group, and for each group in one."""
    for title, own in _sections(found, 1).items():
        yield f"## {title or 'Of the run'}"
        for inner, rows in _sections(own, 2).items():
            if inner and len(own) > MOST_ROWS:
                yield f"### {inner}"
            yield _settings_table(rows)


def _sections(found: Iterable[Setting], depth: int) -> dict[str, list[Setting]]:
    """The settings by the first parts of their names; under "" those that are in no group so deep."""
    known = list(found)
    groups: dict[str, list[Setting]] = {"": []}
    for one in known:
        group = ".".join(one[0].partition(" ")[0].split(".")[:depth])
        inside = any(other[0].startswith(f"{group}.") for other in known)
        groups.setdefault(group if inside else "", []).append(one)
    return {group: rows for group, rows in groups.items() if rows}


def _settings_table(found: Iterable[Setting]) -> str:
    return _table(("setting", "is"), ((f"`{name}`", _meaning(*rest)) for name, *rest in found))


def _meaning(kind: str, default: str, meaning: str) -> str:
    """What a setting is, its type, and its default."""
    shown = [f"*{_plain(kind)}*"] if kind else []
    value = default.replace("\n", "\\n").replace("`", "'")
    shown += [f"default `{value}`"] if value else []
    return " ".join(filter(None, (_plain(meaning), ", ".join(shown))))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _plain(text: str) -> str:
    """A text of the code as Markdown that shows it as it is; what stands in backquotes is code."""
    words = " ".join(text.split())
    parts = words.split("`") if words.count("`") % 2 == 0 else [words.replace("`", "'")]
    outside = (re.sub(r"([\\*_<>\[\]#])", r"\\\1", part) for part in parts[::2])
    inside = (f"`{part}`" for part in parts[1::2])
    return "".join(chain.from_iterable(zip_longest(outside, inside, fillvalue="")))


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"
