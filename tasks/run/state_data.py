"""A flow's process takes no results from Prefect's API: the data of a state there are dropped.

Refrain persists no results, so none of its own states has such data at the API. Somebody who can
write there could force a flow run into a state whose data name a pickle in a storage block of
theirs, and the flow's engine would load it, whatever `persist_result` says (Prefect 3.7.7). It is
dropped where an answer is parsed, before a model of Prefect's sees it: to check the name of a
serializer's library, those import it.
"""

from __future__ import annotations

from typing import Any

import httpx
from prefect.client.base import PrefectResponse


def refuse_state_data() -> None:
    """From here on, states that this process reads from Prefect's API have no data."""
    PrefectResponse.json = _without_state_data  # type: ignore[method-assign, assignment]


def _without_state_data(answer: httpx.Response, **options: Any) -> Any:
    return httpx.Response.json(answer, **{"object_hook": dropped, **options})


def dropped(record: dict[str, Any]) -> dict[str, Any]:
    """A JSON object of an answer; where it is a state, without its data.

    Prefect's server gives details with each state, and its client takes whatever has a storage key
    for the place of a result.
    """
    data = record.get("data")
    if data is None:
        return record
    if "state_details" in record or (isinstance(data, dict) and "storage_key" in data):
        return {**record, "data": None}
    return record
