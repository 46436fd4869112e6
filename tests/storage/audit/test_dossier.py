"""A dossier is checked by its own script, in an interpreter that has nothing but Python."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from storage.audit.all_curves import points_of
from storage.audit.audit import audit
from storage.audit.dossier import card, commits_of, write_dossier
from storage.objects.store import Store
from storage.runs.commit_log import Commit
from storage.runs.live import End, write_end
from storage.runs.run_store import RunStore
from tests.storage.audit import small_run
from tests.storage.evaluations.stored import stored_evaluation
from tests.traced import Record, check_figures, figure


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without a package."""
    place = tmp_path_factory.mktemp("bare")
    venv.create(place, with_pip=False)
    return place / "bin" / "python"


class World:
    """A run, its dossier, and the check of it."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.run = RunStore(Store(f"file://{self.store}"), "run")
        self.commits: list[Commit] = small_run.make(self.run)
        self.folder = folder / "dossier"
        self.digest = write_dossier(self.run, audit(self.run), self.folder)

    def verify(self, python: Path | str, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [str(python), "-I", str(self.folder / "verify.py"), *words],
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.stderr
        return done.returncode, done.stdout


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_it_is_checked_without_refrain(world: World, bare: Path) -> None:
    code, out = world.verify(bare)
    assert code == 0, out
    assert out.startswith(f"dossier {world.digest}\n")
    assert "no package xxhash" in out
    code, out = world.verify(sys.executable)  # which has xxhash
    assert code == 0, out
    assert "made again too" in out


def test_a_store_that_was_moved_is_named(world: World, bare: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.move(world.store, moved)
    assert world.verify(bare)[0] == 1
    assert world.verify(bare, "--store", str(moved))[0] == 0


@pytest.mark.parametrize("what", ["weights", "batch", "commit", "run.json"])
def test_a_flipped_byte_in_the_store_is_found(world: World, bare: Path, what: str) -> None:
    last = world.commits[-1]
    keys = {
        "weights": next(
            one
            for one in world.run.store.list(last.version_out.key)
            if one.endswith(".safetensors")
        ),
        "batch": sorted(last.refs["samples"].objects)[0],
        "commit": world.run.commit_key(2),
        "run.json": world.run.run_json_key,
    }
    flip(world.store / keys[what])
    code, out = world.verify(bare)
    assert code == 1
    assert f"{keys[what]}: altered since the dossier was made" in out
    assert "1 problems." in out


@pytest.mark.parametrize(
    "name",
    ["README.md", "curves.csv", "curves.png", "lineage.json", "objects.json", "settings.json",
     "SHA256SUMS"],
)  # fmt: skip
def test_a_flipped_byte_in_the_dossier_is_found(world: World, bare: Path, name: str) -> None:
    flip(world.folder / name)
    code, out = world.verify(bare)
    assert code == 1
    assert name == "SHA256SUMS" or f"{name}: altered" in out


def test_a_changed_script_is_seen_by_the_sum_that_was_told(world: World, bare: Path) -> None:
    with (world.folder / "verify.py").open("a") as script:
        script.write("# changed\n")
    assert "verify.py: altered" in world.verify(bare)[1]


def test_files_that_lack_or_came_later_are_found(world: World, bare: Path) -> None:
    (world.folder / "more.txt").write_text("more")
    (world.folder / "data.json").unlink()
    _, out = world.verify(bare)
    assert "more.txt: not in the dossier" in out
    assert "data.json: missing" in out


def started(
    world: World, python: Path | str, *words: str, cwd: Path | None = None, **variables: str
) -> tuple[int, str]:
    """As whoever has the folder starts the check: without -I."""
    done = subprocess.run(
        [str(python), *(words or (str(world.folder / "verify.py"),))],
        capture_output=True, text=True, check=False, cwd=cwd, env={"PATH": "/usr/bin:/bin", **variables},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


PLANTED = "print('All is as it was.')\nimport os\nos._exit(0)\n"


@pytest.mark.parametrize(
    "name",
    ["argparse.py", "json.py", "__future__.py", "os.py", "typing.py", "pathlib/__init__.py", "xxhash.py",
     "encodings/__init__.py", "sitecustomize.py", "hashlib.pyc", "__pycache__/argparse.cpython-311.pyc"],
)  # fmt: skip
def test_nothing_that_lies_beside_the_script_is_run(world: World, bare: Path, name: str) -> None:
    planted = world.folder / name
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(PLANTED)
    for python, words, cwd in (
        (bare, (), None),
        (bare, ("verify.py",), world.folder),
        (bare, ("./verify.py",), world.folder),
        (bare, ("-S", "verify.py"), world.folder),
        (bare, ("-I", "verify.py"), world.folder),
        (sys.executable, (), None),
    ):
        code, out = started(world, python, *words, cwd=cwd)
        assert code == 1 and f"{name}: not in the dossier when it was made" in out, (words, out)
        assert "All is as it was" not in out


def test_a_folder_on_pythons_path_is_not_imported_either(world: World, bare: Path) -> None:
    (world.folder / "argparse.py").write_text(PLANTED)
    for value in (str(world.folder), ".", f"{world.folder}/../{world.folder.name}", ""):
        code, out = started(
            world, bare, "verify.py", cwd=world.folder, PYTHONPATH=f"{value}:{world.folder}"
        )
        assert code == 1 and "argparse.py: not in the dossier" in out
    (world.folder / "argparse.py").unlink()
    (world.folder / "sitecustomize.py").write_text("")  # which runs before any script
    code, out = started(world, bare, "verify.py", cwd=world.folder, PYTHONPATH=".")
    assert code == 1 and "sitecustomize.py: was imported as sitecustomize" in out
    (world.folder / "sitecustomize.py").unlink()
    shutil.rmtree(world.folder / "__pycache__", ignore_errors=True)  # of that start
    assert started(world, bare)[0] == 0
    assert not list(world.folder.rglob("__pycache__"))


def test_what_is_no_file_and_names_that_a_terminal_obeys(world: World, bare: Path) -> None:
    (world.folder / "x\n0 problems.\x1b[2KAll is as it was.").write_text("")
    (world.folder / "of.json").symlink_to(world.folder / "data.json")
    (world.folder / "folder").symlink_to(world.store)
    moved = world.store.parent / "README.md"
    shutil.move(world.folder / "README.md", moved)
    (world.folder / "README.md").symlink_to(moved)
    code, out = world.verify(bare)
    assert code == 1 and "4 problems." in out
    assert "\x1b" not in out and "\nAll is" not in out and "\n0 problems" not in out
    for name in ("of.json", "folder"):
        assert f"{name}: not in the dossier" in out
    assert "README.md: no file, but a link" in out
    (world.folder / "SHA256SUMS").unlink()
    assert "SHA256SUMS: missing" in world.verify(bare)[1]


def test_the_script_tells_its_own_digest(world: World, bare: Path) -> None:
    own = hashlib.sha256((world.folder / "verify.py").read_bytes()).hexdigest()
    assert f"\nverify.py {own}\n" in world.verify(bare)[1]


def test_the_stores_own_digests_are_made_again(world: World) -> None:
    """Where objects.json and the sums were written anew over a changed store."""
    first = world.store / world.run.commit_key(2)
    document = json.loads(first.read_bytes())
    document["body"]["metrics"]["reward/mean"] = 1.0
    first.write_text(json.dumps(document))
    shutil.rmtree(world.folder)
    from storage.audit.dossier import (  # without the audit that would refuse
        objects_of,
        seal,
        step_of,
    )

    world.folder.mkdir()
    lineage = {
        "run": "run",
        "store": world.run.store.uri,
        "steps": [step_of(world.run, one) for one in world.commits],
    }
    (world.folder / "lineage.json").write_text(json.dumps(lineage))
    listed = list(objects_of(world.run, world.commits).values())
    (world.folder / "objects.json").write_text(json.dumps(listed))
    script = Path(__file__).parents[3] / "storage/audit/verify_dossier.py"
    shutil.copy(script, world.folder / "verify.py")
    seal(world.folder)
    code, out = world.verify(sys.executable)
    assert code == 1
    assert "steps/000003/commit.json: does not follow the commit before it" in out


def test_it_tells_the_run(world: World) -> None:
    lineage = json.loads((world.folder / "lineage.json").read_text())
    assert [one["step"] for one in lineage["steps"]] == [1, 2, 3, 4]
    last = world.commits[-1]
    assert lineage["steps"][-1]["weights"]["digest"] == last.version_out.digest
    assert json.loads((world.folder / "audit.json").read_text())["good"]
    assert json.loads((world.folder / "reward_code.json").read_text()) == {"c0de": [small_run.CODE]}
    assert (world.folder / "curves.csv").read_text().startswith("step,committed_at")
    assert (world.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "# run" in (world.folder / "README.md").read_text()


def test_every_number_of_the_card_is_one_of_the_store(tmp_path: Path) -> None:
    numbers = itertools.count()

    def page(record: Record) -> str:
        run = RunStore(Store(f"file://{tmp_path}/{next(numbers)}"), "run")
        run.write_run(record["run"])
        before = None
        for step, metrics in enumerate(record["metrics"], 1):
            before = small_run.take(run, step, before, metrics=metrics, **record["step"])
        for name, fields in record["evaluations"].items():
            stored_evaluation(run, name, **fields)
        write_end(run, End(step=len(record["metrics"]), cost=record["end"]))
        return card(run, run.read_run() or {}, commits_of(run), points_of(run))

    hours = "cost/so_far/device_hours"
    interval = {"low": 0.25, "high": 0.75, "kind": "bootstrap"}
    record: Record = {
        "run": {
            "config": {"model": {"kind": "random", "layers": 11}, "data": {"source": {"size": 90}}},
            "code": "0.9.0",
            "flow": "flows.grpo:grpo",
        },
        "metrics": [{"reward/mean": 0.125, hours: 1.5}, {"reward/mean": 0.375, hours: 3.5}],
        "step": {"cursor": {"digest": "sha1", "position": 0}},
        "end": {hours: 4.25},
        "evaluations": {
            "e": {"version": 2, "metrics": {"reward": 0.5, "failed": 3.0},
                  "intervals": {"reward": interval}, "cost": {"device_hours": 0.5}, "back_fill": True},
        },
    }  # fmt: skip
    metrics, evaluation = ("metrics",), ("evaluations", "e")
    weights = [small_run.publish_version(RunStore(Store(f"file://{tmp_path}/w"), "run"), n).digest
               for n in (2, 3)]  # fmt: skip
    check_figures(record, page, [
        figure("run", "code", value="0.9.1", shown=[("0.9.0", "0.9.1")]),
        figure("run", "config", "model", "layers", value=12, shown=[('"layers": 11', '"layers": 12')]),
        figure("run", "config", "data", "source", "size", value=91, shown=[('"size": 90', '"size": 91')]),
        figure("step", "cursor", "digest", value="sha2", shown=[("`sha1`", "`sha2`")]),
        figure(*metrics, 0, "reward/mean", value=0.25, shown=[("step: 0.125,", "step: 0.25,")]),
        figure(*metrics, 1, "reward/mean", value=0.5, shown=[(", 0.375", ", 0.5")]),
        figure(*metrics, 1, hours, value=9.0, shown=[]),  # in what the run's end has, not besides
        figure("end", hours, value=5.0, shown=[("Device-hours: 4.75", "Device-hours: 5.5")]),
        figure(*metrics, value=[*record["metrics"][:1], {}, record["metrics"][1]], shown=[
            ("Steps: 2", "Steps: 3"), (f"version: 2, `{weights[0]}`", f"version: 3, `{weights[1]}`"),
            ("trained: 4", "trained: 6")]),
        figure(*evaluation, "version", value=1, shown=[
            ("| 2 | reward", "| 1 | reward"), ("| 2 | failed", "| 1 | failed")]),
        figure(*evaluation, "metrics", "reward", value=0.625, shown=[("reward | 0.5 |", "reward | 0.625 |")]),
        figure(*evaluation, "metrics", "failed", value=4.0, shown=[("failed | 3 |", "failed | 4 |")]),
        figure(*evaluation, "intervals", "reward", value=interval | {"low": 0.1, "high": 0.9},
               shown=[("0.25 to 0.75", "0.1 to 0.9")]),
        figure(*evaluation, "cost", "device_hours", value=1.0, shown=[("hours: 4.75", "hours: 5.25")]),
    ], frozenset({"`verify.py,", "SHA256SUMS`:", "95", "SHA-256,"}))  # fmt: skip
