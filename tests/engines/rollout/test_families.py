"""The transformers engine decodes families of models as their own forward pass over whole sequences would."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines.rollout.contract import Sampling
from engines.rollout.hf_caches import CachedDecoding, decoding_of
from engines.rollout.hf_decoding import Decoding, Row
from engines.rollout.samples import Completion
from engines.train.self_test.twin import build
from tests.engines.models.families import KINDS, config_of
from tests.engines.rollout.rows import row_of

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = 1e-4  # nats
NEW = 40  # tokens that are drawn: past each window, and past longrope's limit
ONE_BY_ONE = {
    *("lfm2", "qwen3.5", "qwen3 next", "falcon h1", "bamba", "mamba2"),
    *("falcon", "gptj", "codegen", "bloom", "nemotron", "stablelm"),
}
QUICK = ["mistral window", "gemma2", "gpt oss", "phi3 longrope", "lfm2", "qwen3.5", "falcon"]


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in KINDS]
)
def test_log_probs_of_what_is_drawn_are_the_models_own(family: str) -> None:
    model = _model(family)
    prompts = [list(range(40, 40 + n)) for n in (3, 9, 9, 17)]
    wholes = _drawn(model, prompts)
    plain = _model(family)

    for prompt, completion in zip(prompts, wholes, strict=True):
        own = _own(plain, prompt + completion.tokens)[len(prompt) - 1 :]
        seen = torch.tensor(completion.logprobs)
        if family == "phi3 longrope":  # before the limit by the table of a short sequence
            short = 33 - len(prompt)  # drawn after up to 32 tokens
            before = _own(plain, (prompt + completion.tokens)[:33])[len(prompt) - 1 :]
            own = torch.cat([before[:short], own[short:]])
        assert float((own - seen).abs().max()) <= CLOSE


@pytest.mark.parametrize("family", ["mistral window", "phi3 longrope", "qwen3.5", "falcon"])
def test_a_row_does_not_depend_on_those_beside_it(family: str) -> None:
    model = _model(family)
    prompts = [list(range(40, 40 + n)) for n in (3, 9, 17)]

    together = _drawn(model, prompts)
    alone = [_drawn(_model(family), [prompt], first=n)[0] for n, prompt in enumerate(prompts)]

    assert together == alone


@pytest.mark.parametrize("family", QUICK)
def test_scores_are_the_models_own(family: str) -> None:
    tokens = list(range(40, 85))

    scores = decoding_of(_model(family)).score(tokens, 5)

    own = _own(_model(family), tokens)[4:]
    assert float((own - torch.tensor(scores)).abs().max()) <= CLOSE


@pytest.mark.parametrize("family", QUICK)
def test_who_decodes_row_by_row(family: str) -> None:
    expected = CachedDecoding if family in ONE_BY_ONE else Decoding

    assert isinstance(decoding_of(_model(family)), expected)


def test_a_cache_that_gives_other_logits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("lfm2")
    decoding = decoding_of(model)
    assert isinstance(decoding, CachedDecoding)
    forward = decoding._forward

    def forgetful(tokens: list[int], cache: object, keep: bool = True) -> tuple[Tensor, object]:
        return forward(tokens, None, keep)

    monkeypatch.setattr(decoding, "_forward", forgetful)
    row = _row(list(range(40, 49)), 0)
    for _ in range(3):
        decoding.step([row], 0)

    assert not decoding.holds(row)
    own = _own(_model("lfm2"), row.prompt + row.tokens)[8:]
    assert float((own - torch.tensor(row.logprobs)).abs().max()) <= CLOSE


def test_rows_are_let_go_of() -> None:
    decoding = decoding_of(_model("lfm2"))
    rows = [_row([50, 51], 0), _row([50, 51], 1)]
    decoding.step(rows, 0)
    assert all(map(decoding.holds, rows))

    decoding.step(rows[:1], 0)  # the other one waits
    assert [decoding.holds(row) for row in rows] == [True, False]

    decoding.forget()
    assert not any(map(decoding.holds, rows))


def _model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)  # of what a twin leaves as transformers draws it
    return build(config_of(family)).eval().requires_grad_(False)


def _own(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Log-probs [T - 1] of each token after the first, by the model's own forward pass."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        table = model(input_ids=ids[:, :-1], use_cache=False).logits[0].float().log_softmax(-1)
    return table.gather(1, ids[0, 1:, None])[:, 0]


def _row(prompt: list[int], seed: int) -> Row:
    sampling = Sampling(n=1, max_new_tokens=NEW, temperature=1.0, ignore_eos=True)
    return row_of(prompt, seed, sampling)


def _drawn(model: PreTrainedModel, prompts: list[list[int]], first: int = 0) -> list[Completion]:
    decoding = decoding_of(model)
    rows = [_row(prompt, first + number) for number, prompt in enumerate(prompts)]
    while going := [row for row in rows if not row.ended]:
        decoding.step(going, 0)
    return [row.completion() for row in rows]
