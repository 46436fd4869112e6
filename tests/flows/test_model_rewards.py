"""A judge and a reward model score the samples of a run, beside a function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from storage.audit.audit import audit
from tests.engines.rewards.judge_server import serving
from tests.engines.rewards.reward_models import draw_reward_model
from tests.flows.conftest import ROOT, Launch

pytestmark = pytest.mark.cluster


def test_a_judge_and_a_reward_model_score_a_run(launch: Launch, tmp_path: Path) -> None:
    recipe = yaml.safe_load((ROOT / "configs/recipes/tiny.yaml").read_text())
    model = draw_reward_model(tmp_path / "models")
    with serving() as judge:
        recipe["rewards"]["functions"] += [
            {"kind": "judge", "url": judge.url, "model": "strict", "rubric": "rubric.txt"}
            | {"key_variable": "JUDGE_KEY", "weight": 2.0, "retry_pause": 0.01},
            {"kind": "reward_model", "model": str(model), "template": "plain", "weight": 0.5},
        ]
        run = launch(
            "mine.yaml",
            "steps=2",
            files={"mine.yaml": yaml.safe_dump(recipe), "rubric.txt": "Judge.\nA: {completion}"},
            environment={"JUDGE_KEY": "planted-key-77c1"},
        )
        code, out = run.end()
        assert code == 0, out
        store = run.files.store
        for commit in run.commits():
            samples = commit.refs["samples"]
            digits, judged, scored, reward = (
                np.array(samples.fetch_list(store, name))
                for name in (
                    *("score/share_of_digits", "score/judge", "score/reward_model"),
                    "reward",
                )
            )
            assert judged == pytest.approx(0.7)
            assert len(set(scored.tolist())) > 8, "the model tells samples apart"
            assert reward == pytest.approx(digits + 2 * judged + 0.5 * scored, abs=1e-5)
            (answers, *_) = samples.fetch_list(store, "extra/judge/answers")
            assert "Score: 7" in json.dumps(answers)
            (code_of,) = commit.reward_code.values()
            kinds = {one["settings"]["kind"]: one for one in code_of}
            assert kinds["judge"]["source"] and kinds["reward_model"]["source"]
        asked = len(judge.requests)
        assert 16 <= asked <= 33, "one request a sample at most, and one before the run"
        assert audit(run.files).problems == []
        for path in (tmp_path / ".refrain").rglob("*"):
            assert not path.is_file() or b"planted-key-77c1" not in path.read_bytes(), path
        command = [sys.executable, "-m", "flows.rescore", run.files.run, "--steps", "1"]
        command += ["--reward", "judge"]
        again = subprocess.run(
            command,
            cwd=run.folder,
            env=os.environ | {"JUDGE_KEY": "planted-key-77c1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert again.returncode == 0, again.stdout + again.stderr
        assert len(judge.requests) == asked, "what was answered is not asked again"
