"""A model's directory for an engine that starts, which says meanwhile how much of it there is."""

from __future__ import annotations

from pathlib import Path

from configs.model import Model, PretrainedModel
from engines.models import materialize
from engines.progress import reporting_growth


def prepared(model: Model, cache: Path) -> Path:
    """As `engines.models.materialize`, with the bytes downloaded or drawn so far reported."""
    places = [cache]
    if isinstance(model, PretrainedModel):
        from huggingface_hub.constants import HF_HUB_CACHE

        places.append(Path(HF_HUB_CACHE) / f"models--{model.path.replace('/', '--')}")
    with reporting_growth(places, "preparing the model's files"):
        return materialize(model, cache)
