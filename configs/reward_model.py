"""A trained model that scores samples: a transformers checkpoint with a head for one number."""

from typing import Literal

from pydantic import Field, field_validator

from configs.base import ModelPath, Settings
from configs.model import PretrainedModel


class Pairwise(Settings):
    """A model that reads two answers: its number is the log-odds that the first is better."""

    template: str = Field(
        "{prompt}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\nWhich answer is better?",
        description="What the model reads: {prompt}, {first} and {second} are put in, each once. As "
        "the model was trained.",
    )
    opponents: int | None = Field(
        None,
        ge=1,
        description="Each answer of a prompt is compared with so many after it, and so with as many "
        "before it, in a circle. None: with all.",
    )

    @field_validator("template")
    @classmethod
    def _has_its_places(cls, template: str) -> str:
        for place in ("{prompt}", "{first}", "{second}"):
            if template.count(place) != 1:
                raise ValueError(
                    f"rewards.functions[].pairwise.template = {template!r} has {place} "
                    f"{template.count(place)} times. Put {{prompt}}, {{first}} and {{second}} into "
                    "it, each once."
                )
        return template


class RewardModelReward(Settings):
    """The number that a sequence classifier gives to prompt and completion, as it is."""

    kind: Literal["reward_model"] = "reward_model"
    name: str = Field("reward_model", description="Name under which the score is logged.")
    weight: float = Field(1.0, description="Factor in the weighted sum of rewards.")
    model: ModelPath = Field(
        description="Hub id or directory of a transformers checkpoint of a class …ForSequence"
        "Classification with one label. It lives on the pool of cluster.roles.reward_model."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub model; none takes the default branch."
    )
    template: Literal["chat", "plain"] = Field(
        "chat",
        description="chat: prompt and completion as messages of the reward model's own chat "
        "template; plain: the one's text, then the other's.",
    )
    pairwise: Pairwise | None = Field(
        None,
        description="For a model that compares two answers: the score of a sample is then the mean "
        "probability that it is better than others of its prompt. None: each is scored alone.",
    )
    max_length: int = Field(
        4096, ge=2, description="Longest sample, in its tokens; a longer one is failed, not cut."
    )
    batch_tokens: int = Field(
        16384, ge=1, description="Tokens of a batch, padding included; one sample at least."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Number format of its weights."
    )

    @property
    def label(self) -> str:
        """Name under which the score is logged."""
        return self.name

    @property
    def checkpoint(self) -> PretrainedModel:
        """Where its files are."""
        return PretrainedModel(path=self.model, revision=self.revision)
