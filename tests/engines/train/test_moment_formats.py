"""AdamW with moments in each number format beside torch's own in float64, and what it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from configs.algorithm.algorithm import AlgorithmConfig
from configs.train import TrainConfig
from engines.train.fsdp_engine import FSDPEngine
from engines.train.model.master_weights import MasterWeights
from engines.train.optimizer import LARGEST, MOMENTS, decode, make_adamw
from tests.engines.train.conftest import Make
from tests.engines.train.train_ranks import samples, stored, update_of

SHAPE = (64, 128)
RATE, STEPS = 1e-3, 200
SETTINGS = TrainConfig(learning_rate=RATE, weight_decay=0.1, beta1=0.9, beta2=0.99)
# Of what 200 steps moved a weight by, root mean square: how far it is from float64's.
APART = {"float32": 2e-4, "bfloat16": 0.01, "8bit": 0.03}


def gradients(step: int) -> Tensor:
    """A part that stays and noise ten times as large, over four decades of rows."""
    stays = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step + 1))
    return (stays + 10 * noise) * torch.logspace(-6, -2, SHAPE[0])[:, None]


def moved(dtype: str) -> Tensor:
    """The weights after some steps, less those before them, float64."""
    torch.manual_seed(1)
    before = torch.randn(SHAPE)
    if dtype == "float64":
        weights = nn.Parameter(before.double())
        made: torch.optim.Optimizer = torch.optim.AdamW(
            [weights], lr=RATE, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
        )
    else:
        weights = nn.Parameter(before.clone())
        config = SETTINGS.model_copy(update={"optimizer_dtype": dtype})
        made = make_adamw([weights], config, MasterWeights())
    for step in range(STEPS):
        weights.grad = gradients(step).to(weights.dtype)
        made.step()
    return weights.detach().double() - before.double()


@pytest.mark.parametrize("dtype", APART)
def test_two_hundred_steps_end_near_those_in_float64(dtype: str) -> None:
    exact, found = moved("float64"), moved(dtype)
    apart = float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    assert apart < APART[dtype]
    assert apart > APART[dtype] / 100, "a bound that says something"


def test_a_step_is_that_of_float32_moments_which_are_coded_after_it() -> None:
    """Each step by itself: decoded, torch's own step in float32, coded."""
    config = SETTINGS.model_copy(update={"optimizer_dtype": "8bit"})
    mine, torchs = (nn.Parameter(torch.ones(SHAPE)) for _ in range(2))
    made, plain = (
        make_adamw([one], given, MasterWeights())
        for one, given in ((mine, config), (torchs, SETTINGS))
    )
    for step in range(5):
        state, its = made.state[mine], plain.state[torchs]
        for name in MOMENTS:
            largest = state[LARGEST[name]].view(-1)
            whole = decode(state[name].view(-1), largest, name == "exp_avg")
            its[name].copy_(whole.view(SHAPE))
        mine.grad, torchs.grad = gradients(step), gradients(step)
        made.step()
        plain.step()
        assert torch.equal(mine, torchs)


def test_what_is_small_is_in_float32() -> None:
    config = SETTINGS.model_copy(update={"optimizer_dtype": "8bit"})
    norm, matrix = nn.Parameter(torch.ones(8192)), nn.Parameter(torch.ones(SHAPE))
    made = make_adamw([norm, matrix], config, MasterWeights())
    assert {made.state[norm][name].dtype for name in MOMENTS} == {torch.float32}
    assert made.state[matrix]["exp_avg"].dtype == torch.uint8
    assert made.state[matrix]["exp_avg_largest"].shape == (64, 1)


def learned(dtype: str) -> float:
    """The loss of a small network that is taught by a larger one."""
    torch.manual_seed(2)
    teacher = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 64))
    student = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 64))
    update = {"optimizer_dtype": dtype, "weight_decay": 0.0, "learning_rate": 3e-3}
    made = make_adamw(student.parameters(), SETTINGS.model_copy(update=update), MasterWeights())
    draw, losses = torch.Generator().manual_seed(3), []
    for _ in range(300):
        asked = torch.randn(64, 32, generator=draw)
        loss = (student(asked) - teacher(asked).detach()).square().mean()
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(float(loss.detach()))
    return sum(losses[-50:]) / 50


@pytest.mark.parametrize("dtype", ["bfloat16", "8bit"])
def test_it_learns_as_with_float32(dtype: str) -> None:
    plain, found = learned("float32"), learned(dtype)
    assert plain < 0.03
    assert found == pytest.approx(plain, rel=0.1)


FEWER = {
    "compute_dtype": "bfloat16",
    "weights_dtype": "bfloat16",
    "master_weights": "remainder",
    "optimizer_dtype": "8bit",
}


def test_a_policy_learns_what_is_rewarded_in_each(tmp_path: Path, make: Make) -> None:
    """Advantages times the mean log-prob of each response, before and after ten updates."""
    rows = [row for row in samples() if len(row.response)]
    batch = stored(tmp_path, samples())
    tokens = [[*map(int, row.prompt), *map(int, row.response)] for row in rows]

    def rewarded(engine: FSDPEngine) -> float:
        logprobs = engine.score(tokens, [len(row.prompt) for row in rows])
        weighted = zip(logprobs, rows, strict=True)
        return sum(float(np.mean(one)) * float(row.advantages[0]) for one, row in weighted)

    gains = []
    for number, given in enumerate(({}, {"optimizer_dtype": "8bit"}, FEWER)):
        engine = make(run=f"run-{number}", learning_rate=3e-3, **given)
        before = rewarded(engine)
        for step in range(1, 11):
            engine.update(update_of(batch, AlgorithmConfig(), step))
        gains.append(rewarded(engine) - before)
    assert gains[0] > 10
    assert gains[1:] == pytest.approx([gains[0]] * 2, rel=0.01)
