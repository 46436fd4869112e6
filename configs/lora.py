"""Training a low-rank adapter on a frozen base, instead of all weights."""

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, model_validator

from configs.base import Settings

# Their weights are no linear layer's of the decoder.
NOT_ADAPTED = ("lm_head", "embed_tokens")


class LoraConfig(Settings):
    """LoRA (arXiv:2106.09685), as in PEFT, without dropout: y = x W + (alpha / rank) x A B."""

    rank: int = Field(32, ge=1, description="Rank of each adapted layer's update.")
    alpha: float = Field(
        32.0, gt=0, description="Scale of the update: it is multiplied by alpha / rank."
    )
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="Linear layers that are adapted, by the last part of their names, such as "
        "[q_proj, v_proj]; all-linear: every one of the decoder. The output head never is.",
    )
    target_parameters: Literal["all-experts"] | tuple[str, ...] = Field(
        (),
        description="Weights of a mixture's experts that are adapted, by the ends of their names, "
        "such as [mlp.experts.gate_up_proj, mlp.experts.down_proj]; all-experts: every one of the "
        "decoder. Each expert has factors of its own.",
    )

    serving: Literal["merged", "adapter"] = Field(
        "merged",
        description="How rollout engines use a version: merged into its base, which is read again "
        "with each; or beside a base that stays loaded, so that a version costs its own megabytes "
        "(vLLM).",
    )

    @property
    def scale(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / self.rank

    def adapts_layer(self, name: str) -> bool:
        """Whether it is for a linear layer of the decoder."""
        return self.target_modules == "all-linear" or name.rpartition(".")[2] in self.target_modules

    def adapts_experts(self, name: str) -> bool:
        """Whether it is for a weight of the decoder's experts."""
        if self.target_parameters == "all-experts":
            return True
        return any(_ends(name, target) for target in self.target_parameters)

    def unfit(self, layers: Iterable[str], experts: Iterable[str]) -> str | None:
        """Why adapters cannot be put on a decoder, a sentence or two; None: they can.

        layers: names of its linear layers, or their last parts. experts: names of the weights of its
        experts.
        """
        names, stacked = sorted({name.rpartition(".")[2] for name in layers}), list(experts)
        if self.target_modules and not names:
            return (
                "lora: the model's decoder has no linear layer that an adapter can be put on. Set "
                "lora = null to train all weights."
            )
        targets = names if self.target_modules == "all-linear" else self.target_modules
        if unknown := sorted(set(targets) - set(names)):
            return (
                f"lora.target_modules has {unknown[0]}, and no linear layer of the decoder has that "
                f"name. Its layers are {', '.join(names)}."
            )
        if self.target_parameters and not stacked:
            return (
                "lora.target_parameters is for a mixture's experts, and the model's decoder has none "
                "of a form that is known. Set lora.target_parameters = []."
            )
        if self.target_parameters != "all-experts":
            for target in self.target_parameters:
                if not any(_ends(name, target) for name in stacked):
                    last = sorted({name.rpartition(".")[2] for name in stacked})
                    return (
                        f"lora.target_parameters has {target}, and no name of a weight of the "
                        f"decoder's experts ends so. Their weights are {', '.join(last)}."
                    )
        return None

    @model_validator(mode="after")
    def _targets_can_be_adapted(self) -> Self:
        if not self.target_modules and not self.target_parameters:
            raise ValueError(
                "lora.target_modules is empty, so nothing would be trained. Set "
                "lora.target_modules = all-linear, or lora = null to train all weights."
            )
        for name in NOT_ADAPTED:
            if name in self.target_modules:
                raise ValueError(
                    f"lora.target_modules has {name}, and only linear layers of the decoder are "
                    "adapted. Leave it out."
                )
        return self


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
