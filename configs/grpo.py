"""The settings of a GRPO run: those of any run, and the rules that span several parts of them."""

from typing import Any, ClassVar, Self

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from configs.form import without
from configs.resolving import (
    ANY_MACHINE,
    Decider,
    driving,
    gpu_sampling,
    number_formats,
    resolve,
    shards,
    slots,
)
from configs.rules.batches import BATCHES
from configs.rules.branches import BRANCHES
from configs.rules.clusters import CLUSTERS
from configs.rules.coding import CODING
from configs.rules.elastic import ELASTIC
from configs.rules.episodes import EPISODES
from configs.rules.evaluation import EVALUATION
from configs.rules.experts import EXPERTS
from configs.rules.guards import GUARDS
from configs.rules.images import IMAGES
from configs.rules.logprobs import LOGPROBS, STALE_SAMPLES
from configs.rules.lora import LORA
from configs.rules.over_sampling import OVER_SAMPLING
from configs.rules.promotion import PROMOTION
from configs.rules.quarantine import QUARANTINE
from configs.rules.retraining import RETRAINING
from configs.rules.rewards import REWARDS
from configs.rules.rule import Rule, check_rules
from configs.rules.sampling import SAMPLING
from configs.rules.sampling_mask import SAMPLING_MASK
from configs.rules.sharing import SHARING
from configs.rules.storage import CREDENTIALS, STORAGE
from configs.rules.tasks import ONE_TASK, TASKS
from configs.rules.thinking import THINKING
from configs.run import RunConfig

ESTIMATOR: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: not config.algorithm.needs_critic,
        says=lambda config: (
            f"algorithm.advantage.kind = {config.algorithm.advantage.kind} needs a critic, which "
            "this flow does not train. Run it with refrain ppo, or set "
            "algorithm.advantage.kind = grpo or another estimator without a critic."
        ),
    ),
    Rule(
        needs=lambda config: not config.algorithm.compares_subtrees,
        says=lambda config: (
            f"algorithm.advantage.kind = {config.algorithm.advantage.kind} compares completions "
            "within subtrees, and this flow samples none. Run it with refrain tree, or "
            "set algorithm.advantage.kind = dr_grpo, which it would be here."
        ),
    ),
)

# Without the estimator's, of which a flow that trains or samples otherwise has its own.
OF_EVERY_FLOW: tuple[Rule[RunConfig], ...] = (
    *CREDENTIALS,
    *CLUSTERS,
    *STALE_SAMPLES,
    *OVER_SAMPLING,
    *SAMPLING,
    *EPISODES,
    *BRANCHES,
    *CODING,
    *LOGPROBS,
    *SAMPLING_MASK,
    *THINKING,
    *EXPERTS,
    *GUARDS,
    *QUARANTINE,
    *TASKS,
    *ONE_TASK,
    *EVALUATION,
    *PROMOTION,
    *IMAGES,
    *ELASTIC,
    *SHARING,
    *LORA,
    *REWARDS,
    *STORAGE,
    *RETRAINING,
)


class GRPOConfig(RunConfig):
    """Group relative policy optimisation (arXiv:2402.03300) and its relatives."""

    # Kinds of algorithm.advantage that need what other flows make; the form does not offer them.
    unfit: ClassVar[tuple[str, ...]] = ("gae", "tree", "tree_segment", "tree_sibling")
    # What has to hold between the parts, in the order in which it is asked.
    rules: ClassVar[tuple[Rule[Any], ...]] = (*BATCHES, *ESTIMATOR, *OF_EVERY_FLOW)
    deciders: ClassVar[tuple[Decider, ...]] = (number_formats, gpu_sampling, shards, driving, slots)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        found = super().__get_pydantic_json_schema__(core_schema, handler)
        algorithm = handler.resolve_ref_schema(found["properties"]["algorithm"])
        choices = algorithm["properties"]
        choices["advantage"] = without(choices["advantage"], cls.unfit)
        return found

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        """Of the settings that they will be, so that no rule has to know what is still open."""
        check_rules(resolve(self, ANY_MACHINE).settings)
        return self
