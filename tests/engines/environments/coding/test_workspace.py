"""Workspaces: a repository, a shell and files; tests that fail before a change and pass after the right one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from configs.rewards import ProcessSandbox
from engines.environments.coding.judging import Unusable
from engines.sandboxes.protocol import SandboxFailed
from storage.objects.documents import Row
from storage.prompts.coding.trees import File, keep
from tests.engines.environments.coding.conftest import SETTINGS, TASKS, Open


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if place < 1 else pytest.mark.slow)
        for place, name in enumerate(TASKS)
    ],
)
def test_the_solution_of_each_small_repository_passes(
    name: str, rows: dict[str, Row], opened: Open
) -> None:
    """And what is there does not: opening sees to that."""
    workspace = opened(rows[name])
    before = workspace.judge()
    assert before.reward == 0
    assert [before.outcomes[one] for one in rows[name]["pass_to_pass"]] == ["passed"] * len(  # type: ignore[union-attr, arg-type]
        rows[name]["pass_to_pass"]  # type: ignore[arg-type]
    )
    workspace.edit(*TASKS[name].fixed)
    assert workspace.judge().outcomes == dict.fromkeys(before.outcomes, "passed")
    assert workspace.reward() == 1


def test_files_stay_and_a_command_begins_in_the_repository(
    rows: dict[str, Row], opened: Open
) -> None:
    workspace = opened(rows["roman"])
    assert workspace.bash("ls") == "roman.py\ntests"
    assert workspace.bash("cd tests && echo new > made && cd /") == "The command printed nothing."
    assert workspace.bash("cat tests/made; pwd") == "new\n/tmp/work/repository"
    assert workspace.bash("ls nothing").endswith("No such file or directory\nExit status 2.")
    workspace.write("deep/in/it.txt", "text")
    assert workspace.bash("cat deep/in/it.txt") == workspace.read("deep/in/it.txt") == "text"
    assert workspace.bash("ls -l --time-style=full-iso roman.py").split()[5] == "2000-01-01"
    assert "test_roman" not in workspace.bash("find / -name '*roman*' 2>/dev/null; env; ps || true")


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "../../../etc/passwd", "gone/link/x"])
def test_files_elsewhere_are_refused(path: str, rows: dict[str, Row], opened: Open) -> None:
    workspace = opened(rows["roman"])
    workspace.bash("mkdir gone && ln -s / gone/link")
    with pytest.raises(ValueError):
        workspace.read(path)
    if not path.startswith("../out"):
        with pytest.raises(ValueError):
            workspace.write(path, "")


def test_a_command_is_stopped_and_the_next_one_runs(rows: dict[str, Row], opened: Open) -> None:
    limits = ProcessSandbox(memory_mib=128, disk_mib=8, processes=16, timeout=1.5)
    workspace = opened(rows["roman"], sandbox=limits)
    assert workspace.bash("echo a; sleep 60") == "a\nThe command was stopped after 1.5 s."
    hold = "python3 -c 'x = bytearray(90 << 20); input()'"
    assert "it used more than 128 MiB" in workspace.bash(f"sleep 1 | {hold} & sleep 1 | {hold}")
    assert "No space left" in workspace.bash("cat /dev/zero > big")
    workspace.bash("rm big; sleep 60 & echo 1")
    assert "sleep" not in workspace.bash("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "refused" in workspace.bash(
        "exec 3<>/dev/tcp/127.0.0.1/80"
    ) or "unreachable" in workspace.bash("exec 3<>/dev/tcp/10.0.0.1/80")


def test_long_output_is_cut_by_a_sentence(rows: dict[str, Row], opened: Open) -> None:
    workspace = opened(rows["roman"], output_characters=200)
    shown = workspace.bash("seq 1 1000")
    assert shown.startswith("1\n2\n") and shown.endswith("999\n1000")
    assert "characters were left out here.]" in shown and len(shown) < 260
    workspace.write("long.txt", "x" * 5000)
    assert "were left out here" in workspace.read("long.txt")


def test_what_is_another_thing_each_time_is_not_shown(rows: dict[str, Row], opened: Open) -> None:
    """So that an episode that is played again gets the same answers."""
    workspace = opened(rows["roman"])
    first = workspace.bash("python3 -m unittest tests/test_small.py; python3 -c 'print(object())'")
    assert "in 0.00s" in first and "at 0x0>" in first
    again = opened(rows["roman"])
    assert (
        again.bash("python3 -m unittest tests/test_small.py; python3 -c 'print(object())'") == first
    )


def test_an_edit_needs_one_place(rows: dict[str, Row], opened: Open) -> None:
    workspace = opened(rows["roman"])
    with pytest.raises(ValueError, match="stands 0 times in roman.py"):
        workspace.edit("roman.py", "nothing", "x")
    with pytest.raises(ValueError, match="stands [0-9]+ times"):
        workspace.edit("roman.py", '"),', "x")


def test_the_share_that_passes(rows: dict[str, Row], opened: Open) -> None:
    row = {**rows["roman"], "fail_to_pass": rows["roman"]["fail_to_pass"]}
    workspace = opened(row, score="share")
    workspace.edit(
        "roman.py",
        'text = ""',
        "text = 'CM' if number == 900 else ''; number %= 900 if number == 900 else 10000",
    )
    assert workspace.reward() == 0.5
    workspace.write("roman.py", "def to_roman(n): return {900: 'CM', 1999: 'MCMXCIX'}[n]")
    assert workspace.reward() == 0, "those that have to go on passing do not"


def test_a_command_may_be_a_test_and_a_set_up_comes_first(
    rows: dict[str, Row], opened: Open
) -> None:
    row = {
        **rows["roman"],
        "setup": "mkdir built && echo 7 > built/number && echo x > ~/outside",
        "fail_to_pass": ["grep CM roman.py | grep -v 900,"],
        "pass_to_pass": ["test -e ../outside && grep 7 built/number"],
    }
    with pytest.raises(Unusable, match="fail_to_pass passes before any change"):
        opened({**row, "fail_to_pass": ["true"]})
    with pytest.raises(Unusable, match="of pass_to_pass false does not pass before any change"):
        opened({**row, "pass_to_pass": ["false"]})
    with pytest.raises(Unusable, match="the set-up of the row fails: no"):
        opened({**row, "setup": "echo no; false"})
    workspace = opened(row)
    assert workspace.bash("cat built/number") == "7"
    workspace.write("roman.py", "# CM")
    assert workspace.reward() == 1
    workspace.bash("rm -r built")
    assert workspace.reward() == 0


def test_a_row_without_its_files_is_a_sentence(
    rows: dict[str, Row], opened: Open, cache: Path
) -> None:
    with pytest.raises(Unusable, match=r"tests of test_new\.py, and has no such file"):
        opened({**rows["roman"], "fail_to_pass": ["test_new.py::test_it"]})
    with pytest.raises(Unusable, match="Set data.source.kind = coding"):
        opened({"question": "1 + 1"})
    digest = keep({"a": File(b"lost")})
    place = cache / "refrain" / "trees" / f"{digest[7:]}.tar.gz"
    place.unlink()
    with pytest.raises(Unusable, match="cannot be read from"):
        opened({**rows["roman"], "repository": digest})
    keep({"b": File(b"other")})
    other = keep({"b": File(b"other")})
    place.write_bytes((place.parent / f"{other[7:]}.tar.gz").read_bytes())
    with pytest.raises(Unusable, match="holds other files than its name says"):
        opened({**rows["roman"], "repository": digest})
    place.unlink()


def test_a_sandbox_that_fails_is_no_reward(
    rows: dict[str, Row], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = opened(rows["roman"])
    workspace.edit(*TASKS["roman"].fixed)

    def lost(*arguments: object) -> None:
        raise SandboxFailed("no namespaces")

    monkeypatch.setattr("engines.environments.coding.judging.open_sandbox", lost)
    with pytest.raises(SandboxFailed):
        workspace.reward()
    workspace.close()
    with pytest.raises(SandboxFailed, match="has been closed"):
        workspace.bash("ls")


def test_nothing_is_left_behind(rows: dict[str, Row], opened: Open) -> None:
    before = set(os.listdir("/tmp"))
    workspace = opened(rows["roman"])
    workspace.bash("(sleep 987 &) ; touch /tmp/left")
    workspace.reward()
    workspace.close()
    time.sleep(0.1)
    commands = [
        Path("/proc", pid, "cmdline").read_bytes()
        for pid in os.listdir("/proc")
        if pid.isdigit() and Path("/proc", pid, "cmdline").exists()
    ]
    assert not [one for one in commands if b"987" in one]
    assert "left" not in set(os.listdir("/tmp")) - before


def test_the_tests_have_a_deadline(rows: dict[str, Row], opened: Open) -> None:
    workspace = opened(rows["roman"], test_timeout=4.0)
    workspace.write("roman.py", "while True: pass")
    judged = workspace.judge()
    assert judged.reward == 0
    assert set(judged.outcomes.values()) == {"not reached: timed out"}
    assert SETTINGS.answer_seconds == 130
