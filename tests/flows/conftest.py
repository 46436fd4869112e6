"""One Prefect server for all flow tests, and runs of `refrain grpo` against it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from filelock import FileLock

from storage.audit.audit import audit
from storage.objects.store import Store
from storage.runs.commit_log import Commit, head, read_commit
from storage.runs.run_store import RunStore
from tasks.launch.server import HOST, EmbeddedServer
from tests.faults.ledger import committed, story
from tests.faults.planted import Fault, Faults

ROOT = Path(__file__).parents[2]

# Kills the flow once its third step is committed, before MLflow is told or another step is begun.
AFTER_STEP_3 = Fault(id="committed", target="tasks.run.run:Run.advance", action="kill", nth=3)


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real Prefect server's API, with its login, by which httpx asks."""
    server = EmbeddedServer(tmp_path_factory.mktemp("prefect"))
    server.launch()
    try:
        server.wait()
        yield f"http://{server.login}@{HOST}:{server.port}/api"
    finally:
        server.stop()


def settings_for(api: str) -> dict[str, str]:
    """Variables for processes that ask the server at such an address."""
    parts = urlsplit(api)
    login, _, place = parts.netloc.rpartition("@")
    return {
        "PREFECT_API_URL": parts._replace(netloc=place).geturl(),
        **({"PREFECT_API_AUTH_STRING": login} if login else {}),
    }


@dataclass
class Launched:
    """A run in a folder of its own."""

    folder: Path
    process: subprocess.Popen[str]
    store_uri: str

    def end(self, timeout: float = 500) -> tuple[int, str]:
        """Exit code and everything printed."""
        out, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, out

    def whole(self) -> Launched:
        """Itself, once it has ended well."""
        code, out = self.end()
        assert code == 0, out
        return self

    @property
    def files(self) -> RunStore:
        """The only run in the store."""
        store = Store(self.store_uri)
        (name,) = (one for one in store.children() if not one.startswith("_"))
        return RunStore(store, name)

    def commits(self) -> list[Commit]:
        """Every committed step."""
        return [read_commit(self.files, step) for step in range(1, (head(self.files) or 0) + 1)]

    def children(self) -> list[psutil.Process]:
        """Processes that the run started, whoever their parent is by now."""
        mark = str(self.folder)
        found = []
        for process in psutil.process_iter(["pid", "cwd"]):
            if process.info["cwd"] == mark and process.pid != self.process.pid:
                found.append(process)
        return found


Launch = Callable[..., Launched]


@contextlib.contextmanager
def starting(folder: Path, prefect_api: str) -> Iterator[Launch]:
    """Start `refrain grpo WORDS` in a folder; what still runs at the end is killed."""
    started: list[Launched] = []

    def start(
        *words: str,
        embedded: bool = False,
        module: str = "flows.grpo",
        environment: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> Launched:
        for name, text in (files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        variables.pop("PREFECT_API_URL", None)
        if not embedded:
            variables |= settings_for(prefect_api)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.flows.without_torch", module, *words],
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        run = Launched(folder, process, f"file://{folder}/.refrain/store")
        started.append(run)
        return run

    try:
        yield start
    finally:
        for run in started:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()


def ends_alike(
    whole: Launched, launch: Launch, folder: Path, words: Sequence[str], fault: Fault
) -> Launched:
    """A run that a fault strikes, resumed where its flow died, ends as one to which nothing happened.

    folder: for the fault's notes.
    """
    faults = Faults(folder / "faults", [fault])
    run = launch(*words, environment=faults.environment)
    code, out = run.end()
    if code:
        assert fault.target.startswith("tasks."), out
        code, out = launch("--resume", run.files.run, environment=faults.environment).end()
    assert code == 0, out
    assert faults.missed == []
    assert story(committed(run.files)) == story(whole.commits())
    assert audit(run.files).problems == []
    return run


# Settings of steps that do not wait for their longest episodes, and hand them on.
CARRYING = (
    "steps=4",
    "max_staleness=2",
    "rollout.shards=4",
    "rollout.over_sampling=1.5",
    "rollout.partial_rollout=carry",
    "algorithm.correction=[{kind: truncate}]",
)


@pytest.fixture(scope="session")
def undisturbed(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """Six steps of `tiny` to which nothing happened; made once for all processes of the tests."""
    common = tmp_path_factory.getbasetemp()
    common = common.parent if "PYTEST_XDIST_WORKER" in os.environ else common
    folder = common / "undisturbed"
    with FileLock(common / "undisturbed.lock"), starting(folder, prefect_api) as start:
        if not folder.exists():
            folder.mkdir()
            code, out = start("tiny", "steps=6").end(800)
            assert code == 0, out
    store = Store(f"file://{folder}/.refrain/store")
    (name,) = store.children()
    return RunStore(store, name)


@pytest.fixture
def launch(prefect_api: str, tmp_path: Path) -> Iterator[Launch]:
    """Start `refrain grpo WORDS` in an empty folder."""
    with starting(tmp_path, prefect_api) as start:
        yield start
