"""How a cluster is reached, and what patches of its pods' specs may say."""

import re

from configs.cluster.pod_patch import patch_sentence
from configs.rules.rule import Rule
from configs.run import RunConfig

ADDRESS = re.compile(r"(tcp|tls)://(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]+):(?P<port>\d{1,5})")
EVERYWHERE = ("0.0.0.0", "[::]")


def address_sentence(config: RunConfig) -> str:
    """Why nobody can join a scheduler at cluster.address; empty where somebody may."""
    address = config.cluster.address
    if address is None:
        return ""
    parts = ADDRESS.fullmatch(address)
    if parts is None or not 1 <= int(parts["port"]) <= 65535:
        return (
            f"cluster.address = {address} is no address of a scheduler. Set it as tcp://HOST:PORT, "
            "or as tls://HOST:PORT."
        )
    if parts["host"] in EVERYWHERE:
        return (
            f"cluster.address = {address} is where a scheduler listens, and not where others reach "
            "it. Set it to the address or name of the scheduler's machine."
        )
    return ""


CLUSTERS: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: not address_sentence(config),
        says=address_sentence,
        new_runs_only=True,
    ),
    Rule(
        needs=lambda config: not patch_sentence(config.cluster.kubernetes),
        says=lambda config: patch_sentence(config.cluster.kubernetes),
        new_runs_only=True,
    ),
)
