"""Scoring in processes of their own: values, TRL's calling convention, hangs, crashes, policies."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from configs.data import DataConfig, FileSource, ReasoningGymSource
from configs.rewards import FunctionReward, MathReward, ReasoningGymReward, RewardsConfig
from engines.rewards.builtin import extract
from engines.rewards.checks import check_rewards
from engines.rewards.protocol import TrainerState
from engines.rewards.runner import RewardRunner, Scores
from storage.prompts.datasets import open_source

# Written as for TRL's GRPOTrainer; a completion's text says how it misbehaves.
FUNCTIONS = """
import asyncio, math, os, re, subprocess, sys, time
import numpy as np

def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def matches(completions, answer):
    return [completion == a for completion, a in zip(completions, answer)]

def chat_length(prompts, completions, **kwargs):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [len(completion[0]["content"]) for completion in completions]

def picky(completions, **kwargs):
    scores = []
    for text in completions:
        if text == "raise": raise KeyError("no such thing")
        if text == "hang": time.sleep(600)
        if text == "regex": re.match(r"(a+)+$", "a" * 60 + "b")
        if text == "segfault": os.kill(os.getpid(), 11)
        if text == "exit": os._exit(3)
        if text == "quit": sys.exit("enough")
        scores.append({"nan": math.nan, "inf": math.inf, "huge": 1e39, "none": None, "text": "1.0",
                       "list": [1.0]}.get(text, 1.0))
    return scores

def short(completions, **kwargs):
    return [1.0]

def nothing(completions, **kwargs):
    pass

def distinct(completions, **kwargs):
    return [1.0 for _ in set(completions)]

def logs_once(completions, log_extra, **kwargs):
    log_extra("seen", ["once"])
    return [1.0] * len(completions)

def leaves_out(completions, **kwargs):
    return [1.0 for text in completions if text]

def always_raises(completions, **kwargs):
    raise ConnectionError("the judge is down")

async def slow_judge(completions, **kwargs):
    async def one(text):
        await asyncio.sleep(0.05)
        return float(len(text))
    return await asyncio.gather(*[one(text) for text in completions])

def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric,
               answer, scale, hint, **kwargs):
    assert "prompt" not in kwargs and set(kwargs) == {"question"}
    log_extra("seen", [text.upper() for text in completions])
    log_metric("calls", len(completions))
    return [len(ids) * scale + trainer_state.global_step for ids in completion_ids]

def logs(prompts, completions, trainer_state, log_extra=None, log_metric=None, **kwargs):
    assert "environments" not in kwargs  # TRL passes them where there are some
    right = [float(text == "right") for text in completions]
    if "raise" in completions:
        log_metric("before", 1.0)
        log_extra("before", completions)
        raise ValueError("guilty")
    log_metric("accuracy", sum(right) / len(right))
    for position, text in enumerate(completions):  # TRL takes a column in parts too
        log_metric("length", len(text))
        log_extra("parsed", [{"text": text, "at": (position, 0.5), "kind": float}])
    log_extra("score", np.float32([0.5] * len(completions)))
    log_extra("odd", [math.nan if text == "right" else None for text in completions])
    if "right" in completions:
        log_metric("mean of nothing", math.nan)
    return right

async def logs_late(completions, log_extra, log_metric, **kwargs):
    await asyncio.sleep(0)
    log_metric("accuracy", np.float32(0.5))
    log_extra("text", completions)
    return [1.0] * len(completions)

def logs_badly(completions, log_extra, log_metric, what, **kwargs):
    if what == "text": log_metric("accuracy", "0.5")
    if what == "none": log_metric("accuracy", None)
    if what == "name": log_metric(3, 0.5)
    if what == "letters": log_extra("parsed", "ab")
    if what == "number": log_extra("parsed", 3)
    if what == "one more": log_extra("parsed", [*completions, "one more"])
    return [1.0] * len(completions)

def logs_halves(completions, log_extra, **kwargs):
    log_extra("text", ["a\\ud83d", {"\\udc00": ["\\ud83d\\ude00"]}])
    return [1.0] * len(completions)

def asks_state(completions, trainer_state, **kwargs):
    return [trainer_state.num_input_tokens_seen] * len(completions)

def short_only(completions, **kwargs):
    return [1.0 if len(text) < 3 else None for text in completions]

def with_child(completions, **kwargs):
    if completions[0] == "hang":
        child = subprocess.Popen(["sleep", "600"])
        with open(os.environ["PID_FILE"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        child.wait()
    return [1.0] * len(completions)

def hinted(completions, hint):
    if "raise" in completions:
        raise ValueError("guilty")
    return [0.0 if one is None else float(one) for one in hint]

def asked(completions, prompt):
    return [1.0] * len(completions)

def wrote(completions, completion, answer):
    return [1.0] * len(completions)

def asked_or_not(completions, prompt=None, completion=None):
    return [1.0] * len(completions)

def counts_calls(completions, **kwargs):
    with open(os.environ["PID_FILE"], "a") as file:
        file.write(f"{len(completions)}\\n")
    if "raise" in completions:
        raise ValueError("guilty")
    return [1.0] * len(completions)

not_a_function = 3
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    (tmp_path / "broken_module.py").write_text("import nowhere_to_be_found")
    (tmp_path / "no_python.py").write_text("def fn(:")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return DataConfig(source=FileSource(path=str(path)))


def user(name: str, weight: float = 1.0, **params: float | str) -> FunctionReward:
    return FunctionReward(path=f"my_rewards:{name}", weight=weight, params=params)


class Scoring:
    """Runners that are closed at the end of a test."""

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        self.runners: list[RewardRunner] = []

    def runner(self, *functions: FunctionReward, timeout: float = 30.0) -> RewardRunner:
        config = RewardsConfig(functions=functions, timeout=timeout)
        self.runners.append(RewardRunner(config, self.data))
        return self.runners[-1]

    def __call__(
        self, completions: list[str], *functions: FunctionReward, timeout: float = 30.0
    ) -> Scores:
        n = len(completions)
        rows = [{"question": "1?", "answer": str(i)} for i in range(n)]
        ids = [[1] * len(text) for text in completions]
        runner = self.runner(*functions, timeout=timeout)
        return runner.score(["1?"] * n, completions, rows, ids)


@pytest.fixture
def score(data: DataConfig) -> Iterator[Scoring]:
    scoring = Scoring(data)
    yield scoring
    for runner in scoring.runners:
        runner.close()


def errors(scores: Scores) -> dict[int, str]:
    assert {failure.index for failure in scores.failures} == set(np.flatnonzero(scores.failed))
    assert np.isfinite(scores.rewards).all()
    assert np.isfinite(scores.components).all()
    assert scores.rewards.dtype == scores.components.dtype == np.float32
    assert not scores.rewards[scores.failed].any()
    return {failure.index: failure.error for failure in scores.failures}


# Values


def test_weighted_sum(score: Scoring) -> None:
    scores = score(["0", "three", ""], user("length", 0.5), user("matches", 2.0))
    assert scores.rewards.tolist() == [2.5, 2.5, 0.0]
    assert scores.names == ("length", "matches")
    assert scores.components.tolist() == [[1, 1], [5, 0], [0, 0]]
    assert scores.means() == {"length": 2.0, "matches": pytest.approx(1 / 3)}
    assert errors(scores) == {}


def test_no_samples(score: Scoring) -> None:
    scores = score([], user("length"))
    assert scores.rewards.shape == (0,)
    assert scores.components.shape == (0, 1)


def test_every_argument_that_trl_passes(score: Scoring) -> None:
    runner = score.runner(user("everything", scale=2.0, hint=1))
    rows = [{"prompt": "p", "question": "q", "answer": "a"}] * 2
    state = TrainerState(global_step=10, max_steps=20)
    scores = runner.score(["p", "p"], ["ab", "c"], rows, [[1, 2, 3], [4]], state)
    assert scores.rewards.tolist() == [16.0, 12.0]
    assert scores.extras == {"everything/seen": ["AB", "C"]}
    assert means(scores) == {"calls": 2.0}


def means(scores: Scores) -> dict[str, float]:
    return {name: metric.mean for name, metric in scores.metrics.items()}


def test_what_is_logged_as_for_trl_is_kept(score: Scoring) -> None:
    scores = score(["right", "no", "no", "right"], user("logs"), user("logs_late"))
    assert scores.rewards.tolist() == [2.0, 1.0, 1.0, 2.0]
    assert means(scores) == {"accuracy": 0.5, "length": 3.5}
    assert scores.metrics["accuracy"].samples == 8  # two functions, one name: as TRL has it
    assert scores.extras == {
        "logs/parsed": [
            {"text": text, "at": [position, 0.5], "kind": "<class 'float'>"}
            for position, text in enumerate(["right", "no", "no", "right"])
        ],
        "logs/score": [0.5] * 4,
        "logs/odd": [None] * 4,
        "logs_late/text": ["right", "no", "no", "right"],
    }


def test_samples_that_are_scored_again_are_logged_once(score: Scoring) -> None:
    """Found by halves: 7 samples in calls of 4, 2 and 1 count as in one call of 7."""
    completions = ["right", "no", "no", "no", "no", "raise", "right", "right"]
    scores = score(completions, user("logs"))
    assert list(errors(scores)) == [5]
    assert scores.metrics["accuracy"].samples == 7
    assert means(scores) == {"accuracy": pytest.approx(3 / 7), "length": pytest.approx(23 / 7)}
    assert scores.extras["logs/score"] == [0.5] * 5 + [None] + [0.5] * 2
    assert set(scores.extras) == {"logs/parsed", "logs/score", "logs/odd"}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("text", r"TypeError: log_metric\('accuracy', …\): '0.5' is not a number \(my_rewards.py:"),
        ("none", "None is not a number"),
        ("name", r"log_metric\(3, …\): a metric's name is a string"),
        ("letters", "the values are a string, not a list"),
        ("number", "'int' object is not iterable"),
        ("one more", "gave log_extra 2 values of 'parsed' for 1 samples"),
    ],
)
def test_a_wrong_log_fails_its_samples(score: Scoring, what: str, said: str) -> None:
    scores = score(["a", "b"], user("logs_badly", what=what))
    found = errors(scores)
    assert sorted(found) == [0, 1]
    assert all(re.search(said, error) for error in found.values()), found
    assert scores.metrics == {} and scores.extras == {}


def test_what_is_logged_can_be_written(score: Scoring) -> None:
    """Half of a surrogate pair cannot; a pair is one character."""
    logged = score(["a", "b"], user("logs_halves")).extras["logs_halves/text"]
    assert logged == ["a\ufffd", {"\ufffd": ["\U0001f600"]}]


def test_a_state_that_is_not_known_is_no_default(score: Scoring) -> None:
    said = errors(score(["a"], user("asks_state")))[0]
    assert said.startswith(
        "AttributeError: trainer_state has no num_input_tokens_seen in Refrain: it has global_step, "
        "max_steps and epoch (my_rewards.py:"
    )


def test_conversations(score: Scoring) -> None:
    runner = score.runner(user("chat_length"))
    prompt = [{"role": "user", "content": "hi"}]
    scores = runner.score([prompt, prompt], ["four", ""], [{}, {}])
    assert scores.rewards.tolist() == [4.0, 0.0]


def test_async_functions_are_awaited_together(score: Scoring) -> None:
    runner = score.runner(user("slow_judge"))
    runner.start()
    started = time.perf_counter()
    for _ in range(2):
        assert runner.score([""] * 20, ["abc"] * 20, [{}] * 20).rewards.tolist() == [3.0] * 20
    assert time.perf_counter() - started < 1.5  # 2 s one after the other


def test_none_means_not_applicable(score: Scoring) -> None:
    scores = score(["ab", "abc"], user("short_only", 2.0), user("length"))
    assert scores.rewards.tolist() == [4.0, 3.0]
    assert scores.applied.tolist() == [[True, True], [False, True]]
    assert scores.means()["short_only"] == 1.0
    alone = score(["ab", "abc"], user("short_only"))
    assert alone.failed.tolist() == [False, True]
    assert "no reward function applies" in errors(alone)[1]


# Failures


def test_wrong_values_fail_their_samples_only(score: Scoring) -> None:
    wrong = ["nan", "inf", "huge", "text", "list", "none"]
    said = errors(score([*wrong, "fine"], user("picky")))
    assert sorted(said) == [0, 1, 2, 3, 4, 5]
    assert said[0] == "returned nan, which is not a finite float32"
    assert said[3] == "returned '1.0', which is not a number"
    assert said[4] == "returned [1.0], which is not a number"


def test_an_overflowing_sum_is_a_failure(score: Scoring) -> None:
    assert "finite float32" in errors(score(["abc"], user("length", weight=3e38)))[0]


@pytest.mark.parametrize("count", [1, 3, 16])
def test_an_exception_fails_the_guilty_sample_only(score: Scoring, count: int) -> None:
    completions = ["fine"] * 16
    guilty = list(range(0, 16, 16 // count))[:count]
    for index in guilty:
        completions[index] = "raise"
    scores = score(completions, user("picky"), user("length"))
    said = errors(scores)
    assert sorted(said) == guilty
    assert set(said.values()) == {"KeyError: 'no such thing' (my_rewards.py:18)"}
    assert scores.applied[:, 1].all()


def test_few_calls_find_a_sample_that_raises(
    score: Scoring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PID_FILE", str(tmp_path / "calls"))
    completions = ["fine"] * 64
    completions[37] = "raise"
    assert list(errors(score(completions, user("counts_calls")))) == [37]
    calls = (tmp_path / "calls").read_text().split()
    assert calls == ["64"] + [str(n) for n in (32, 16, 8, 4, 2, 1) for _ in range(2)]


@pytest.mark.parametrize("text", ["segfault", "exit", "quit"])
def test_a_crash_fails_the_guilty_sample_only(score: Scoring, text: str) -> None:
    said = errors(score(["fine", text, "fine", "fine"], user("picky")))
    assert list(said) == [1]
    reason = {"segfault": "killed by SIGSEGV", "exit": "exited with 3", "quit": "exited with 1"}
    assert said[1] == f"its process {'was ' if text == 'segfault' else ''}{reason[text]}"


@pytest.mark.parametrize("text", ["hang", "regex"])
def test_a_hang_is_stopped_and_fails_the_guilty_samples_only(score: Scoring, text: str) -> None:
    """A regex that backtracks holds the interpreter's lock: nothing inside the process could end it."""
    started = time.perf_counter()
    said = errors(score([text, "fine", "fine", text, "raise", "fine"], user("picky"), timeout=0.8))
    assert sorted(said) == [0, 3, 4]
    assert said[0] == "took longer than 0.8 s"
    assert "no such thing" in said[4]
    assert time.perf_counter() - started < 5 * 0.8 + 8  # the budget, and new processes


def test_a_function_that_always_hangs_is_given_up(score: Scoring) -> None:
    started = time.perf_counter()
    said = errors(score(["hang"] * 40, user("picky"), user("length"), timeout=0.3))
    assert len(said) == 40
    assert said[39] == "not scored: finding the samples at fault took more than 1.2 s"
    assert time.perf_counter() - started < 30


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("always_raises", "ConnectionError: the judge is down"),
        ("short", "returned 1 values for"),
        ("nothing", "returned None for 1 sample"),
    ],
)
def test_a_function_that_never_works(score: Scoring, name: str, said: str) -> None:
    scores = score(["a", "b", "c"], user(name))
    found = errors(scores)
    assert sorted(found) == [0, 1, 2]  # `short` too, which is right with one sample at a time
    assert all(said in error for error in found.values())
    assert scores.failed.all()


@pytest.mark.parametrize("name", ["distinct", "logs_once"])
def test_a_function_that_miscounts_gives_no_sample_a_reward(score: Scoring, name: str) -> None:
    found = errors(score(["a", "a", "a", "a"], user(name)))
    assert sorted(found) == [0, 1, 2, 3]
    assert errors(score(["a"], user(name))) == {}


def test_a_function_that_leaves_a_sample_out_fails_that_one(score: Scoring) -> None:
    found = errors(score(["a", "b", "", "d"], user("leaves_out")))
    assert list(found) == [2]
    assert "returned 0 values for 1 sample" in found[2]


def test_a_process_killed_between_calls_is_replaced(score: Scoring) -> None:
    runner = score.runner(user("picky"))
    assert errors(runner.score(["", ""], ["fine"] * 2, [{}, {}])) == {}
    [child] = reward_children()
    child.kill()
    psutil.wait_procs([child], timeout=5)
    assert errors(runner.score(["", ""], ["fine"] * 2, [{}, {}])) == {}


def reward_children() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children()
        if process.status() != psutil.STATUS_ZOMBIE
        and any("engines.rewards.child" in part for part in process.cmdline())
    ]


def test_what_a_hanging_function_started_is_killed_too(
    score: Scoring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pids"))
    assert errors(score(["hang"], user("with_child"), timeout=0.5)) == {0: "took longer than 0.5 s"}
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert gone(pids, seconds=5)


def gone(pids: list[int], seconds: float) -> bool:
    """Whether these processes end; one that has ended but has no parent to reap it counts."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if psutil.pid_exists(pid)]
        if all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in alive):
            return True
        time.sleep(0.02)
    return False


def test_closing_ends_a_call_under_way(score: Scoring) -> None:
    runner = score.runner(user("picky"))
    runner.start()
    threading.Timer(0.3, runner.close).start()
    started = time.perf_counter()
    with pytest.raises(RuntimeError, match="has been closed"):
        runner.score([""], ["hang"], [{}])
    assert time.perf_counter() - started < 5
    assert reward_children() == []


def test_reward_processes_die_with_their_worker(tmp_path: Path, data: DataConfig) -> None:
    """A worker killed while a function holds the interpreter's lock in a task thread's call."""
    program = textwrap.dedent(
        f"""
        import sys, threading
        from configs.data import DataConfig, FileSource
        from configs.rewards import FunctionReward, RewardsConfig
        from engines.rewards.runner import RewardRunner
        sys.path.insert(0, {str(tmp_path)!r})
        runner = RewardRunner(
            RewardsConfig(functions=[FunctionReward(path="my_rewards:picky")]),
            DataConfig(source=FileSource(path="x.jsonl")),
        )
        runner.start()
        def task(text):
            return runner.score([""], [text], [{{}}]).failed
        for text in ("fine", "regex"):
            thread = threading.Thread(target=task, args=(text,))
            thread.start()
            if text == "fine":  # the thread in which the process was started ends
                thread.join()
                assert not task("fine").any()
                print("warm", flush=True)
        thread.join()
        """
    )
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "warm\n"
        time.sleep(0.3)
        [child] = psutil.Process(worker.pid).children()
        assert child.cpu_times().user > 0.05
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    assert gone([child.pid], seconds=5)


# Built-in scorers


@pytest.mark.parametrize(
    ("part", "completion", "found"),
    [
        ("last_integer", "3 + 4 = 7.", "7"),
        ("last_integer", "so -12, or 1,234", "1234"),
        ("last_integer", "5 - 8 = -3", "-3"),
        ("last_integer", "none", None),
        ("last_number", "it is 2.50 or .5", ".5"),
        ("last_number", "costs $1,200.75.", "1200.75"),
        ("answer_tag", "<answer>1</answer> no <answer> 2\n</answer>", "2"),
        ("answer_tag", "<answer>1", None),
        ("whole", " all of it ", "all of it"),
    ],
)
def test_extraction(part: str, completion: str, found: str | None) -> None:
    assert extract(completion, part) == found


def test_reasoning_gym_scores(score: Scoring) -> None:
    source = ReasoningGymSource(task="chain_sum", size=8, params={"min_terms": 2, "max_terms": 2})
    data = DataConfig(source=source)
    rows = open_source(source).rows(range(8))
    config = RewardsConfig(functions=[ReasoningGymReward(extract="last_integer")])
    runner = RewardRunner(config, data)
    score.runners.append(runner)
    right = [f"1 + 1 is 2, so: {row['answer']}." for row in rows]
    scores = runner.score(["?"] * 8, right, rows)
    assert scores.rewards.tolist() == [1.0] * 8
    wrong = runner.score(["?"] * 3, ["", "no idea", "1000000007"], rows[:3])
    assert errors(wrong) == {}
    assert wrong.rewards.max() < 0.1
    runner.close()


def test_math_scores(data: DataConfig) -> None:
    config = RewardsConfig(functions=[MathReward()], timeout=6)
    answers = ["so\n#### 1,200", "#### 72", "#### 72", "\\frac{1}{3}", "0.5", "####", "#### 3"]
    completions = [
        "We get \\boxed{1200}",
        "3 + 4 = 7, so the answer is 72.",
        "71",
        "$\\frac{2}{6}$",
        "The answer is $\\frac12$.",
        "4",
        "$(9^{9^{9^{9^9}}})!$",
    ]
    rows = [{"answer": answer} for answer in answers]
    with RewardRunner(config, data) as runner:
        started = time.perf_counter()
        scores = runner.score([""] * 7, completions, rows)
        assert time.perf_counter() - started < 60
    said = errors(scores)
    assert scores.rewards[:5].tolist() == [1, 1, 0, 1, 1]
    assert "no reward function applies" in said[5]
    # Expensive maths is worth 0; on a machine that is busy with other things it is failed.
    assert said.get(6) == "took longer than 1 s" or scores.rewards[6] == 0


@pytest.mark.parametrize("columns", [("prompt",), ("question", "prompt", "completion")])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("asked", "takes prompt, which no function is given.* comes as prompts"),
        ("wrote", "takes completion, which no function is given.* Rename the parameter"),
    ],
)
def test_a_parameter_that_no_function_is_given_is_refused(
    tmp_path: Path, columns: tuple[str, ...], name: str, said: str
) -> None:
    path = tmp_path / "named.jsonl"
    path.write_text(json.dumps(dict.fromkeys((*columns, "answer"), "1+1=")))
    source = FileSource(path=str(path))
    data = DataConfig(source=source, prompt_column=columns[0])
    with pytest.raises(ValueError, match=said) as caught:
        check_rewards(RewardsConfig(functions=[user(name)]), data, open_source(source))
    assert "\n" not in str(caught.value)
    check_rewards(RewardsConfig(functions=[user("asked_or_not")]), data, open_source(source))
    set_here = user(name, prompt="a", completion="b")
    check_rewards(RewardsConfig(functions=[set_here]), data, open_source(source))


def test_a_column_that_only_some_rows_have_is_none_in_the_others(tmp_path: Path) -> None:
    """In every call, whichever of the rows it has: alone, and where samples are scored again."""
    path = tmp_path / "later.jsonl"
    rows: list[dict[str, object]] = [{"question": "a"}, {"question": "b", "hint": 2}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source=FileSource(path=str(path)))
    config = RewardsConfig(functions=[user("hinted")])
    check_rewards(config, data, open_source(data.source))
    with RewardRunner(config, data) as runner:
        for asked, rewards in (([0, 1], [0, 2]), ([0], [0]), ([1], [2]), ([0, 0], [0, 0])):
            found = runner.score([""] * len(asked), [""] * len(asked), [rows[i] for i in asked])
            assert (errors(found), found.rewards.tolist()) == ({}, rewards)
        again = runner.score([""] * 3, ["", "raise", ""], [rows[0], rows[0], rows[1]])
        assert list(errors(again)) == [1] and again.rewards.tolist() == [0, 0, 2]
        elsewhere = tmp_path / "none.jsonl"
        elsewhere.write_text(json.dumps({"question": "c"}))
        of_others = FileSource(path=str(elsewhere))
        missing = runner.score(
            [""], [""], [{"question": "c"}], source=lambda: open_source(of_others)
        )
        assert "hint" in errors(missing)[0], "no row of those has it: a mistake, and no 0"
        with pytest.raises(ValueError, match="needs a column 'hint'"):
            check_rewards(config, data, open_source(of_others))


# Checks before a run


def test_good_settings_pass(data: DataConfig) -> None:
    source = open_source(data.source)
    config = RewardsConfig(functions=[user("length"), user("matches"), MathReward()])
    check_rewards(config, data, source)
    assert "my_rewards" not in sys.modules


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "nowhere_at_all:fn",
            "nowhere_at_all:fn cannot be loaded: there is no module 'nowhere_at_all'",
        ),
        ("my_rewards:fnn", "my_rewards:fnn cannot be loaded: module 'my_rewards' has no 'fnn'"),
        ("nowhere/rewards.py:fn", "there is no file '/.*/nowhere/rewards.py'"),
        ("{tmp}/my_rewards.py:fnn", "file '/.*/my_rewards.py' has no 'fnn'"),
        ("{tmp}/broken_module.py:fn", r"'nowhere_to_be_found' \(broken_module.py:1\)"),
        ("{tmp}/no_python.py:fn", r"SyntaxError: .* \(no_python.py, line 1\)"),
        ("my_rewards:not_a_function", "is a int, not a function"),
        ("broken_module:fn", "No module named 'nowhere_to_be_found'"),
        (
            "my_rewards:everything",
            "needs a column 'scale'; the columns of .* are: question, answer",
        ),
    ],
)
def test_bad_functions_are_refused(data: DataConfig, tmp_path: Path, path: str, said: str) -> None:
    config = RewardsConfig(functions=[FunctionReward(path=path.replace("{tmp}", str(tmp_path)))])
    with pytest.raises(ValueError, match=said):
        check_rewards(config, data, open_source(data.source))


NEIGHBOURS = {
    "research/rewards.py": """
        import configs
        from engines.judge import judged
        from tasks.names import NAME

        def named(completions, log_extra, **kwargs):
            from configs.late import LATE  # when it is called
            log_extra("from", [configs.WHOSE + NAME + LATE] * len(completions))
            return [judged(text) for text in completions]
        """,
    "research/configs/__init__.py": "WHOSE = 'the user '",
    "research/configs/late.py": "LATE = ' later'",
    "research/tasks/__init__.py": "",
    "research/tasks/names.py": "NAME = 'of the research folder'",
    "research/engines/__init__.py": "",
    "research/engines/judge.py": "def judged(text): return float(len(text))",
}


def test_a_function_by_its_file_finds_its_own_neighbours(
    score: Scoring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are called as packages of ours; and an edit of the file is another reward code."""
    for name, text in NEIGHBOURS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    reward = FunctionReward(path="research/rewards.py:named")
    assert reward.path == f"{tmp_path}/research/rewards.py:named" and reward.label == "named"
    scores = score(["four", "a"], reward)
    assert scores.rewards.tolist() == [4.0, 1.0]
    assert scores.extras["named/from"] == ["the user of the research folder later"] * 2
    (before,) = score.runner(reward).code()
    with (tmp_path / "research/rewards.py").open("a") as file:
        file.write("\n# edited\n")
    (after,) = score.runner(reward).code()
    assert (before.source, before.packages) == (after.source, {})
    assert before.source and before.module != after.module


def test_rewards_that_do_not_fit_the_data_are_refused(data: DataConfig) -> None:
    source = open_source(data.source)
    with pytest.raises(ValueError, match="Set data.source.kind = reasoning_gym"):
        check_rewards(RewardsConfig(functions=[ReasoningGymReward()]), data, source)
    with pytest.raises(ValueError, match="no column 'solution'"):
        math = MathReward(answer_column="solution")
        check_rewards(RewardsConfig(functions=[math]), data, source)
    with pytest.raises(ValueError, match="no column 'prompt'"):
        asked = data.model_copy(update={"prompt_column": "prompt"})
        check_rewards(RewardsConfig(functions=[MathReward()]), asked, source)


def test_an_unknown_task_is_refused_without_being_imported_here(
    tmp_path: Path,
) -> None:
    """In a process of its own, since other tests have imported reasoning_gym into this one."""
    program = textwrap.dedent(
        f"""
        import sys
        from configs.data import DataConfig, ReasoningGymSource
        from configs.rewards import FunctionReward, RewardsConfig
        from engines.rewards.checks import check_rewards
        from storage.prompts.datasets import open_source
        sys.path.insert(0, {str(tmp_path)!r})
        rewards = RewardsConfig(functions=[FunctionReward(path="my_rewards:length")])
        data = DataConfig(source=ReasoningGymSource(task="chain_sums"))
        try:
            check_rewards(rewards, data, open_source(data.source))
        except ValueError as error:
            print(error)
        assert "reasoning_gym" not in sys.modules
        """
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert out.stdout == (
        "data.source.task is 'chain_sums', which reasoning-gym does not have; "
        "close to it are chain_sum, decimal_chain_sum.\n"
    )


def test_two_rewards_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards named length. Give each a name of its own"):
        RewardsConfig(functions=[user("length"), FunctionReward(path="other:length")])
