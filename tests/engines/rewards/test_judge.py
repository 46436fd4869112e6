"""Judges, against an endpoint that answers as it is told: scores, votes, failures, the cache, the key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.data import DataConfig, FileSource
from configs.rewards import SCORE_LINE, JudgeReward, RewardsConfig
from engines.rewards.checks import check_rewards
from engines.rewards.child import Logged
from engines.rewards.judge import JudgeAnswers, JudgeScorer, Pace, judge_scorer, retry_after
from engines.rewards.judge_rubric import Rubric, as_text, read_rubric, score_of
from engines.rewards.protocol import RewardCall, Unscored
from engines.rewards.runner import RewardRunner
from storage.objects.store import Store
from storage.prompts.datasets import open_source
from tests.engines.rewards.judge_server import JudgeServer, serving

KEY = "planted-key-77c1"
RUBRIC = 'Question: {prompt}\nReference: {answer}\nSay {"score": 1} or {{prompt}}.\nA: {completion}'


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with serving() as found:
        yield found


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)


@pytest.fixture
def rubric(tmp_path: Path) -> Path:
    path = tmp_path / "rubric.md"
    path.write_text(RUBRIC)
    return path


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2"}\n')
    return DataConfig(source=FileSource(path=str(path)))


@pytest.fixture
def answers(tmp_path: Path) -> JudgeAnswers:
    return JudgeAnswers(store=Store(f"file://{tmp_path}/store"), run="run")


def judge(server: JudgeServer, rubric: Path, **settings: Any) -> JudgeReward:
    asked = {"retry_pause": 0.001, "retries": 1, "key_variable": "JUDGE_KEY", **settings}
    return JudgeReward(url=server.url, model="referee", rubric=str(rubric), **asked)


def call(*completions: str) -> RewardCall:
    count = len(completions)
    return RewardCall(
        prompts=["1+1?"] * count,
        completions=completions,
        completion_ids=[[]] * count,
        rows=[{"answer": "2"}] * count,
        global_step=0,
        max_steps=1,
        epoch=0.0,
    )


def scored(scorer: JudgeScorer, *completions: str) -> tuple[list[float | str], Logged]:
    """Scores, or reasons; and what was logged."""
    logged = Logged()
    found = scorer(call(*completions), logged)
    return [one.reason if isinstance(one, Unscored) else one for one in found], logged


# What is asked, and what an answer means


def test_a_rubric_is_filled_once_and_keeps_other_braces() -> None:
    rubric = Rubric(text=RUBRIC)
    assert rubric.columns == ("answer",)
    filled = rubric.filled("{answer}?", "{{completion}} {x}", {"answer": 2, "prompt": "other"})
    assert filled == (
        'Question: {answer}?\nReference: 2\nSay {"score": 1} or {prompt}.\nA: {{completion}} {x}'
    )
    with pytest.raises(ValueError, match="no value in the column answer"):
        rubric.filled("?", "!", {"answer": None})


def test_messages_are_told_with_their_roles() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    assert as_text([user]) == "Hi"
    assert as_text([system, user]) == "system: Be brief.\n\nuser: Hi"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Score: 7", 0.7),
        ("**Score:** 7/10", 0.7),
        ('{"score": 2.5}', 0.25),
        ("Score: 3\nNo, score = 10.", 1.0),
        ("Score: 11", None),
        ("Score: -3", None),
        ("Score: 7,5", None),
        ("Underscore: 7", None),
        ("It scores 7", None),
        ("7", None),
    ],
)
def test_the_last_score_on_the_scale_counts(answer: str, score: float | None) -> None:
    assert score_of(answer, SCORE_LINE, (0.0, 10.0)) == score


def test_a_pattern_of_ones_own() -> None:
    assert score_of("grade B", r"grade ([ABC])", (0.0, 1.0)) is None  # no number
    assert score_of("[[2]] then [[3]]", r"\[\[(\d+)\]\]", (1.0, 5.0)) == 0.5


# Scores and votes


def test_scores_of_a_run_with_all_that_is_stored_of_them(
    server: JudgeServer, rubric: Path, data: DataConfig, answers: JudgeAnswers
) -> None:
    """In its process: values, columns, metrics, identity; and no key anywhere."""
    rewards = RewardsConfig(
        functions=[judge(server, rubric, weight=2.0, options={"reasoning_effort": "low"})]
    )
    asked = call("fine", "leaks", "echo", "mute", "fine")
    with RewardRunner(rewards, data, answers) as runner:
        scores = runner.score(asked.prompts, asked.completions, asked.rows)
        (code,) = runner.code()
    assert scores.rewards.tolist() == pytest.approx([1.4, 0, 1.0, 0, 1.4])
    assert scores.failed.tolist() == [False, True, False, True, False]
    errors = {failure.index: failure.error for failure in scores.failures}
    assert errors == {
        1: f"the judge at {server.url} answered 401 Unauthorized: wrong key Bearer [key]",
        3: "1 of 1 votes gave no score between 0 and 10, though asked twice",
    }
    assert scores.extras["judge/votes"] == [[0.7], [None], [0.5], [None], [0.7]]
    assert scores.extras["judge/answers"] == [
        ["Good.\nScore: 7"],
        [None],
        ["Score: 5, Bearer [key] ?"],
        ["I like it."],
        ["Good.\nScore: 7"],
    ]
    # Five samples, of which two are one question, and of which one is asked twice.
    assert scores.metrics["judge/requests_per_sample"].mean == 1.0
    assert scores.metrics["judge/answers_from_store"].mean == 0.0
    assert scores.metrics["judge/request_seconds"].mean > 0
    assert code.source == Rubric(text=RUBRIC).digest and "httpx" in code.packages
    (sent,) = [one for one in server.requests if one["messages"][0]["content"].endswith("echo")]
    assert sent == {
        "path": "/v1/chat/completions",
        "model": "referee",
        "messages": [{"role": "user", "content": Rubric(text=RUBRIC).filled("1+1?", "echo", asked.rows[0])}],
        "temperature": 0.0,
        "max_tokens": 512,
        "seed": 0,
        "reasoning_effort": "low",
    }  # fmt: skip
    assert server.keys == {f"Bearer {KEY}"}
    stored = {name: answers.store.read(name) for name in answers.store.list()}
    assert RUBRIC.encode() in stored.values()
    seen = (*stored.values(), repr(scores).encode(), repr(code).encode())
    assert not [one for one in seen if KEY.encode() in one]


def test_votes_are_combined(server: JudgeServer, rubric: Path) -> None:
    settings: dict[str, Any] = {"votes": 3, "temperature": 1.0}
    mean = judge_scorer(judge(server, rubric, **settings))
    found, logged = scored(mean, "by-seed", "one-mute", "two-mute")
    assert found[:2] == pytest.approx([0.5, 0.8])
    assert found[2] == "2 of 3 votes gave no score between 0 and 10, though asked twice"
    assert logged.extras["votes"] == [[0.2, 0.4, 0.9], [0.8, 0.8, None], [0.8, None, None]]
    assert logged.means()["judge/vote_spread"] == pytest.approx((0.0866667**0.5 + 0) / 2)
    median = judge_scorer(judge(server, rubric, combine="median", **settings))
    assert scored(median, "by-seed")[0] == pytest.approx([0.4])


def test_a_vote_without_a_score_is_asked_once_more(server: JudgeServer, rubric: Path) -> None:
    found, logged = scored(judge_scorer(judge(server, rubric)), "late-score")
    assert found == [0.7]
    assert [one["seed"] for one in server.requests] == [0, 1]
    assert logged.extras["answers"] == [["Good.\nScore: 7"]]


# Failures


@pytest.mark.parametrize(
    ("completion", "said"),
    [
        ("broken", "answered 500 Internal Server Error: out of order, asked 2 times"),
        ("nonsense", "answered what is no chat completion: '<html>', asked 2 times"),
        ("far", "answered 429 Too Many Requests: slow down; another try would come after "
                "rewards.functions[].deadline = 300 s"),
    ],
)  # fmt: skip
def test_a_request_that_fails_is_a_failed_sample(
    server: JudgeServer, rubric: Path, completion: str, said: str
) -> None:
    found, _ = scored(judge_scorer(judge(server, rubric)), completion)
    assert found == [f"the judge at {server.url} {said}"]


def test_a_dropped_connection_is_a_failed_sample(server: JudgeServer, rubric: Path) -> None:
    (said,), _ = scored(judge_scorer(judge(server, rubric)), "drop")
    assert str(said).startswith(f"the judge at {server.url} cannot be reached (")
    assert str(said).endswith("), asked 2 times")
    assert server.seen == {"drop": 2}


def test_a_request_that_hangs_is_a_failed_sample(server: JudgeServer, rubric: Path) -> None:
    found, _ = scored(judge_scorer(judge(server, rubric, timeout=0.2)), "hang")
    assert found == [f"the judge at {server.url} did not answer within 0.2 s, asked 2 times"]


def test_at_the_deadline_only_what_is_late_fails(server: JudgeServer, rubric: Path) -> None:
    scorer = judge_scorer(judge(server, rubric, deadline=2.0))
    found, _ = scored(scorer, "hang", "fine")
    assert found == ["not judged within rewards.functions[].deadline = 2 s", 0.7]
    assert scored(scorer, "fine")[0] == [0.7]  # the process goes on


def test_a_busy_endpoint_is_asked_again(server: JudgeServer, rubric: Path) -> None:
    found, logged = scored(judge_scorer(judge(server, rubric)), "busy")
    assert found == [0.7] and server.seen == {"busy": 2}
    assert logged.means()["judge/retries_per_sample"] == 1.0


def test_an_error_that_will_not_pass_is_not_asked_again(server: JudgeServer, rubric: Path) -> None:
    scored(judge_scorer(judge(server, rubric, retries=5)), "leaks")
    assert server.seen == {"leaks": 1}


# Limits


def test_no_more_requests_at_once_than_allowed(server: JudgeServer, rubric: Path) -> None:
    """Two workers that share four requests have two each."""
    scorer = judge_scorer(judge(server, rubric, at_once=4), sharers=2)
    scored(scorer, *(f"slow {number}" for number in range(12)))
    assert len(server.requests) == 12
    assert server.most <= 2


def test_requests_are_spaced() -> None:
    now, slept = [100.0], list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    async def turns(pace: Pace, count: int) -> None:
        for _ in range(count):
            await pace.turn()

    pace = Pace(30.0, clock=lambda: now[0], sleep=sleep)
    asyncio.run(turns(pace, 3))
    assert slept == [2.0, 2.0]
    pace.hold(7.0)
    asyncio.run(turns(pace, 2))
    assert slept == [2.0, 2.0, 7.0, 2.0]


def test_who_gives_up_waiting_takes_no_turn() -> None:
    """Of a call that met its deadline: the next call does not wait for its requests."""
    now, waiting = [100.0], list[float]()

    async def sleep(seconds: float) -> None:
        waiting.append(seconds)
        await asyncio.Event().wait()

    async def given_up(pace: Pace) -> None:
        await pace.turn()
        tasks = [asyncio.create_task(pace.turn()) for _ in range(5)]
        while not waiting:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        now[0] += 2.0
        await pace.turn()

    asyncio.run(given_up(Pace(30.0, clock=lambda: now[0], sleep=sleep)))
    assert waiting == [2.0]


def test_how_long_an_endpoint_asks_to_wait() -> None:
    assert retry_after("12") == 12.0
    assert retry_after(None) == retry_after("soon") == 0.0
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after("Wed, 21 Oct 2099 07:28:00 GMT") > 1e9


# What was answered is not asked again


def test_a_call_that_is_made_again_asks_only_for_what_is_missing(
    server: JudgeServer, rubric: Path, answers: JudgeAnswers
) -> None:
    scored(judge_scorer(judge(server, rubric), answers), "fine", "broken")
    server.requests.clear()
    found, logged = scored(judge_scorer(judge(server, rubric), answers), "fine", "busy")
    assert found == [0.7, 0.7]
    assert {one["messages"][0]["content"].rpartition("A: ")[2] for one in server.requests} == {
        "busy"
    }
    assert logged.means()["judge/answers_from_store"] == 0.5


def test_another_scale_reads_the_same_answers(
    server: JudgeServer, rubric: Path, answers: JudgeAnswers
) -> None:
    scored(judge_scorer(judge(server, rubric), answers), "fine")
    again = judge_scorer(judge(server, rubric, scale=(0, 7), at_once=1), answers)
    assert scored(again, "fine")[0] == [1.0]
    assert len(server.requests) == 1


@pytest.mark.parametrize("change", ["model", "temperature", "rubric"])
def test_another_question_is_asked(
    server: JudgeServer, rubric: Path, answers: JudgeAnswers, change: str
) -> None:
    first = judge(server, rubric)
    scored(judge_scorer(first, answers), "fine")
    if change == "rubric":
        rubric.write_text("Now else.\nA: {completion}")
    update = {"model": {"model": "other"}, "temperature": {"temperature": 0.5}}.get(change, {})
    scored(judge_scorer(first.model_copy(update=update), answers), "fine")
    assert len(server.requests) == 2


def test_a_damaged_answer_is_asked_for_again(
    server: JudgeServer, rubric: Path, answers: JudgeAnswers
) -> None:
    scored(judge_scorer(judge(server, rubric), answers), "fine")
    (stored,) = [name for name in answers.store.list("run/judged") if name.endswith(".json")]
    answers.store.write(stored, b"{")
    for _ in range(2):
        assert scored(judge_scorer(judge(server, rubric), answers), "fine")[0] == [0.7]
    assert len(server.requests) == 2


def test_the_first_of_two_answers_stands(answers: JudgeAnswers) -> None:
    assert answers.keep("run/judged/ab/cd.json", "first") == "first"
    assert answers.keep("run/judged/ab/cd.json", "second") == "first"


# Settings, and checks before a run


def test_good_settings_pass_with_one_request(
    server: JudgeServer, rubric: Path, data: DataConfig
) -> None:
    rewards = RewardsConfig(functions=[judge(server, rubric)])
    check_rewards(rewards, data, open_source(data.source))
    assert len(server.requests) == 1


def test_what_a_run_would_fail_by_is_said_before(
    server: JudgeServer, rubric: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(data.source)

    def refused(**settings: Any) -> str:
        reward = judge(server, rubric, **settings)
        with pytest.raises(ValueError) as caught:
            check_rewards(RewardsConfig(functions=[reward]), data, source)
        return str(caught.value)

    rubric.write_text("Is it good? {completion} {difficulty}")
    assert "no column 'difficulty'" in refused()
    rubric.write_text("Is it good?")
    assert "has no {completion}" in refused()
    rubric.unlink()
    assert "cannot be read on" in refused() and "Set rewards.functions[].rubric" in refused()
    rubric.write_text("{completion}")
    monkeypatch.delenv("JUDGE_KEY")
    assert "the environment variable JUDGE_KEY, which is not set" in refused()
    monkeypatch.setenv("JUDGE_KEY", "two\nlines")
    assert "holds what is no key" in refused() and "lines" not in refused()
    assert server.requests == []
    gone = JudgeReward(url="http://127.0.0.1:9/v1", model="m", rubric=str(rubric))
    with pytest.raises(ValueError, match=r"cannot be reached \(ConnectError.*Set url, model and"):
        check_rewards(RewardsConfig(functions=[gone]), data, source)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "localhost:8000"}, "no base address of an API"),
        ({"url": "https://me:hidden@host/v1"}, "holds a password"),
        ({"url": "https://host/v1?api_key=hidden"}, "without a query"),
        ({"key_variable": "sk-hidden"}, "Put the key into a variable"),
        ({"options": {"api_key": "hidden"}}, "looks like a credential"),
        ({"options": {"seed": 1}}, r"options\.seed is set by Refrain"),
        ({"score": "score"}, "has 0 groups"),
        ({"score": "(score"}, "is no regular expression"),
        ({"scale": [5, 1]}, "lowest score first"),
        ({"votes": 3}, "pays for the same answer several times"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], said: str) -> None:
    whole = {"url": "https://host/v1", "model": "m", "rubric": "rubric.md", **settings}
    with pytest.raises(ValueError, match=said) as caught:
        JudgeReward(**whole)
    sentences = [error["msg"] for error in caught.value.errors()]  # type: ignore[attr-defined]
    assert not any("hidden" in one for one in sentences)


def test_an_edited_rubric_is_another_reward(
    server: JudgeServer, rubric: Path, data: DataConfig
) -> None:
    rewards = RewardsConfig(functions=[judge(server, rubric)])
    found = []
    for text in (RUBRIC, RUBRIC + " Be strict."):
        rubric.write_text(text)
        with RewardRunner(rewards, data) as runner:
            (code,) = runner.code()
        found.append(code.source)
        assert code.source == read_rubric(str(rubric)).digest
    assert found[0] != found[1]
