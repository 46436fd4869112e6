"""Plants faults in the processes of a run under test, from outside the product.

Python imports a module of this name at the start of every process that has its folder on
PYTHONPATH; a test's run has it there, and workers that are forked inherit what it did. It wraps the
functions that the fault plan names when their modules are imported, so that a fault strikes at the
same instruction every time. The plan's folder also gets a line for each process that begins, by
which a test, or a fault in another process, finds it.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("REFRAIN_TEST_FAULTS", "")
ROLES = {  # part of a command line -> name of the process
    "engines.processes.node": "scheduler",
    **{f"flows.{name}": "flow" for name in ("grpo", "ppo", "dapo", "distill", "tree", "srpo")},
    "tasks.launch.prefect_app": "server",
    "tasks.reporting.mlflow_process": "mlflow",
    "engines.rewards.child": "reward",
    "engines.environments.child": "environment",
}
# Where a process learns its name late: function -> how to tell.
BORN = {
    "engines.workers.host:EngineHost.setup": lambda **given: str(given["worker"].name),
    "vllm.v1.engine.core:EngineCoreProc.__init__": lambda **_: "core",
}
_name = "?"


def plan() -> list[dict[str, Any]]:
    with open(f"{FOLDER}/plan.json") as file:
        found: list[dict[str, Any]] = json.load(file)
    return found


def register(name: str) -> None:
    """Tell the test which process this is."""
    global _name
    _name = name
    with open(f"{FOLDER}/processes", "a") as file:
        file.write(f"{name} {os.getpid()}\n")


def pids(name: str) -> list[int]:
    """Processes of a name, newest last; dead ones too."""
    with open(f"{FOLDER}/processes") as file:
        lines = [line.split() for line in file]
    return [int(pid) for found, pid in lines if found == name]


def number_of_call(fault: dict[str, Any]) -> int:
    """Counts the calls of all processes together, those that came back from the dead too."""
    with open(f"{FOLDER}/{fault['id']}.calls", "ab") as file:
        file.write(b".")
        file.flush()
        return os.fstat(file.fileno()).st_size


def victim(name: str) -> int:
    """The newest process of a name; it may be on its way."""
    for _ in range(600):
        if found := pids(name):
            return found[-1]
        time.sleep(0.05)
    raise AssertionError(f"there is no process {name!r} to strike")


def claim(fault: dict[str, Any]) -> bool:
    """Whether this process is the one to carry out the fault; each happens once."""
    try:
        descriptor = os.open(f"{FOLDER}/{fault['id']}.fired", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(descriptor, f"{_name} {os.getpid()} {time.time()}\n".encode())
    os.close(descriptor)
    return True


def strike(fault: dict[str, Any]) -> None:
    """Carry out a fault if it is due in this process."""
    if fault["only"] and not _name.startswith(fault["only"]):
        return
    if fault["action"] == "delay":  # each call
        claim(fault)
        time.sleep(fault["seconds"])
        return
    if number_of_call(fault) != fault["nth"] or not claim(fault):
        return
    if fault["action"] == "raise":
        if fault["error"] == "OutOfMemoryError":
            raise sys.modules["torch"].OutOfMemoryError("CUDA out of memory. Tried to allocate")
        kinds = {"RuntimeError": RuntimeError, "OSError": OSError, "ValueError": ValueError}
        raise kinds[fault["error"]](f"planted: {fault['id']}")
    if fault["action"] == "hang":
        time.sleep(3600)
    sent = signal.SIGKILL if fault["action"] == "kill" else signal.SIGSTOP
    if fault["victim"] == "self":
        # This thread takes it at once. Sent to the process, a stop may be another thread's to take,
        # which a busy machine lets wait, and this one goes on.
        signal.pthread_kill(threading.get_ident(), sent)
    else:
        os.kill(victim(fault["victim"]), sent)


def drift(fault: dict[str, Any], optimizer: Any) -> None:
    """Move a weight a little, as if sums were rounded otherwise from some call on."""
    if number_of_call(fault) >= fault["nth"]:
        claim(fault)
        with sys.modules["torch"].no_grad():
            next(iter(optimizer.parameters.values())).mul_(1.001)


def wrapped(function: Callable[..., Any], target: str) -> Callable[..., Any]:
    """The function with everything that the plan wants at it."""
    faults = [fault for fault in plan() if fault["target"] == target]

    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        if target in BORN:
            register(BORN[target](**kwargs))  # type: ignore[operator]
        for fault in faults:
            if fault["when"] == "before" and fault["action"] != "drift":
                strike(fault)
        value = function(*args, **kwargs)
        for fault in faults:
            if fault["action"] == "drift":
                drift(fault, args[0])
            elif fault["when"] == "after":
                strike(fault)
        return value

    return around


class Wrapping(importlib.abc.Loader):
    """Loads a module as its own loader would, then wraps functions in it."""

    def __init__(self, loader: importlib.abc.Loader, targets: Sequence[str]) -> None:
        self.loader, self.targets = loader, targets

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        for target in self.targets:
            *path, last = target.partition(":")[2].split(".")
            owner: Any = module
            for name in path:
                owner = getattr(owner, name)
            setattr(owner, last, wrapped(owner.__dict__[last], target))


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that hold targets, and nothing else."""

    def __init__(self, targets: Sequence[str]) -> None:
        self.modules: dict[str, list[str]] = {}
        for target in targets:
            self.modules.setdefault(target.partition(":")[0], []).append(target)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        targets = self.modules.get(name)
        if targets is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Wrapping(spec.loader, targets)
        return spec


if FOLDER:
    # A test that finds a process stuck asks it where.
    stacks = open(f"{FOLDER}/stacks", "a")  # noqa: SIM115  (for the life of the process)
    faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
    command = " ".join(sys.orig_argv)
    for part, role in ROLES.items():
        if part in command and "pytest" not in command:
            register(role)
            break
    wanted = {fault["target"] for fault in plan()}
    sys.meta_path.insert(0, Finder([*wanted, *(born for born in BORN if born not in wanted)]))
