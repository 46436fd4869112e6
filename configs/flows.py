"""The commands that a run names: how to go on with it, fork it, look at it."""

import shlex

from configs.storage import StoreConfig

OURS = "flows."


def program(module: str) -> str:
    """How a module is started: `refrain NAME` one of ours, `python -m MODULE` a user's."""
    return (
        f"refrain {module.removeprefix(OURS)}" if module.startswith(OURS) else f"python -m {module}"
    )


def command(module: str, store: StoreConfig, *words: str | int) -> str:
    """`refrain NAME WORDS`, for a shell, with where the store is if not the default."""
    return f"{program(module)} {shlex.join([*map(str, words), *store.words()])}"


def resume_command(flow: str, store: StoreConfig, run: str) -> str:
    """The command that goes on with a run of a flow `package.module:function`."""
    return command(flow.partition(":")[0], store, "--resume", run)


def fork_command(flow: str, store: StoreConfig, fork: str) -> str:
    """The command that begins a run at RUN@STEP of a run of the flow."""
    return command(flow.partition(":")[0], store, "--fork", fork)
