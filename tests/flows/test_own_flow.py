"""A flow of a user's, in a folder of theirs: killed, resumed, looked at, refused elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from configs.overrides import ConfigError
from storage.objects.store import Store
from storage.runs.commit_log import head, read_commit
from storage.runs.run_store import RunStore
from tasks.run.run_record import load_flow, path_of, settings_class
from tests.faults.planted import Faults
from tests.flows.conftest import AFTER_STEP_3, ROOT, Launch
from tests.flows.test_grpo import digests

OWN = Path(__file__).with_name("my_flows.py")


def said(folder: Path, module: str, *words: str) -> tuple[int, str]:
    """Exit code and output of a command in the user's folder."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.cluster
def test_it_is_killed_and_resumed_and_ends_with_the_weights_of_an_undisturbed_run(
    launch: Launch, undisturbed: RunStore, tmp_path: Path
) -> None:
    """An undisturbed run of GRPO, whose step the user's flow repeats without its options."""
    shutil.copy(OWN, tmp_path)
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [AFTER_STEP_3])
    broken = launch(
        "tiny", "steps=4", "patience=5", module="my_flows", environment=faults.environment
    )
    code, out = broken.end()
    assert (code, faults.missed) == (-9, []), out
    name = broken.files.run
    record = broken.files.read_run()
    assert record is not None and record["flow"] == "my_flows:my_flow"

    again = f"python -m my_flows --resume {name}"
    code, out = said(tmp_path, "flows.inspect", name, "--json")
    assert (code, json.loads(out)["resume"]) == (0, again)
    code, out = said(tmp_path, "flows.grpo", "--resume", name, "--check")
    assert code == 2
    assert out == (
        f"Run {name} was made by the flow my_flows:my_flow, and this is flows.grpo:grpo. "
        f"Go on with it by: {again}\n"
    )
    code, out = said(tmp_path, "flows.ppo", "--fork", f"{name}@2", "--check")
    assert (code, f"Fork it by: python -m my_flows --fork {name}@2" in out) == (2, True), out

    resumed = launch("--resume", name, module="my_flows")
    code, out = resumed.end()
    assert code == 0, out
    assert re.findall(r"^step (\d)/4", out, re.MULTILINE) == ["4"]
    assert digests(resumed.files) == digests(undisturbed)[:4]
    assert resumed.children() == []
    code, out = said(tmp_path, "flows.replay", name, "4", "--json")
    assert (code, json.loads(out.partition("{")[1] + out.partition("{")[2])["equal"]) == (0, True)


@pytest.mark.cluster
@pytest.mark.slow
def test_it_is_forked(launch: Launch, tmp_path: Path) -> None:
    shutil.copy(OWN, tmp_path)
    parent = launch("tiny", "name=whole", module="my_flows")
    assert parent.end()[0] == 0
    name = parent.files.run
    code, out = launch("--fork", f"{name}@1", "name=child", module="my_flows").end()
    assert code == 0, out
    store = Store(parent.store_uri)
    (child,) = (one for one in store.children() if one.startswith("child"))
    files = [RunStore(store, name), RunStore(store, child)]
    assert [head(one) for one in files] == [3, 3]
    ends = [read_commit(one, 3).version_out.digest for one in files]
    assert ends[0] == ends[1]


def test_a_flow_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(OWN, tmp_path / "found_flows.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = load_flow("found_flows:my_flow")
    assert path_of(found) == "found_flows:my_flow"
    assert "patience" in settings_class(found).model_fields
    assert path_of(load_flow("ppo")) == "flows.ppo:ppo"
    for path, reason in (
        ("nowhere:flow", "The flow nowhere:flow cannot be imported: there is no module 'nowhere'"),
        ("dapp", "The flow flows.dapp:dapp cannot be imported"),
        ("found_flows:MyConfig", "found_flows:MyConfig is no flow"),
        ("found_flows:my_step", "takes no settings of a run. Its parameter config must be"),
    ):
        with pytest.raises(ConfigError, match=reason):
            settings_class(load_flow(path))


@pytest.mark.slow
def test_the_program_that_runs_is_named_as_others_import_it(tmp_path: Path) -> None:
    """Started as a module or by its file, and its flow is not imported a second time."""
    (tmp_path / "lab").mkdir()
    shutil.copy(OWN, tmp_path / "lab/my_flows.py")
    text = (tmp_path / "lab/my_flows.py").read_text()
    probe = (
        "    from tasks.run.run_record import load_flow, path_of\n"
        "    path = path_of(my_flow)\n"
        "    print(path, load_flow(path) is my_flow)\n"
    )
    (tmp_path / "lab/my_flows.py").write_text(
        text.replace('    sys.exit(main("my_flows:my_flow", MyConfig))\n', probe)
    )
    for words in (["-m", "lab.my_flows"], ["lab/my_flows.py"]):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.stdout == "lab.my_flows:my_flow True\n", done.stderr
