"""Environments of verifiers 0.4 as agents: refrain grpo verifiers.yaml trains in one.

verifiers does not go with Refrain's packages, so it has an interpreter of its own:

    python -m venv verifiers && verifiers/bin/pip install "verifiers==0.4.*" uv
    refrain grpo verifiers.yaml episodes.python=verifiers/bin/python

Its programs find the model at the address that an agent is given, one conversation an episode. With
`tokenizer` its TrainClient renders what they say to token ids, as in training with prime-rl.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any


def play(
    base_url: str,
    api_key: str,
    model: str,
    taskset: str = "verifiers_sums",
    settings: str = "",
    environment: str = "",
    harness: str = "null",
    max_turns: int = 8,
    tokenizer: str = "",
    renderer: str = "auto",
    task: int = 0,
) -> float:
    """The reward of one episode; RuntimeError where it has none.

    Args:
        taskset: id of a set of tasks, which is a module's or a package's name; here, or installed.
        settings: of the set, as text of a JSON object; empty: its own.
        environment: id of the environment that plays them; empty for the set's own.
        harness: id of the program that asks the model, in a process of this machine.
        max_turns: of the model. Set it to episodes.max_turns, so that verifiers ends the episode.
        tokenizer: folder or hub name of the policy's, to render messages to token ids; empty: the
            messages themselves are sent.
        renderer: how, by its name in the package `renderers`; auto: as is registered for `tokenizer`.
        task: number of the task in its set, a column of the row.
    """
    # All episodes of a process share a loop, as verifiers' locks do.
    seat = {
        "harness": {"id": harness},
        "runtime": {"type": "subprocess"},
        "max_turns": max_turns,
    }
    endpoint: dict[str, Any] = {"base_url": base_url}
    if tokenizer:
        endpoint |= {"renderer_model_name": tokenizer, "renderer": {"name": renderer}}
    tasks = {"id": taskset, **json.loads(settings or "{}")}
    episode = _episode(endpoint, api_key, model, tasks, environment, seat, task)
    return asyncio.run_coroutine_threadsafe(episode, _loop()).result()


async def _episode(
    endpoint: dict[str, Any],
    api_key: str,
    model: str,
    tasks: dict[str, Any],
    environment: str,
    seat: dict[str, Any],
    task: int,
) -> float:
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import environment_class

    made = environment_class(tasks["id"], environment)
    config = _config_class(made)(id=environment, taskset=tasks, agent=seat)
    name = f"REFRAIN_{secrets.token_hex(8)}"  # verifiers reads the key from a variable
    os.environ[name] = api_key
    try:
        kind = vf.TrainClientConfig if "renderer" in endpoint else vf.EvalClientConfig
        client = kind(**endpoint, api_key_var=name)
        playing = made(config)
        async with playing.serving():
            context = vf.ModelContext(model=model, client=client)
            episode = await playing.run_episode(_task(json.dumps(tasks), task), context)
    finally:
        del os.environ[name]
    errors = [*episode.errors, *(error for one in episode.traces for error in one.errors)]
    if errors:
        raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
    return float(episode.traces[-1].reward)


@cache
def _config_class(environment: Any) -> Any:
    """The settings' class of an environment's class."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.generic import concrete_type

    return concrete_type(environment, vf.EnvConfig, origin=vf.Env)


def _task(settings: str, number: int) -> Any:
    """A task of the set with these settings, as JSON; sets may have no end."""
    drawn, rest = _drawn(settings)
    while len(drawn) <= number:
        try:
            drawn.append(next(rest))
        except StopIteration:
            raise ValueError(
                f"the set has {len(drawn)} tasks, and none of number {number}"
            ) from None
    return drawn[number]


@cache
def _drawn(settings: str) -> tuple[list[Any], Iterator[Any]]:
    """The tasks that were asked for so far, and the others."""
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    given = json.loads(settings)
    return [], iter(load_taskset(taskset_config_type(given["id"])(**given)))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """A loop in a thread. Modules are found in this folder, by verifiers' own processes too."""
    folder = str(Path(__file__).parent)
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = folder
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def rows(size: int = 8) -> list[dict[str, Any]]:
    """The numbers of the tasks; what the model is asked comes from verifiers."""
    return [{"question": f"task {number}", "task": number} for number in range(size)]
