"""vLLM on a CPU after weight syncs: families score as transformers does, or the sync fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers

pytest.importorskip("vllm")

from configs.model import PretrainedModel, RandomModel
from configs.rollout import RolloutConfig
from engines.failures import WeightMismatch
from engines.models import checkpoints
from engines.rollout.contract import RolloutSpec
from engines.rollout.vllm_engine import VllmEngine
from engines.train.self_test.comparison import own_logprobs
from engines.train.self_test.twin import build
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, open_manifest
from storage.runs.weights_writing import publish

pytestmark = pytest.mark.slow

WORDS = 128
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
}


class Model:
    """A tiny checkpoint, the model of its second version, and the means to start vLLM on it."""

    def __init__(self, folder: Path, kind: str, **sizes: object) -> None:
        self.directory = folder / "model"
        build(getattr(transformers, kind)(**{**SIZES, **sizes})).save_pretrained(self.directory)
        made = checkpoints.materialize(RandomModel(), folder / "made")
        checkpoints.load_tokenizer(made).save_pretrained(self.directory)
        self.store = Store(f"file://{folder}/store")
        self.policy = checkpoints.load_for_training(self.directory).eval()
        self.policy.set_attn_implementation("eager")  # torch's kernel has no cap

    def publish(self, version: int, change: float) -> WeightsRef:
        noise = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for weight in self.policy.parameters():
                weight.mul_(1 + change * torch.randn(weight.shape, generator=noise))
        files = checkpoints.companion_files(self.directory)
        return publish(self.store, "run", version, self.policy.state_dict().items(), files)

    @contextmanager
    def engine(self) -> Iterator[VllmEngine]:
        arguments = {"max_num_batched_tokens": 2048}
        rollout = RolloutConfig(
            engine="vllm", dtype="float32", kv_cache_gib=0.1, engine_args=arguments
        )
        model = PretrainedModel(path=str(self.directory))
        engine = VllmEngine(
            RolloutSpec(model=model, rollout=rollout, store_uri=self.store.uri, max_model_len=128)
        )
        try:
            yield engine
        finally:
            engine.close()


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Model]:
    return lambda kind, **sizes: Model(tmp_path, kind, **sizes)


@pytest.mark.parametrize(
    ("kind", "sizes", "seen"),
    [
        ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 64}, 12),
        ("MixtralConfig", {"num_local_experts": 4, "intermediate_size": 64}, 10),
    ],
)
def test_experts_are_those_of_the_last_sync(
    made: Callable[..., Model], kind: str, sizes: dict[str, int], seen: int
) -> None:
    model = made(kind, **sizes)
    rows = [torch.randint(10, 100, (length,)) for length in (20, 45)]
    with model.engine() as engine:
        engine.sync(model.publish(0, 0.0))
        engine.sync(model.publish(1, 0.2))
        scores = engine.score([row.tolist() for row in rows], [5, 5])
        llm = engine._process.llm
        (report,) = engine._process.run(llm.collective_rpc("weights_report"))

    own = own_logprobs(model.policy, [(row[:5], row[5:]) for row in rows])
    for wanted, found in zip(own, scores, strict=True):
        assert float((wanted.detach() - torch.tensor(found)).abs().max()) < 1e-4
    # Only what is packed for the experts' kernel is not read back.
    assert len(report["found"]) == seen
    assert all(".experts." in name for name in report["unseen"])


def test_a_sync_that_vllm_only_says_it_made_fails(made: Callable[..., Model]) -> None:
    """Of gpt-oss vLLM 0.32 keeps the sinks that it drew, and calls them loaded."""
    model = made("GptOssConfig", num_local_experts=4)
    with model.engine() as engine:
        with pytest.raises(WeightMismatch, match="sinks"):
            engine.sync(model.publish(0, 0.0))
        assert engine.version is None


def test_a_head_that_is_the_embedding_is_not_loaded_twice(made: Callable[..., Model]) -> None:
    """Of Gemma 2 vLLM 0.32 knows no head by name, and versions carry it."""
    model = made("Gemma2Config", sliding_window=16, query_pre_attn_scalar=32)
    with model.engine() as engine:
        engine.sync(model.publish(0, 0.0))
        ref = model.publish(1, 0.2)
        engine.sync(ref)
        row = torch.randint(10, 100, (45,))
        (scores,) = engine.score([row.tolist()], [5])

    assert "lm_head.weight" in open_manifest(model.store, ref).tensors
    (own,) = own_logprobs(model.policy, [(row[:5], row[5:])])
    assert float((own.detach() - torch.tensor(scores)).abs().max()) < 1e-4
