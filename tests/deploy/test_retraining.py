"""Night after night on real engines: champion, new rows, nothing new, promotion and a refusal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from storage.objects.store import Store
from storage.runs.commit_log import read_commit
from storage.runs.run_store import RunStore, origin_of
from storage.tracking.registry import Registry
from tests.deploy.conftest import API, Platform

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def write(path: Path, numbers: range) -> None:
    rows = [{"question": f"{n} + {n} = ", "answer": str(2 * n)} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def nightly(platform: Platform, tmp_path: Path) -> dict[str, object]:
    """Changes to the tiny deployment's settings for a first night."""
    write(tmp_path / "rows.jsonl", range(12))
    write(tmp_path / "held-out.jsonl", range(30, 40))
    return {
        "name": f"night-{tmp_path.name.replace('_', '-')[:20]}",
        "data.source": {"kind": "file", "path": str(tmp_path / "rows.jsonl")},
        # Every group as the form gives it: by the names that it shows, without short forms.
        "evaluation": {
            "suites": {
                "held_out": {"source": {"kind": "file", "path": str(tmp_path / "held-out.jsonl")}}
            }
        },
        "promotion": {"alias": "champion"},
    }


def run(platform: Platform, changes: dict[str, object]) -> dict:
    submitted = platform.submit("tiny", platform.config("tiny", **changes))
    assert submitted.status_code == 201, submitted.text
    return platform.wait(submitted.json()["id"], "COMPLETED")


def test_night_after_night(platform: Platform, nightly: dict[str, object], tmp_path: Path) -> None:
    config = platform.config("tiny", **nightly)
    first = run(platform, nightly)
    assert first["state"]["name"] == "Completed"
    settings = GRPOConfig.model_validate(config)
    registry, name = Registry(settings.tracking), settings.name
    champion = registry.by_alias(name, "champion")
    assert champion is not None and champion.evaluation is not None and champion.step == 3

    later = {**nightly, "continue_from": f"models:/{name}@champion", "steps": 2}
    second = run(platform, later)
    assert second["state"]["name"] == "Skipped"
    assert "Nothing new to train on: all 12 rows" in second["state"]["message"]

    write(tmp_path / "rows.jsonl", range(15))
    third = run(platform, {**later, "continue_state": "trainer"})
    assert third["state"]["name"] == "Completed"
    store = Store(settings.store.uri)
    newest = sorted(n for n in store.children() if n.startswith(name))[-1]
    files = RunStore(store, newest)
    origin = origin_of(files)
    assert origin is not None and str(origin) == f"{champion.run}@3" and origin.trainer_state
    drawn = read_commit(files, 1).refs["prompts"].fetch_numpy(store, "prompt_row")[0].tolist()
    assert {12, 13, 14} < set(drawn)

    now = registry.by_alias(name, "champion")
    assert now is not None
    reason = promotion_note(platform, newest)
    if now.run == newest:
        assert "is now the champion" in reason
    else:
        assert "did not become the champion" in reason
        assert now == champion
    assert re.search(r"a gain of (\\)?[+-]", reason)


def promotion_note(platform: Platform, name: str) -> str:
    found = API.post(
        f"{platform.api}/artifacts/filter",
        json={"artifacts": {"key": {"any_": [f"{name}-promotion".lower()]}}},
    ).json()
    return found[0]["data"]


@pytest.mark.parametrize("approve", [True, False])
def test_a_person_is_asked(platform: Platform, nightly: dict[str, object], approve: bool) -> None:
    changes = {**nightly, "steps": 1, "promotion": {"alias": "champion", "approval": True}}
    changes["name"] = f"{changes['name']}-{approve}".lower()
    submitted = platform.submit("tiny", platform.config("tiny", **changes)).json()
    platform.wait(submitted["id"], "PAUSED")
    assert len(platform.children()) <= 2  # the flow's process; engines and workers have ended
    answer = API.post(
        f"{platform.api}/flow_runs/{submitted['id']}/resume",
        json={"run_input": {"approve": approve, "note": "seen"}},
    )
    assert answer.json().get("status") == "ACCEPT", answer.text
    platform.wait(submitted["id"], "COMPLETED")
    settings = GRPOConfig.model_validate(platform.config("tiny", **changes))
    champion = Registry(settings.tracking).by_alias(settings.name, "champion")
    assert (champion is not None) is approve
