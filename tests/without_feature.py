"""Take a feature out of a copy of the checkout, and see that what is left stands by itself.

    make without FEATURE=trees
    python -m tests.without_feature trees teachers --together

Deleted are the feature's rooms, its record (a line or two in tables) and the tests that import what is in
its rooms. Then, of what is left: lint, types, the rules of imports, `tiny` with the same weights to the
bit, and the tests of `make test`; `--tests` chooses others, or none. `--together` takes several out of
one copy. Tests that pass without all features together use none, so after that the rest is enough without
each: `all --tests features` runs the tests that use some other feature.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("benchmarks", "configs", "engines", "examples", "flows", "storage", "tasks")


@dataclass(frozen=True, kw_only=True)
class Rooms:
    """What there is of a feature."""

    rooms: Sequence[str]  # files and folders of the product
    tests: Sequence[str] = ()  # and of the tests, beside those that import what is in the rooms
    unfit: Sequence[str] = ()  # tests of others that use it by its settings or stored runs
    # File -> regular expressions of its lines, or of several of them, that go.
    records: Mapping[str, Sequence[str]] = field(default_factory=dict)


def deployment(name: str) -> str:
    """Of infra/prefect.yaml."""
    return rf"  - <<: \*deployment\n    name: {name}\n(?:    .*\n)+\n?"


def record(name: str) -> dict[str, Sequence[str]]:
    """In the table of features."""
    return {"tasks/run/features.py": [rf'    "{name}": .*\n']}


def layer(room: str) -> dict[str, Sequence[str]]:
    """Its place among the rooms of engines, with a bar beside it; the line where it is alone."""
    return {"pyproject.toml": [rf'  "{room}",\n| \| {room}\b|(?<="){room} \| ']}


COMMANDS = "tests/tasks/launch/test_command_line.py"
DEPLOYMENTS = "tests/tasks/launch/test_deployment_file.py"
LEFT = "tests/tasks/run/test_features.py::test_guards_that_were_taken_out_still_have_what_a_commit_decided"
WHOLE_TREE = (  # pages, a count, and the table below have what was taken out
    "tests/test_docs.py::test_what_a_page_names_exists",
    "tests/test_site.py::test_the_page_of_commands_is_not_empty",
    "tests/test_without_feature.py::test_nothing_outside_its_rooms_and_records_imports_a_feature",
)
STORED = "tests/stored_runs/test_stored_runs.py::test_settings_and_commits_are_read"
TROUBLES = "tests/test_troubles.py::test_a_sentence_of_the_page_is_printed"
FEATURES = {
    "critic": Rooms(
        rooms=("configs/ppo.py", "engines/critic", "flows/ppo.py", "tasks/critic"),
        tests=("tests/flows/test_ppo.py",),
        unfit=(
            *(f"{STORED}[ppo]", f"{STORED}[ppo-killed]"),
            f"{COMMANDS}::test_a_refused_setting_answers_at_once[ppo-critic.epochs=0]",
            f"{COMMANDS}::test_a_resumed_run_is_checked_at_once_too",
            f"{DEPLOYMENTS}::test_what_takes_no_recipe_has_settings_too[resume-words2-config2]",
            "tests/configs/test_recipes.py::test_the_flow_process_imports_no_engine_library[flows.ppo]",
            "tests/deploy/test_wheel.py::test_the_command_names_what_there_is",
            "tests/flows/test_own_flow.py::test_a_flow_is_found_by_its_path",
            "tests/flows/test_slurm.py::test_what_cannot_be_submitted_is_one_sentence",
        ),
        records={
            **record("critic"),
            "infra/prefect.yaml": [deployment("tiny-ppo")],
            **layer("critic"),
        },
    ),
    "elastic": Rooms(
        rooms=(
            *("engines/elastic", "tasks/elastic", "storage/runs/gradients.py"),
            *("configs/rules/elastic.py", "benchmarks/elastic.py"),
        ),
        tests=("tests/configs/test_elastic.py", "tests/faults/test_elastic.py"),
        unfit=("tests/faults/test_membership.py::test_elastic_train_workers_come_and_go",),
        records={
            **record("elastic"),
            "engines/train/trainer.py": [r'    "elastic": .*\n'],
            "configs/grpo.py": [r"from configs.rules.elastic .*\n", r"    \*ELASTIC,\n"],
            **layer("elastic"),
        },
    ),
    # The section `guards` of the settings stays: every run.json has it.
    "guards": Rooms(
        rooms=("tasks/guards", "configs/rules/guards.py"),
        tests=("tests/configs/test_guard_rules.py", "tests/flows/test_guards.py"),
        unfit=(
            LEFT,
            "tests/flows/test_overlap.py::test_beyond_the_guards_bound_the_run_is_synchronous",
            "tests/flows/test_overlap.py::test_beyond_the_guards_bound_the_run_stops",
            "tests/tasks/evaluation/test_schedule.py",
        ),
        records={
            **record("guards"),
            "configs/grpo.py": [r"from configs.rules.guards .*\n", r"    \*where.*\*GUARDS\),\n"],
        },
    ),
    # So does `promotion`.
    "promotion": Rooms(
        rooms=("tasks/promotion", "configs/rules/promotion.py"),
        tests=("tests/configs/test_promotion.py", "tests/flows/test_after_the_last_step.py"),
        unfit=(
            "tests/deploy/test_retraining.py",
            "tests/flows/test_episodes.py::test_greedy_baselines_and_the_evaluation_are_episodes_too",
            "tests/flows/test_players.py::test_greedy_baselines_and_the_evaluation_have_all_players",
        ),
        records={
            **record("promotion"),
            "configs/grpo.py": [
                r"from configs.rules.promotion .*\n",
                r"    \*where.*\*PROMOTION\),\n",
            ],
            "infra/prefect.yaml": [r"            promotion\..*\n"],
        },
    ),
    "trees": Rooms(
        rooms=(
            "configs/tree.py",
            "engines/trees",
            "flows/tree.py",
            "tasks/trees",
            "benchmarks/tree.py",
        ),
        tests=("tests/flows/test_tree.py",),
        unfit=(f"{STORED}[tree]",),
        records={
            **record("trees"),
            "infra/prefect.yaml": [deployment("tiny-tree")],
            **layer("trees"),
        },
    ),
    "progress": Rooms(
        rooms=(
            *("configs/srpo.py", "configs/encoder.py", "configs/recipes/tiny-srpo.yaml"),
            *(
                "engines/encoders",
                "flows/srpo.py",
                "tasks/progress_rewards",
                "benchmarks/frozen_lake.py",
                "examples/libero.yaml",
            ),
        ),
        tests=("tests/flows/test_srpo.py", "tests/examples/test_libero.py"),
        unfit=(
            f"{STORED}[srpo]",
            "tests/flows/test_seen_lake.py::test_what_it_saw_is_on_record[flows.srpo-words1]",
        ),
        records={
            **record("progress"),
            "infra/prefect.yaml": [deployment("tiny-srpo")],
            **layer("encoders"),
        },
    ),
    "teachers": Rooms(
        rooms=(
            *("configs/distill.py", "configs/teachers.py", "engines/teachers"),
            *("flows/distill.py", "flows/teacher.py", "tasks/teachers"),
            "configs/recipes/distill-7b-1.5b.yaml",
        ),
        tests=("tests/flows/test_distill.py", "tests/flows/test_teacher_service.py"),
        unfit=(
            f"{STORED}[teacher]",
            "tests/flows/test_opponent.py::test_its_samples_do_not_train_in_other_flows[distill]",
        ),
        records={
            **record("teachers"),
            "infra/prefect.yaml": [deployment("tiny-distill")],
            "benchmarks/recipe_hours.py": [r'    "distill-7b-1.5b": .*\n'],
            **layer("teachers"),
        },
    ),
    "over_sampling": Rooms(
        rooms=("configs/rules/over_sampling.py", "tasks/over_sampling"),
        tests=("tests/flows/test_over_sampling.py",),
        unfit=(
            LEFT,
            "tests/flows/test_episodes.py::test_unfinished_episodes_are_carried",
            "tests/flows/test_large_steps.py::test_groups_that_share_task_runs_are_cut_and_carried",
            "tests/flows/test_opponent.py::test_unfinished_episodes_are_carried",
            "tests/flows/test_players.py::test_unfinished_episodes_are_carried",
        ),
        records={
            **record("over_sampling"),
            "configs/grpo.py": [
                r"from configs.rules.over_sampling .*\n",
                r"    \*OVER_SAMPLING,\n",
            ],
        },
    ),
    "quarantine": Rooms(
        rooms=(
            *("configs/rules/quarantine.py", "engines/rows", "flows/quarantine.py"),
            *("storage/rows", "tasks/quarantine"),
        ),
        tests=("tests/configs/test_quarantine.py", "tests/flows/test_quarantine.py"),
        unfit=(
            "tests/configs/test_tasks.py::test_what_does_not_go_together_is_one_sentence"
            "[words1-data.source.tasks.digits.group_size = 1 has one, which never varies]",
        ),
        records={
            **record("quarantine"),
            "configs/grpo.py": [
                r"from configs.rules.quarantine .*\n",
                r"    \*where.*\*QUARANTINE\),\n",
            ],
            **layer("rows"),
        },
    ),
    # The settings of data.source.tasks stay, and the kind `none` of environments.
    "tasks": Rooms(
        rooms=("configs/rules/tasks.py", "storage/prompts/tasks.py", "tasks/several_tasks"),
        tests=("tests/configs/test_tasks.py", "tests/flows/test_tasks_with_environments.py"),
        unfit=(
            "tests/tasks/run/test_preflight.py::test_a_reward_may_ask_for_the_task_where_there_are_several",
        ),
        records={
            **record("tasks"),
            "configs/grpo.py": [
                r"from configs.rules.tasks .*\n",
                r"    \*ONE_TASK,\n",
                r"    \*TASKS,\n",
            ],
            **{
                f"configs/{flow}.py": [r"from configs.rules.tasks .*\n", r" +no_tasks\(.*\),\n"]
                for flow in ("distill", "srpo", "tree")
            },
            "storage/prompts/datasets.py": [
                r"    if isinstance\((?:config|data\.source), TasksSource\):\n"
                r"        from storage.prompts.tasks .*\n\n(?:        .*\n)+",
                r"    TasksSource,\n",
            ],
        },
    ),
    "reward_models": Rooms(
        rooms=("engines/reward_models", "tasks/reward_models"),
        tests=("tests/flows/test_model_rewards.py",),
        unfit=(
            "tests/tasks/memory/test_vllm_shares.py::test_a_judge_needs_room_too",
            "tests/tasks/run/test_preflight.py::test_rewards_that_are_models_are_looked_at_before_a_run",
        ),
        records={
            **record("reward_models"),
            **layer("reward_models"),
        },
    ),
    "coding": Rooms(
        rooms=(
            *("configs/coding.py", "configs/rules/coding.py", "tasks/coding"),
            *("engines/environments/coding", "storage/prompts/coding"),
            *("examples/coding.yaml", "examples/coding_agent.py", "examples/coding_tasks.py"),
            "examples/mini_swe.py",
        ),
        tests=(
            *("tests/engines/environments/coding", "tests/storage/prompts/coding"),
            *(
                "tests/flows/test_coding.py",
                "tests/configs/test_coding.py",
                "tests/examples/test_mini_swe.py",
            ),
        ),
        unfit=(
            "tests/configs/test_recipes.py::test_a_wrong_setting_is_one_sentence",
            "tests/examples/test_start_pages.py::test_a_page_is_short_and_has_a_whole_example",
            "tests/test_site.py::test_the_site_is_built_and_its_links_lead_somewhere",
        ),
        records={
            **record("coding"),
            "configs/grpo.py": [r"from configs.rules.coding .*\n", r"    \*CODING,\n"],
            "configs/run.py": [r'            "coding": .*\n'],
            "configs/data.py": [
                r"from configs.coding .*\n",
                r" \| CodingSource",
                r'"workspace", ',
                r"    workspace: WorkspaceConfig(?:.*\n)+?    \)\n",
            ],
            "configs/episodes.py": [
                r"from configs.coding .*\n",
                r"class WorkspaceEnvironment\(Settings\):\n(?:    .*\n|\n(?!\n))+\n*",
                r"\n    \| WorkspaceEnvironment",
                r', "workspace"(?=\),)',
                r"    workspace: WorkspaceConfig(?:.*\n)+?    \)\n",
                r"    @property\n    def workspaces(?:.*\n)+?\n",
            ],
            "engines/environments/adapters.py": [
                r"    if start.workspace is not None:\n(?:        .*\n|\n)+",
            ],
            "engines/environments/process.py": [
                r"    WorkspaceEnvironment,\n",
                r" \| WorkspaceEnvironment",
                r"        case WorkspaceEnvironment\(\):\n.*\n",
                r"        workspace=.*\n",
            ],
            "engines/environments/protocol.py": [r"    workspace: .*\n"],
            "storage/prompts/datasets.py": [
                r"from configs.coding .*\n",
                r"    if isinstance\(config, CodingSource\):\n(?:        .*\n|\n)+",
                r" \| CodingSource",
            ],
        },
    ),
    "dynamic_sampling": Rooms(
        rooms=(
            *("configs/dapo.py", "flows/dapo.py", "tasks/dynamic_sampling.py"),
            *("configs/recipes/tiny-dapo.yaml", "configs/recipes/dapo-math-17k.yaml"),
        ),
        tests=("tests/flows/test_dapo.py",),
        unfit=(
            f"{STORED}[dapo]",
            f"{TROUBLES}[TooFewGroups: Step 1 wants 8 groups whose rewards differ]",
            "tests/configs/test_recipes.py::test_the_flow_process_imports_no_engine_library[flows.dapo]",
            "tests/flows/test_opponent.py::test_its_samples_do_not_train_in_other_flows[dapo]",
            "tests/flows/test_seen_lake.py::test_what_it_saw_is_on_record[flows.dapo-words2]",
        ),
        records={
            "infra/prefect.yaml": [deployment("tiny-dapo")],
            "benchmarks/recipe_hours.py": [r'    "dapo-math-17k": .*\n'],
        },
    ),
    "serving": Rooms(
        rooms=("configs/serve.py", "flows/serve.py", "tasks/launch/serving.py"),
        tests=("tests/flows/test_serve.py",),
    ),
}


def copy_of(folder: Path) -> Path:
    """What git would commit of the checkout, in a folder."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    # An editable install finds in the checkout what the copy has not: its finder does nothing there.
    for finder in Path(sysconfig.get_path("purelib")).glob("__editable__*_finder.py"):
        (folder / finder.name).write_text("def install() -> None: ...\n")
    return folder


def take_out(features: Sequence[Rooms], folder: Path) -> list[str]:
    """Delete features; the test files that went with them, beside their own."""
    rooms = [room for feature in features for room in feature.rooms]
    tests = [test for feature in features for test in feature.tests]
    modules = {path[:-3].replace("/", ".") for path in files_of([*rooms, *tests], folder)}
    for path in (*rooms, *tests):
        where = folder / path
        if where.is_dir():
            shutil.rmtree(where)
        else:
            where.unlink()
    for feature in features:
        for path, expressions in feature.records.items():
            if not (folder / path).exists():
                assert path in rooms, f"there is no {path}"
                continue
            text = (folder / path).read_text()
            for expression in expressions:
                text, found = re.subn(expression, "", text)
                assert found, f"{path} has no lines {expression!r}"
            (folder / path).write_text(text)
    return with_tests(modules, folder)


def files_of(rooms: Sequence[str], folder: Path) -> list[str]:
    """The files of rooms, seen from the folder."""
    found: list[str] = []
    for room in rooms:
        where = folder / room
        assert where.exists(), f"there is no {room}"
        found += [where, *where.rglob("*.py")] if where.is_dir() else [where]  # type: ignore[list-item]
    return [str(Path(path).relative_to(folder)) for path in found if str(path).endswith(".py")]


def with_tests(modules: set[str], folder: Path) -> list[str]:
    """Delete the tests that import one of these modules, and those that import such a test."""
    gone: list[str] = []
    while True:
        found = [
            path
            for path in sorted((folder / "tests").rglob("*.py"))
            if path.name != "without_feature.py" and names(path.read_text(), modules)
        ]
        if not found:
            return gone
        for path in found:
            name = str(path.relative_to(folder))
            gone.append(name)
            modules |= {name[:-3].replace("/", ".")}
            path.unlink()


def tests_of_features() -> list[str]:
    """The tests that a checkout without any feature has no more, or leaves out."""
    with tempfile.TemporaryDirectory(prefix="without-") as temporary:
        gone = take_out(list(FEATURES.values()), copy_of(Path(temporary)))
    each = [test for feature in FEATURES.values() for test in (*feature.tests, *feature.unfit)]
    modules = [path for path in gone if Path(path).name.startswith("test_")]
    return sorted({*modules, *each})


def names(text: str, modules: set[str]) -> bool:
    """Whether a text imports one of the modules."""
    return not modules.isdisjoint(imported(text))


@functools.cache
def imported(text: str) -> frozenset[str]:
    """The modules that a text imports, and what it takes from them by their full names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return frozenset(found)


def tiny(folder: Path) -> list[str]:
    """Digests of the weights of three steps of `tiny`, by the code in the folder."""
    with tempfile.TemporaryDirectory() as work:
        run([sys.executable, "-m", "flows.grpo", "tiny", "steps=3"], Path(work), folder)
        commits = sorted(Path(work, ".refrain/store").glob("*/steps/*/commit.json"))
        assert len(commits) == 3, "tiny did not make its steps"
        return [json.loads(path.read_text())["body"]["version_out"]["digest"] for path in commits]


class Falls(Exception):
    """What is left does not stand by itself: the command that failed."""


def run(words: Sequence[str], where: Path, code: Path, *, shown: bool = False) -> None:
    """Run a command with the packages of a folder; Falls where it fails, and then shows what it said."""
    done = subprocess.run(
        words,
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(code)},
        capture_output=not shown,
        text=True,
        check=False,
    )
    if done.returncode:
        if not shown:
            print(done.stdout[-6000:], done.stderr[-3000:], sep="\n")
        raise Falls(" ".join(map(str, words)))


def stands(
    names: Sequence[str], chosen: Sequence[str], processes: int, reference: list[str]
) -> None:
    """See that what is left without these features stands; Falls where it does not."""
    features = [FEATURES[name] for name in names]
    called = ", ".join(names)
    own = Path(sys.executable).parent
    with tempfile.TemporaryDirectory(prefix="without-") as temporary:
        folder = copy_of(Path(temporary))
        gone = take_out(features, folder)
        print(
            f"{called}: taken out; tests that named it went too: {', '.join(gone) or 'none'}",
            flush=True,
        )
        if len(names) > 1:  # what several import, and each alone leaves to the others
            run(
                [str(own / "ruff"), "check", "--fix", "--quiet", "--select", "F401", "."],
                folder,
                folder,
            )
        for command in (["ruff", "check", "."], ["mypy"], ["lint-imports"]):
            run([str(own / command[0]), *command[1:]], folder, folder)
        if tiny(folder) != reference:
            raise Falls("tiny has other weights")
        print(
            f"{called}: lint, types and imports pass, and tiny is the same to the bit", flush=True
        )
        unfit = [test for feature in features for test in feature.unfit]
        chosen = [
            test
            for test in chosen
            if (folder / test.partition("::")[0]).exists() and test not in unfit
        ]
        if chosen:
            run(
                [
                    *(sys.executable, "-m", "tests.twice", str(processes), *chosen),
                    *(f"--deselect={test}" for test in (*WHOLE_TREE, *unfit)),
                ],
                folder,
                folder,
                shown=True,
            )
            print(f"{called}: the tests pass", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("features", nargs="+", choices=[*FEATURES, "all"], metavar="FEATURE")
    parser.add_argument(
        "--tests",
        nargs="*",
        default=["tests"],
        help="none: no tests; features: those of other features",
    )
    parser.add_argument("--processes", type=int, default=3, help="that run the tests (3)")
    parser.add_argument("--together", action="store_true", help="all of them out of one copy")
    asked = parser.parse_args()
    names = list(FEATURES) if "all" in asked.features else asked.features
    chosen = tests_of_features() if asked.tests == ["features"] else asked.tests
    reference = tiny(ROOT)
    fallen = []
    for group in [names] if asked.together else [[name] for name in names]:
        try:
            stands(group, chosen, asked.processes, reference)
        except Falls as failure:
            fallen.append(f"without {', '.join(group)}: {failure}")
            print(f"failed {fallen[-1]}", flush=True)
    if fallen:
        raise SystemExit("\n".join(fallen))


if __name__ == "__main__":
    main()
