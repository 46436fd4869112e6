"""Where a run's objects lie, and what is not stored with them."""

from configs.credentials import credential_sentence
from configs.rules.rule import Rule
from configs.run import RunConfig


def _is_relative(uri: str) -> bool:
    return "://" not in uri or (uri.startswith("file://") and not uri.startswith("file:///"))


STORAGE: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: not config.store.uri.startswith("memory:"),
        says=lambda config: (
            f"store.uri = {config.store.uri} lives in one process, and workers are others. "
            "Set store.uri to a file:// or s3:// address."
        ),
    ),
    Rule(
        needs=lambda config: config.cluster.kind == "local" or not _is_relative(config.store.uri),
        says=lambda config: (
            f"store.uri = {config.store.uri} is relative to this process, and the workers of "
            f"cluster.kind = {config.cluster.kind} run elsewhere. Set store.uri to "
            "s3://BUCKET/PREFIX, or to file:///PATH on a file system that all nodes share."
        ),
    ),
)

# Settings are stored with the run and shown.
CREDENTIALS: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: not credential_sentence(config),
        says=credential_sentence,
        new_runs_only=True,
    ),
)
