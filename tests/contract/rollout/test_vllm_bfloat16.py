"""vLLM on this machine's CPU in bfloat16, with whatever instructions it takes for that here.

Where the CPU has AMX (Sapphire Rapids and later) vLLM's attention uses it.
"""

from __future__ import annotations

import pytest
import torch

from configs.model import RandomModel
from engines.models import checkpoints
from engines.rollout.contract import RolloutSpec
from engines.rollout.vllm_engine import VllmEngine
from storage.runs.weights_writing import publish
from tests.contract.rollout.world import RUN, World

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_log_probs_are_those_of_transformers(world: World) -> None:
    pytest.importorskip("vllm")
    # Heads of 32: for others vLLM has no kernel with AMX.
    model = RandomModel(seed=4, hidden_size=64, heads=2)
    directory = checkpoints.materialize(model, world.cache)
    policy = checkpoints.load_for_training(directory)
    files = checkpoints.companion_files(directory)
    names = policy.state_dict().items()
    weights = publish(world.store, f"{RUN}-bf16", 0, ((n, t.bfloat16()) for n, t in names), files)
    spec = world.spec("vllm")
    rollout = spec.rollout.model_copy(update={"dtype": "bfloat16"})
    engine = VllmEngine(
        RolloutSpec(**dict(spec) | {"name": "bf16", "model": model, "rollout": rollout})
    )
    try:
        engine.sync(weights)
        tokens = [4 + (7 * place) % 90 for place in range(60)]
        # A few first: products of many rows, elsewhere in vLLM, may ask Linux for AMX by themselves.
        engine.score([tokens[:4]], [2])
        (found,) = engine.score([tokens], [20])
    finally:
        engine.close()
    with torch.no_grad():
        logits = policy(torch.tensor([tokens])).logits[0]
    wanted = logits.log_softmax(-1)[19:-1].gather(1, torch.tensor(tokens[20:])[:, None])[:, 0]
    assert found == pytest.approx(wanted.tolist(), abs=0.05)
