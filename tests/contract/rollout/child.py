"""A process with a vLLM engine of its own, for tests that kill it: python -m … FOLDER.

Prints a line of JSON when the engine's processes have been started, and one with what it samples
under policy version 1; then it waits to be killed.
"""

import json
import sys
import threading
import time
from pathlib import Path

import psutil

from tests.contract.rollout.world import SHORT, World


def main(folder: str) -> None:
    world = World(Path(folder))
    threading.Thread(target=_tell_of_children, daemon=True).start()
    engine = world.build("vllm")
    engine.sync(world.weights[1])
    result = engine.generate(world.request(world.prompts(), SHORT))
    drawn = world.column(result, "response_ids")
    _say(pids=engine.status().pids, drawn=drawn)
    time.sleep(3600)


def _tell_of_children() -> None:
    while not (children := psutil.Process().children(recursive=True)):
        time.sleep(0.01)
    _say(children=[child.pid for child in children])


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
