"""What is more than a function scores a run: a judge, a reward model, unit tests in a sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from configs.model import RandomModel
from engines.models.checkpoints import materialize
from engines.sandboxes.opening import lacking
from storage.audit.audit import audit
from storage.batches.columns import SampleStatus
from tests.engines.reward_models.drawn import draw_reward_model
from tests.engines.rewards.judge_server import serving
from tests.flows.conftest import ROOT, Launch

pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_a_judge_and_a_reward_model_score_a_run(launch: Launch, tmp_path: Path) -> None:
    recipe = yaml.safe_load((ROOT / "configs/recipes/tiny.yaml").read_text())
    model = draw_reward_model(tmp_path / "models")
    own = materialize(RandomModel(seed=3), tmp_path / "models")
    with serving() as judge:
        recipe["rewards"]["functions"] += [
            {"kind": "judge", "url": judge.url, "model": "strict", "rubric": "rubric.txt"}
            | {"key_variable": "JUDGE_KEY", "weight": 2.0, "retry_pause": 0.01},
            {"kind": "reward_model", "model": str(model), "template": "plain", "weight": 0.5},
            {"kind": "reward_model", "name": "pairs", "model": str(model), "template": "plain"}
            | {"pairwise": {}, "weight": 4.0},
            # A random model, of whose words any digit is the score.
            {"kind": "local_judge", "name": "own", "model": str(own), "engine": "transformers"}
            | {"template": "plain", "dtype": "float32", "max_tokens": 100, "max_length": 300}
            | {"rubric": "rubric.txt", "score": r"(\d)", "votes": 3, "temperature": 1.0},
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
            digits, judged, scored, told, better, reward = (
                np.array(samples.fetch_list(store, name))
                for name in (
                    *("score/share_of_digits", "score/judge", "score/reward_model"),
                    *("score/own", "score/pairs", "reward"),
                )
            )
            assert judged == pytest.approx(0.7)
            assert len(set(scored.tolist())) > 8, "the model tells samples apart"
            assert len(set(told.tolist())) > 4, "so does the judge of its own"
            groups = better.reshape(-1, recipe["group_size"])
            assert groups.mean(axis=1) == pytest.approx(0.5), "who is better, another is worse"
            expected = digits + 2 * judged + 0.5 * scored + told + 4 * better
            assert reward == pytest.approx(expected, abs=1e-5)
            (answers, *_) = samples.fetch_list(store, "extra/judge/answers")
            assert "Score: 7" in json.dumps(answers)
            (code_of,) = commit.reward_code.values()
            kinds = {one["settings"]["kind"]: one for one in code_of}
            assert kinds["judge"]["source"] and kinds["reward_model"]["source"]
            assert kinds["local_judge"]["source"] == kinds["judge"]["source"], "one rubric"
            assert kinds["local_judge"]["module"]
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
            timeout=400,
        )
        assert again.returncode == 0, again.stdout + again.stderr
        assert len(judge.requests) == asked, "what was answered is not asked again"


@pytest.mark.slow
def test_unit_tests_score_a_run(launch: Launch, tmp_path: Path) -> None:
    """Random text is the program: one test passes where it is Python at all, the other never."""
    if why := lacking():
        pytest.skip(why)
    rows = [{"question": f"{n} = ", "test_list": ["assert True", "assert f(1)"]} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = yaml.safe_load((ROOT / "configs/recipes/tiny.yaml").read_text())
    recipe["data"]["source"] = {"kind": "file", "path": "rows.jsonl"}
    recipe["rewards"]["functions"].append(
        {"kind": "unit_tests", "extract": "whole", "score": "share"}
    )
    run = launch("mine.yaml", "steps=2", files={"mine.yaml": yaml.safe_dump(recipe)})
    code, out = run.end()
    assert code == 0, out
    for commit in run.commits():
        samples = commit.refs["samples"]
        store = run.files.store
        scores = samples.fetch_list(store, "score/unit_tests")
        for score, tests, status in zip(
            scores,
            samples.fetch_list(store, "extra/unit_tests/tests"),
            samples.fetch_list(store, "status"),
            strict=True,
        ):
            assert status != SampleStatus.FAILED
            assert len(tests) == 2 and not tests[1]["passed"]
            assert score == sum(one["passed"] for one in tests) / 2
    assert audit(run.files).problems == []
