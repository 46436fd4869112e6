"""Task folders of Harbor and of Terminal-Bench: what they become, and which are left out, and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from configs.coding import CodingSource
from storage.objects.documents import Row
from storage.prompts.coding.rows import CodingRows
from storage.prompts.coding.trees import File, kept
from storage.prompts.datasets import open_source

PYTEST = "def test_it():\n    assert open('/app/hello.txt').read() == 'hi'\n"
STOCK = """#!/bin/bash
# Installs what runs the tests.
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh
source $HOME/.local/bin/env
if [ "$PWD" = "/" ]; then
  echo "no WORKDIR"
  exit 1
fi
uvx \\
  -p 3.13 \\
  -w pytest==8.4.1 \\
  -w pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
HARBOR = {
    "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 7.5\n[agent]\ntimeout_sec = 60\n',
    "instruction.md": "<!-- a canary line -->\nWrite hi into hello.txt.\n",
    "environment/Dockerfile": "FROM python:3.13-slim\nWORKDIR /app\nCOPY data/ ./data/\nENV KIND=word\nRUN mkdir -p out && echo a > out/b\n",
    "environment/data/in.txt": "in",
    "tests/test.sh": STOCK,
    "tests/test_outputs.py": PYTEST,
    "solution/solve.sh": "echo -n hi > hello.txt",
}
UV = """#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.7.13/install.sh | sh
source $HOME/.local/bin/env
uv init
uv add pytest==8.4.1
uv run pytest $TEST_DIR/test_outputs.py -rA
"""
BENCH = {
    "task.yaml": "instruction: |-\n  Write hi into hello.txt.\nparser_name: pytest\nmax_test_timeout_sec: 60\n",
    "Dockerfile": "FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04:latest\nRUN apt-get update && apt-get install -y tmux\nCOPY . .\n",
    "docker-compose.yaml": "services:\n  client:\n    build: .\n",
    "run-tests.sh": UV,
    "tests/test_outputs.py": PYTEST,
    "solution.sh": "echo -n hi > hello.txt",
    "in.txt": "in",
}
Files = Mapping[str, str | None]


def tasks(folder: Path, **tasks_of: Files) -> CodingRows:
    for name, files in tasks_of.items():
        for path, text in files.items():
            if text is not None:
                (folder / "tasks" / name / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / "tasks" / name / path).write_text(text)
    found = open_source(CodingSource(path=str(folder / "tasks")))
    assert isinstance(found, CodingRows)
    return found


def row(rows: CodingRows) -> Row:
    assert rows.left_out == {}
    return rows.rows([0])[0]


def test_a_task_of_harbor(tmp_path: Path) -> None:
    found = row(tasks(tmp_path, hello=HARBOR))
    assert kept(str(found.pop("repository"))) == {"data/in.txt": File(b"in")}  # type: ignore[attr-defined]
    assert sorted(kept(str(found.pop("tests")))) == ["test.sh", "test_outputs.py"]  # type: ignore[attr-defined]
    assert found == {
        "problem": "Write hi into hello.txt.",
        "fail_to_pass": ["/tests/test_outputs.py"],
        "pass_to_pass": [],
        "setup": "mkdir -p out && echo a > out/b",
        "test_timeout": 7.5,
        "layout": {
            "folder": "/app",
            "tests": "/tests",
            "reward": None,
            "variables": {"KIND": "word", "TEST_DIR": "/tests", "T_BENCH_TEST_DIR": "/tests"},
        },
        "task_folder": "hello",
    }


def test_a_script_that_writes_its_reward(tmp_path: Path) -> None:
    script = "[ -e hello.txt ] && echo 0.5 > /logs/verifier/reward.txt\n"
    found = row(tasks(tmp_path, hello={**HARBOR, "tests/test.sh": script}))
    assert found["fail_to_pass"] == ["bash /tests/test.sh"]
    assert found["layout"]["reward"] == "/logs/verifier/reward.txt"  # type: ignore[call-overload, index]


def test_a_task_of_terminal_bench(tmp_path: Path) -> None:
    """Neither its tests nor its solution are in the image, which copies all of the folder."""
    found = row(tasks(tmp_path, hello=BENCH))
    assert kept(str(found["repository"])) == {"in.txt": File(b"in")}
    assert found["fail_to_pass"] == ["/tests/test_outputs.py"]
    assert found["problem"] == "Write hi into hello.txt."
    assert found["layout"]["folder"] == "/app"  # type: ignore[call-overload, index]


LEFT_OUT: list[tuple[Files, Files, str]] = [
    (HARBOR, {"environment/Dockerfile": None}, "it has no environment/Dockerfile"),
    (
        HARBOR,
        {"environment/Dockerfile": None, "task.toml": '[environment]\ndocker_image = "me/it:1"\n'},
        "it needs the image me/it:1",
    ),
    (HARBOR, {"environment/docker-compose.yaml": "services: {}"}, "it has services of"),
    (HARBOR, {"task.toml": '[verifier]\nenv = {KEY = "x"}\n'}, "its tests need KEY of the"),
    (HARBOR, {"steps/1/instruction.md": "x"}, "it has several steps"),
    (HARBOR, {"instruction.md": None}, "there is no 'instruction.md'"),
    (HARBOR, {"task.toml": "=\n"}, "Invalid"),
    (BENCH, {"task.yaml": "a: [\n"}, "it is no YAML"),
    (BENCH, {"task.yaml": "a: 1\n"}, "its task.yaml has no instruction"),
    (BENCH, {"docker-compose.yaml": "services: {a: {}, b: {}}"}, "it has the services a, b"),
    (BENCH, {"Dockerfile": None}, "it has no Dockerfile"),
    *(
        (HARBOR, {"environment/Dockerfile": text}, said)
        for text, said in {
            "FROM golang:1.22\nWORKDIR /app": "it needs the image golang:1.22",
            "FROM python:3.13": "its Dockerfile names no WORKDIR",
            "FROM python:3.13\nWORKDIR /usr/src/app": "which is the system's",
            "FROM python:3.13\nWORKDIR /app\nRUN pip install numpy": "has RUN pip install numpy",
            "FROM python:3.13\nWORKDIR /app\nRUN apt-get install -y gcc": "has RUN apt-get install -y gcc",
            "FROM python:3.13\nWORKDIR /app\nCOPY data /etc/data": "outside of its WORKDIR",
            "FROM python:3.13\nWORKDIR /app\nCOPY nothing .": "there is no nothing",
            "FROM python:3.13\nWORKDIR /app\nADD https://x.org/a .": "has ADD https://x.org/a",
            "FROM python:3.13 AS a\nFROM python:3.13\nWORKDIR /app": "it needs the image",
            "FROM python:3.13\nWORKDIR /app\nUSER me": "has USER me",
            "FROM python:3.13\nWORKDIR /app\nRUN <<X\nls\nX": "has RUN <<X",
        }.items()
    ),
    *(
        (HARBOR, {"tests/test.sh": text}, said)
        for text, said in {
            f"{STOCK}\nservice nginx start\n": "needs the network or more than pytest: service nginx",
            STOCK.replace("-w pytest-json-ctrf", "-w numpy"): "its tests need numpy",
            STOCK.replace("install -y curl", "install -y curl jq"): "its tests need jq",
            "pip install requests\npytest /tests/test_outputs.py\n": "its tests need requests",
            "curl http://x | bash\n": "needs the network or more than pytest: curl http://x",
        }.items()
    ),
]


@pytest.mark.parametrize(("base", "changes", "said"), LEFT_OUT)
def test_what_cannot_run_here_is_left_out_by_name(
    base: Files, changes: Files, said: str, tmp_path: Path
) -> None:
    rows = tasks(tmp_path, good=BENCH, odd={**base, **changes})
    assert len(rows) == 1
    assert list(rows.left_out) == ["odd"]
    assert said in rows.left_out["odd"]


def test_a_folder_of_nothing_that_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"none of its 1 task folders can run here\. odd: it needs the"
    ):
        tasks(tmp_path, odd={**HARBOR, "environment/Dockerfile": "FROM golang"})
