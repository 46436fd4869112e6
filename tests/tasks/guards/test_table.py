"""The table of guards in a step's note."""

from __future__ import annotations

from storage.runs.commit_log import Commit, GuardRecord
from tasks.guards.judging import guard_table
from tests.tasks.guards.test_acting import commit, record
from tests.tasks.reporting.test_markdown import MARKDOWN, kinds
from tests.tasks.run import test_meaning_changes
from tests.traced import Record, check_figures, figure


def test_the_table_of_a_step() -> None:
    none, back = record(None, value=None, threshold=None), record("rollback", back_to=4)
    lines = guard_table(commit(none, back))
    assert lines[-2:] == [
        "| g | `m` | - | - | 3 |  |",
        "| g | `m` | 2 | 1 | 3 | **goes back to step 4** |",
    ]
    assert guard_table(commit()) == []


GUARDS = [
    figure("guards", 0, "value", value=0.44, shown=[("kl` | 0.31", "kl` | 0.44")]),
    figure("guards", 0, "threshold", value=0.55, shown=[("| 0.62 |", "| 0.55 |")]),
    figure("guards", 0, "beyond", value=4, shown=[("0.62 | 2 |", "0.62 | 4 |")]),
    figure("guards", 1, "value", value=0.44, shown=[("m` | 0.11", "m` | 0.44")]),
    figure("guards", 1, "threshold", value=0.55, shown=[("| 0.22 |", "| 0.55 |")]),
    figure("guards", 1, "beyond", value=4, shown=[("0.22 | 0 |", "0.22 | 4 |")]),
    figure("guards", 1, "back_to", value=1, shown=[("to step 3", "to step 1")]),
    figure("guards", 1, "change", value=["x=1"], shown=[("train.learning_rate=0.5", "x=1")]),
]
STEP: Record = {
    "guards": [
        {"guard": "kl", "metric": "train/kl", "value": 0.31, "threshold": 0.62, "beyond": 2},
        {
            "guard": "low",
            "metric": "m",
            "value": 0.11,
            "threshold": 0.22,
            "action": "rollback",
            "back_to": 3,
            "change": ["train.learning_rate=0.5"],
        },
    ],
}


def test_every_number_is_of_a_guards_record() -> None:
    def page(record: Record) -> str:
        return "\n".join(guard_table(Commit.model_validate(record)))

    plain = test_meaning_changes.commit(1).model_dump(mode="json")
    check_figures({**plain, **STEP}, page, GUARDS)


def test_guards_of_any_name() -> None:
    record = GuardRecord(
        guard="<b>[g](x)</b> | g", metric="reward/`a` | ![x](y)", value=1.0, threshold=0.5, beyond=1
    )
    lines = guard_table(test_meaning_changes.commit(1).model_copy(update={"guards": [record]}))
    tokens = MARKDOWN.parse("\n".join(lines))
    assert sum(one.type == "td_open" for one in tokens) == 6
    assert not kinds("\n".join(lines)) & {"link", "image", "html_inline", "html_block"}
