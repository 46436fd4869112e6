"""Judges in rollout engines: a random model that says nothing of use, and one that is told what to say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.data import DataConfig, FileSource
from configs.model import RandomModel
from configs.rewards import LocalJudgeReward, RewardsConfig
from engines.data.scoring import SampleTexts
from engines.models.checkpoints import load_tokenizer, materialize
from engines.reward_models import local_judge
from engines.reward_models.contract import RewardModelSpec
from engines.reward_models.local_judge import JudgingEngine, LocalJudge
from engines.reward_models.model import check_local_judge
from engines.rewards.checks import check_rewards
from engines.rewards.protocol import Unscored
from engines.rewards.runner import LoggedMetric
from engines.rollout.contract import EngineDead, RolloutRequest, RolloutResult, ShardStats
from storage.batches.columns import UNFINISHED
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.prompts.datasets import open_source

RUBRIC = "Q: {prompt} Ref: {answer} A: {completion}"
Make = Callable[..., LocalJudge]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialize(RandomModel(seed=3), tmp_path_factory.mktemp("models"))


def setting(model: Path, folder: Path, **settings: Any) -> LocalJudgeReward:
    (folder / "rubric.md").write_text(RUBRIC)
    given = {"engine": "transformers", "template": "plain", "dtype": "float32", "max_tokens": 12}
    given |= {"max_length": 120, "rubric": str(folder / "rubric.md"), "model": str(model)}
    return LocalJudgeReward(**{**given, **settings})


def spec(folder: Path, *judges: LocalJudgeReward) -> RewardModelSpec:
    (folder / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    return RewardModelSpec(
        model=RandomModel(),
        model_cache=str(folder / "models"),
        data=DataConfig(source=FileSource(path=str(folder / "rows.jsonl")), template="plain"),
        max_new_tokens=16,
        store_uri=f"file://{folder}/store",
        store_options={},
        reward_models=(),
        judges=judges,
        run="r",
    )


def texts(*completions: str) -> SampleTexts:
    count = len(completions)
    return SampleTexts(
        prompts=["1+1?"] * count,
        completions=list(completions),
        completion_ids=[[1]] * count,
        rows=[{"question": "1+1?", "answer": "2"}] * count,
    )


class Told:
    """An engine that says to a question what `says` makes of its text and its vote."""

    def __init__(self, store: Store, tokenizer: Any, says: Callable[[str, int, int], str]) -> None:
        self._store, self._tokenizer, self._says = store, tokenizer, says
        self.asked: list[tuple[str, int]] = []  # question and seed
        self.dead = self.closed = False
        self.unfinished: tuple[str, ...] = ()  # words of questions that are done only when cut
        self._cut = threading.Event()

    def cut(self, out_keys: list[str]) -> None:
        self._cut.set()

    def generate(self, request: RolloutRequest) -> RolloutResult:
        if self.dead:
            raise EngineDead("the engine has died")
        seed = request.sampling.seed
        assert seed is not None
        said, ends = [], []
        for ids in request.prompts.fetch_list(self._store, "prompt_ids"):
            question = self._tokenizer.decode(ids, skip_special_tokens=True)
            self.asked.append((question, seed))
            for vote in range(request.sampling.n):
                said.append(self._says(question, seed, vote))
                late = any(word in question for word in self.unfinished) and self._cut.wait(60)
                ends.append(UNFINISHED if late else "stop")
        rows = [self._tokenizer(one, add_special_tokens=False)["input_ids"] for one in said]
        ref = write_batch(
            self._store,
            request.out_key,
            {"response_ids": [np.array(r, np.int32) for r in rows], "finish_reason": ends},
        )
        stats = ShardStats(
            **dict.fromkeys(("rows", "prompt_tokens", "tokens", "truncated", "attempt"), 0),
            seconds=0.0,
            worker="w",
            version=0,
            digest="",
        )
        return RolloutResult(ref=ref, stats=stats)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[LocalJudge, Told]]:
    """A judge whose engine is told what to say."""

    def build(says: Callable[[str, int, int], str], **settings: Any) -> tuple[LocalJudge, Told]:
        engine = Told(Store(f"file://{tmp_path}/store"), load_tokenizer(model), says)
        monkeypatch.setattr(LocalJudge, "_built", lambda self: engine)
        reward = setting(model, tmp_path, **settings)
        return LocalJudge(reward, spec(tmp_path, reward)), engine

    return build


def test_scores_are_those_that_the_judge_says(told: Any) -> None:
    judge, engine = told(lambda text, seed, vote: "Score: 7" if "A: x" in text else "Score: 1")
    found = judge.scored(texts("x", "y", "x"))
    assert found.scores == [0.7, 0.1, 0.7]
    assert found.columns["votes"] == [[0.7], [0.1], [0.7]]
    assert found.columns["answers"] == [["Score: 7"], ["Score: 1"], ["Score: 7"]]
    assert [text for text, _ in engine.asked] == [
        "Q: 1+1? Ref: 2 A: x",
        "Q: 1+1? Ref: 2 A: y",
    ], "equal samples are asked about once"


def test_votes_are_asked_again_and_combined(told: Any) -> None:
    def says(text: str, seed: int, vote: int) -> str:
        if vote == 2:
            return "Score: 10" if seed == 3 else "well"  # 3: the second time
        return f"Score: {4 + 2 * vote}"

    judge, engine = told(says, votes=3, temperature=0.5)
    found = judge.scored(texts("x"))
    assert found.scores == [pytest.approx((0.4 + 0.6 + 1.0) / 3)]
    assert found.metrics["vote_spread"].mean == pytest.approx(np.std([0.4, 0.6, 1.0]))
    assert found.metrics["answers_from_store"] == LoggedMetric(total=0, samples=6)
    assert [seed for _, seed in engine.asked] == [0, 3]
    judge, _ = told(lambda *_: "no idea", votes=3, temperature=0.5, name="other")
    (failed,) = judge.scored(texts("z")).scores
    assert isinstance(failed, Unscored)
    assert failed.reason.startswith("3 of 3 votes gave no score between 0 and 10")
    certain, engine = told(lambda *_: "no idea", temperature=0.0, name="certain")
    (failed,) = certain.scored(texts("z")).scores
    assert len(engine.asked) == 1, "the likeliest tokens are the same again"
    assert failed.reason == "1 of 1 votes gave no score between 0 and 10"


def test_an_answer_is_stored_and_asked_for_once(told: Any, tmp_path: Path) -> None:
    judge, engine = told(lambda *_: "Score: 5")
    judge.scored(texts("x"))
    again, other = told(lambda *_: "Score: 9")
    found = again.scored(texts("x", "x"))
    assert (found.scores, other.asked) == ([0.5, 0.5], [])
    assert found.metrics["answers_from_store"].mean == 1.0
    assert len(engine.asked) == 1
    longer, asked = told(lambda *_: "Score: 9", max_tokens=13)
    assert longer.scored(texts("x")).scores == [0.9] and len(asked.asked) == 1
    kept = list(Store(f"file://{tmp_path}/store").list("r/judged"))
    assert not any("/asked/" in key for key in kept), "what was asked with is removed"


def test_what_is_not_judged_is_failed(told: Any) -> None:
    judge, engine = told(lambda *_: "Score: 5", deadline=0.5)
    engine.unfinished = ("late",)
    scores = judge.scored(texts("x", "late", "y" * 120)).scores
    assert scores[0] == 0.5
    assert scores[1] == Unscored(reason="not judged within rewards.functions[].deadline = 0.5 s")
    assert isinstance(scores[2], Unscored) and "max_length = 120" in scores[2].reason


def test_a_row_without_a_value_is_failed(told: Any) -> None:
    judge, _ = told(lambda *_: "Score: 5")
    given = texts("x")
    found = judge.scored(
        SampleTexts(
            prompts=given.prompts, completions=["x"], completion_ids=[[1]], rows=[{"question": "q"}]
        )
    )
    assert found.scores == [
        Unscored(reason="the row has no value in the column answer of the rubric")
    ]


def test_a_dead_engine_is_built_anew(told: Any, tmp_path: Path) -> None:
    judge, engine = told(lambda *_: "Score: 5")
    engine.dead = True
    with pytest.raises(EngineDead):
        judge.scored(texts("x"))
    assert engine.closed
    assert list(Store(f"file://{tmp_path}/store").list("r/judged/asked")) == []
    engine.dead = False
    assert judge.scored(texts("x")).scores == [0.5]


@pytest.fixture
def engines() -> Iterator[list[JudgingEngine]]:
    made: list[JudgingEngine] = []
    yield made
    for one in made:
        one.close()


def sampled(folder: Path, tokenizer: Any, answers: Sequence[str]) -> tuple[Any, Any]:
    store = Store(f"file://{folder}/store")
    of_prompt = {"row": [{"question": "1+1?", "answer": "2"}], "group_id": np.zeros(1, np.int64)}
    prompts = write_batch(store, "r/prompts.safetensors", of_prompt)
    ids = [tokenizer(one, add_special_tokens=False)["input_ids"] for one in answers]
    columns = {
        "response_ids": [np.array(one, np.int32) for one in ids],
        "group_id": np.zeros(len(ids), np.int64),
    }
    return prompts, write_batch(store, "r/samples.safetensors", columns)


def test_a_random_model_judges_and_its_nonsense_is_failed(
    model: Path, tmp_path: Path, engines: list[JudgingEngine]
) -> None:
    reward = setting(model, tmp_path)
    engines.append(JudgingEngine(spec(tmp_path, reward)))
    prompts, samples = sampled(tmp_path, load_tokenizer(model), ["2", "3"])
    result = engines[0].score(prompts, samples, "r/scores.safetensors")
    store = Store(f"file://{tmp_path}/store")
    assert np.isnan(result.ref.fetch_numpy(store, "score/judge")[0]).all()
    errors = result.ref.fetch_list(store, "extra/judge/error")
    assert all(str(one).startswith("1 of 1 votes gave no score") for one in errors)
    answers = result.ref.fetch_list(store, "extra/judge/answers")
    assert all(len(one) == 1 for one in answers)
    (code,) = result.code
    assert code.name == "judge" and code.module.startswith("xxh3:")
    assert result.metrics["judge/answers_from_store"].mean == 0.0
    assert result.metrics["judge/seconds_per_sample"].samples == 2
    assert code.settings["kind"] == "local_judge" and "deadline" not in code.settings
    assert len([key for key in store.list("r/judged/models") if "manifest" in key]) == 1


@pytest.mark.parametrize(
    ("engine", "temperature"),
    [
        ("transformers", 0.0),
        ("transformers", 1.0),
        pytest.param("vllm", 1.0, marks=[pytest.mark.vllm, pytest.mark.slow]),
    ],
)
def test_the_same_question_gets_the_same_answer(
    model: Path, tmp_path: Path, engine: str, temperature: float
) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    answers = []
    for number, beside in enumerate((["2"], ["5", "2", "7"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        reward = setting(
            model, folder, engine=engine, temperature=temperature, votes=1, kv_cache_gib=0.1
        )
        judge = LocalJudge(reward, spec(folder, reward))
        questions = [f"A: {one}" for one in beside]
        found = judge._generated(questions, 4, time.monotonic() + 600)
        answers.append(found[questions.index("A: 2")])
        judge.close()
    assert answers[0] == answers[1] and answers[0]


def test_what_cannot_be_had_is_one_sentence(model: Path, tmp_path: Path) -> None:
    gone = setting(tmp_path / "nothing", tmp_path)
    with pytest.raises(ValueError, match=r"rewards.functions\[\].model"):
        check_local_judge(gone)
    check_local_judge(setting(model, tmp_path))
    with pytest.raises(ValueError, match="leaves no room for a question"):
        setting(model, tmp_path, max_tokens=120)
    chat = setting(model, tmp_path, template="chat")
    tokenizer = load_tokenizer(model)
    if not tokenizer.chat_template:
        with pytest.raises(ValueError, match="has no chat template"):
            LocalJudge(chat, spec(tmp_path, chat))
    assert local_judge._number("a") == local_judge._number("a") != local_judge._number("b")


def test_before_a_run_its_rows_are_checked(model: Path, tmp_path: Path) -> None:
    data = spec(tmp_path).data
    source = open_source(data.source)
    good = setting(model, tmp_path)
    check_rewards(RewardsConfig(functions=(good,)), data, source)
    other = tmp_path / "other.md"
    other.write_text("Steps: {steps} A: {completion}")
    bad = good.model_copy(update={"rubric": str(other)})
    with pytest.raises(ValueError, match="steps"):
        check_rewards(RewardsConfig(functions=(bad,)), data, source)
