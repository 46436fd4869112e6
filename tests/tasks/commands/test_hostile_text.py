"""Text of models, environments, data, user code and other machines moves no terminal."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.terminal_text import json_text, print_text, terminal_text, without_colours
from engines.processes.node import _pass_on
from storage.objects.store import Store
from storage.runs.live import Live, write_live
from storage.runs.run_store import RunStore
from tasks.commands import command
from tasks.commands.command import Answer, Request, heading, table, text
from tasks.reporting.terminal import SafeConsole, Terminal
from tasks.run.run_log import LINES, kept

ROOT = Path(__file__).parents[3]
HOSTILE = {
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "clear screen": "\x1b[2J\x1b[H",
    "title": "\x1b]0;root@host\x1b\\",
    "link": "\x1b]8;;https://evil.example\x1b\\refrain\x1b]8;;\x1b\\",
    "markup": "[link=https://evil.example]docs[/link] [red]x[/red] [/] :smile:",
    "C1": "\x9b2J\x9d52;c;AA==\x9c",
    "overwritten": "loss nan\rloss 0.1\x08\x08",
    "reordered": "\u202egnp.exe\u2066",
    "line end unseen": "a\u2028b",
    "half a pair": "\ud83d",
    "answerback": "\x05\x1bZ\x1b[6n",
    "tags": "\U000e0041",
    "delete": "a\x7fb",
}
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
hostile = pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE.keys())


def harmless(out: str) -> bool:
    """Whether nothing in it is obeyed; our own bold and colours are left out."""
    return not OBEYED.search(without_colours(out)) and "\x1b]8" not in out


def test_what_people_write_stays_as_it_is() -> None:
    said = "tab\t, lines\n, é, 中文, עברית, 👩\u200d💻, \xa0, [brackets]"
    assert terminal_text(said) == said
    assert terminal_text("\x1b[2J\u202e\U000e0041\ud83d") == r"\x1b[2J\u202e\U000e0041\ud83d"


@hostile
def test_every_command_prints_it_written_out(
    said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path)

    def work(request: Request) -> Answer:
        rows = table("name", said)
        rows.add_row(said, text(said, "dim"))
        rows.title = said
        return Answer(record={said: [said]}, shown=[heading(said), text(said), said, rows])

    words = ["run-1", f"store.uri=file://{tmp_path}/store"]
    assert command.run(command.parser("audit", "."), work, words) == 0
    out = capsys.readouterr().out
    assert harmless(out), out
    shown = terminal_text(said).split("\n")[0]
    assert out.count(shown) >= 3, "it is there, and readable"
    assert command.run(command.parser("audit", "."), work, [*words, "--json"]) == 0
    out = capsys.readouterr().out
    assert harmless(out), out
    assert json.loads(out) == {said: [said]}

    def fail(request: Request) -> Answer:
        raise ValueError(f"The reward function failed: {said}")

    assert command.run(command.parser("audit", "."), fail, words) == command.BAD_INPUT
    assert harmless(capsys.readouterr().err)


@hostile
def test_logs_of_tasks_and_workers_show_it_written_out(
    said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    write_live(
        run,
        Live.model_validate(
            {
                "scheduler": "tcp://h:1",
                "prefect": None,
                "flow_run": None,
                "epoch": 1,
                "host": os.uname().nodename,
                "logs": str(tmp_path),
            }
        ),
    )
    (tmp_path / "workers.log").write_text(f"\x1b[32mgreen\x1b[0m {said}\n", errors="ignore")
    from tasks.commands.logs import answer

    words = command.parser("logs", ".")
    words.set_defaults(workers=True, worker=None, lines=0, follow=False)
    given = ["run-1", f"store.uri=file://{tmp_path}/store"]
    assert command.run(words, answer, given) == 0
    out = capsys.readouterr().out
    assert harmless(out), out
    assert out.startswith("green "), "colours of libraries are left out"


def test_a_running_flow_and_its_files_obey_nothing(tmp_path: Path) -> None:
    console = SafeConsole()
    console.file = out = io.StringIO()
    with kept(tmp_path):
        for said in HOSTILE.values():
            Terminal(console).say(said, style="red")
        logging.getLogger(LINES.name).error("failed: %s", HOSTILE["clipboard"])
    assert harmless(out.getvalue())
    assert r"\x1b]52;c;" in out.getvalue()
    log = (tmp_path / "flow.log").read_text()
    assert harmless(log)
    assert r"\x1b]52;c;" in log


def test_what_workers_print_goes_to_terminal_and_file_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for output in (None, tmp_path / "logs" / "workers.log"):
        reading, writing = os.pipe()
        seen, terminal = os.pipe()
        monkeypatch.setattr("engines.processes.node.STDERR", terminal)
        split = "é".encode()
        for part in (*(said.encode("utf-8", "ignore") for said in HOSTILE.values()), split[:1]):
            os.write(writing, part)
        os.write(writing, split[1:] + b"\xff\n")
        os.close(writing)
        _pass_on(os.fdopen(reading, "rb"), output)
        os.close(terminal)
        told = os.fdopen(seen, "rb").read().decode()
        assert harmless(told)
        assert "é\ufffd" in told
        if output is not None:
            assert output.read_text() == told


def test_a_traceback_that_ends_a_program_obeys_nothing() -> None:
    program = (
        "from configs.process import tell_errors_safely as t; t(); raise OSError('\\x1b[2J\\x9b')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert harmless(ended.stderr)
    assert r"OSError: \x1b[2J\x9b" in ended.stderr


def test_lines_of_programs_too(capsys: pytest.CaptureFixture[str]) -> None:
    for said in HOSTILE.values():
        print_text(said)
        print_text(OSError(said), error=True)
        print(json_text({"said": said}))
    captured = capsys.readouterr()
    assert harmless(captured.out)
    assert harmless(captured.err)


def test_text_leaves_by_these_ways_alone() -> None:
    ways = []
    for folder in ("flows", "tasks"):
        for path in sorted(ROOT.joinpath(folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                name = ast.unparse(node.func)
                escaped = [ast.unparse(one).startswith("json_text(") for one in node.args] == [True]
                if (name == "print" and not escaped) or name in (
                    "Console",
                    "sys.stdout.write",
                    "sys.stderr.write",
                    "Text.from_markup",
                    "rich.print",
                ):
                    ways.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert ways == [], "print by configs.terminal_text.print_text, or by a SafeConsole"


def run_of(folder: Path) -> RunStore:
    run = RunStore(Store(f"file://{folder}/store"), "run-1")
    run.write_run({"config": {}})
    return run
