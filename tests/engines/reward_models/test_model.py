"""Reward models: the number of a classifier, alone or in a batch; files that are none; identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from configs.model import RandomModel
from configs.rewards import RewardModelReward
from engines.models.checkpoints import materialize
from engines.reward_models.model import RewardModel, batches, check_reward_model, paired
from engines.rewards.protocol import Unscored
from tests.engines.reward_models.drawn import draw_reward_model

PROMPTS = ["1+1?", [{"role": "user", "content": "2+2?"}], "3+3?"]
COMPLETIONS = ["2", "It is four, I think.", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def setting(model: Path, **settings: Any) -> RewardModelReward:
    return RewardModelReward(model=str(model), **{"dtype": "float32", **settings})


def loaded(model: Path, **settings: Any) -> RewardModel:
    return RewardModel(setting(model, **settings), model.parent)


@pytest.mark.parametrize("template", ["chat", "plain"])
def test_scores_are_those_of_transformers(folder: Path, template: str) -> None:
    """Each alone, without padding; here all in one batch."""
    directory = draw_reward_model(folder)
    ours = loaded(directory, template=template)
    scores = ours.scores(PROMPTS, COMPLETIONS)
    plain = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    expected = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.tensor([ours.tokens(prompt, completion)])
        with torch.inference_mode():
            expected.append(plain(input_ids=ids).logits.item())
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 3


def test_the_chat_template_has_the_answer_as_the_assistants(folder: Path) -> None:
    ours = loaded(draw_reward_model(folder))
    said = ours._tokenizer.decode(ours.tokens("1+1?", "two"))
    assert said.index("user") < said.index("1+1?") < said.index("assistant") < said.index("two")
    assert ours.tokens([{"role": "user", "content": "1+1?"}], "two") == ours.tokens("1+1?", "two")


def test_without_a_token_for_padding_each_is_alone(folder: Path) -> None:
    scores = loaded(draw_reward_model(folder, pad=False)).scores(PROMPTS, COMPLETIONS)
    assert scores == pytest.approx(
        loaded(draw_reward_model(folder)).scores(PROMPTS, COMPLETIONS), abs=1e-5
    )


def test_rows_of_about_one_length_share_a_batch() -> None:
    rows = {number: [0] * length for number, length in enumerate([3, 9, 4, 4, 1])}
    assert batches(rows, 8) == [[4, 0], [2, 3], [1]]
    assert batches(rows, 1) == [[4], [0], [2], [3], [1]]
    assert batches(rows, 100) == [[4, 0, 2, 3, 1]]
    assert batches(rows, 100, alone=True) == [[4], [0], [2], [3], [1]]
    assert batches({}, 8) == []


def test_what_is_too_long_is_failed_and_not_cut(folder: Path) -> None:
    model = loaded(draw_reward_model(folder), template="plain", max_length=5)
    found = model.scores(["1", "1"], ["2", "23456"])
    assert isinstance(found[0], float)
    assert found[1] == Unscored(reason="6 tokens of the reward model, and max_length = 5")


def test_a_score_that_is_no_number_is_failed(folder: Path, tmp_path: Path) -> None:
    broken = copied(draw_reward_model(folder), tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["score.weight"].fill_(torch.nan)
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    assert loaded(broken).scores(["1"], ["2"]) == [Unscored(reason="the reward model gave nan")]


# Files


def copied(directory: Path, target: Path) -> Path:
    target.mkdir()
    for path in directory.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_what_is_no_reward_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is LlamaForSequenceClassification with 2 labels"):
        check_reward_model(setting(draw_reward_model(folder, labels=2)))
    language = materialize(RandomModel(), folder / "base")
    with pytest.raises(
        ValueError, match="is LlamaForCausalLM with 2 labels. Set rewards.functions"
    ):
        check_reward_model(setting(language))
    with pytest.raises(ValueError, match=r"rewards\.functions\[\]\.model = /nowhere: no such file"):
        check_reward_model(setting(Path("/nowhere")))
    bare = copied(draw_reward_model(folder), tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        check_reward_model(setting(bare))
    check_reward_model(setting(bare, template="plain"))
    check_reward_model(setting(draw_reward_model(folder)))


def test_a_head_that_would_be_drawn_at_random_is_refused(folder: Path, tmp_path: Path) -> None:
    """config.json says that there is one, and the files have none."""
    headless = copied(draw_reward_model(folder), tmp_path / "headless")
    tensors = load_file(headless / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, headless / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"score\.weight is not in its files.*functions\[\]\.model"
    ):
        loaded(headless)


def test_its_identity_is_of_weights_and_words(folder: Path, tmp_path: Path) -> None:
    first, other = (loaded(draw_reward_model(folder, seed=seed)).code for seed in (0, 1))
    assert first.source != other.source and first.module == other.module
    assert "transformers" in first.packages
    changed = copied(draw_reward_model(folder), tmp_path / "changed")
    with (changed / "chat_template.jinja").open("a") as file:
        file.write(" ")
    words = loaded(changed).code
    assert words.source == first.source and words.module != first.module
    assert json.dumps(first.settings)


ANSWERS = {3: "two", 5: "It is 2.", 6: "3", 9: "2"}  # by number
PAIR = "{prompt}|{first}|{second}"


def test_an_answer_is_compared_with_the_others_in_both_orders(folder: Path) -> None:
    directory = draw_reward_model(folder, seed=3)
    model = loaded(directory, template="plain", pairwise={"template": PAIR})
    plain = AutoModelForSequenceClassification.from_pretrained(directory).eval()

    def number(first: str, second: str) -> float:
        ids = torch.tensor([model._tokenizer(f"1+1?|{first}|{second}")["input_ids"]])
        with torch.inference_mode():
            return float(torch.sigmoid(plain(input_ids=ids).logits.double()))

    found = model.compared("1+1?", ANSWERS)
    for one, answer in ANSWERS.items():
        others = [other for number, other in ANSWERS.items() if number != one]
        beats = [(number(answer, other) + 1 - number(other, answer)) / 2 for other in others]
        assert found[one] == pytest.approx(sum(beats) / 3, abs=1e-5)
    assert sum(found.values()) == pytest.approx(len(ANSWERS) / 2)  # type: ignore[arg-type]
    assert model.compared("1+1?", dict(reversed(ANSWERS.items()))) == pytest.approx(found)
    assert model.compared("1+1?", {0: "2", 1: "2"}) == pytest.approx({0: 0.5, 1: 0.5})


def test_an_answer_that_cannot_be_compared_has_no_score(folder: Path) -> None:
    directory = draw_reward_model(folder)
    model = loaded(directory, template="plain", max_length=12, pairwise={"template": PAIR})
    (alone,) = model.compared("1?", {4: "2"}).values()
    assert alone == Unscored(reason="there is no other answer to compare with")
    found = model.compared("1?", {0: "2", 1: "3", 2: "much too long"})
    assert found[0] == pytest.approx(1 - found[1])  # type: ignore[operator]
    assert isinstance(found[2], Unscored) and "max_length = 12" in found[2].reason


def test_what_stands_in_an_answer_is_no_place_of_the_template(folder: Path) -> None:
    model = loaded(draw_reward_model(folder), template="plain", pairwise={"template": PAIR})
    ids = model._pair("1?", "{second}", "{prompt}")
    assert model._tokenizer.decode(ids) == "1?|{second}|{prompt}"


def test_with_whom_each_is_compared() -> None:
    assert paired([4, 5, 7], None) == [(4, 5), (4, 7), (5, 7)]
    assert paired([], None) == paired([3], 1) == []
    few = paired(list(range(6)), 1)
    assert few == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)]
    for opponents in (1, 2, 3):
        pairs = paired(list(range(7)), opponents)
        assert len({frozenset(pair) for pair in pairs}) == len(pairs) == 7 * opponents
    assert len(paired(list(range(6)), 3)) == 15
