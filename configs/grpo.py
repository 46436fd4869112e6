"""The settings of a GRPO run: those of any run, and the rules that span several parts of them."""

from typing import Any, ClassVar, Self

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from configs.base import Settings
from configs.cluster.cluster import Role
from configs.environment import cpu_multiplies_bfloat16
from configs.form import without
from configs.rules.batches import BATCHES
from configs.rules.elastic import ELASTIC
from configs.rules.episodes import EPISODES
from configs.rules.images import IMAGES
from configs.rules.logprobs import LOGPROBS, STALE_SAMPLES
from configs.rules.over_sampling import OVER_SAMPLING
from configs.rules.retraining import RETRAINING
from configs.rules.rewards import REWARDS
from configs.rules.rule import Rule, check_rules
from configs.rules.sampling import SAMPLING
from configs.rules.sharing import SHARING
from configs.rules.storage import CREDENTIALS, LORA_VERSIONS, STORAGE
from configs.rules.watching import EVALUATION, GUARDS, PROMOTION, QUARANTINE
from configs.run import RunConfig

GPU_SEQUENCES = 512  # that a vLLM on GPUs decodes at once, unless set

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
    *STALE_SAMPLES,
    *OVER_SAMPLING,
    *SAMPLING,
    *EPISODES,
    *LOGPROBS,
    *GUARDS,
    *QUARANTINE,
    *EVALUATION,
    *PROMOTION,
    *IMAGES,
    *ELASTIC,
    *SHARING,
    *LORA_VERSIONS,
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
    def _number_formats_suit_the_cpu(self) -> Self:
        """Float32 on CPUs that are slow in bfloat16, where the settings do not name a format.

        Weights held in bfloat16 (train.weights_dtype) are multiplied so on any.

        A run's record names it, so a resumed run keeps it on whatever machine.
        """
        if cpu_multiplies_bfloat16():
            return self
        trained: list[Role] = ["actor", "ref", "critic"]
        groups: list[tuple[str, str, list[Role]]] = [
            ("rollout", "dtype", ["rollout"]),
            ("train", "compute_dtype", trained),
        ]
        if self.train.weights_dtype == "bfloat16":
            groups.pop()
        for name, field, roles in groups:
            pools = [self.cluster.pools.get(self.cluster.roles.pool_of(role)) for role in roles]
            group: Settings = getattr(self, name)
            if field not in group.model_fields_set and not any(p and p.gpus for p in pools):
                self.__dict__[name] = group.model_copy(update={field: "float32"})
                self.__pydantic_fields_set__.add(name)
        return self

    @model_validator(mode="after")
    def _vllm_fills_gpus(self) -> Self:
        """Compiled graphs and more sequences at once, where the settings do not say.

        A run's record names them, so what it recorded counts and not what is usual later.
        """
        pool = self.cluster.pools.get(self.cluster.roles.rollout)
        usual: dict[str, object] = {"enforce_eager": False}
        if self.rollout.engine == "vllm":
            usual["max_sequences"] = GPU_SEQUENCES
        wanted = {k: v for k, v in usual.items() if k not in self.rollout.model_fields_set}
        if pool and pool.gpus and wanted:
            self.__dict__["rollout"] = self.rollout.model_copy(update=wanted)
            self.__pydantic_fields_set__.add("rollout")
        return self

    @model_validator(mode="after")
    def _shards_suit_the_prompts(self) -> Self:
        """As many as there are prompts, at most, where the settings do not say; see over_sampling."""
        shards = min(self.rollout.shards, self.prompts_per_step)
        if self.over_samples:
            shards = self.prompts_per_step
        if "shards" not in self.rollout.model_fields_set and shards != self.rollout.shards:
            self.__dict__["rollout"] = self.rollout.model_copy(update={"shards": shards})
            self.__pydantic_fields_set__.add("rollout")
        return self

    @model_validator(mode="after")
    def _engines_on_gpus_have_their_shards(self) -> Self:
        """Slots of GPU pools that sample, where the settings do not say: for a step's shards.

        As many as the engine can decode at once, and one more, so that there is always a next one.
        """
        pools, own = dict(self.cluster.pools), self.rollout.max_sequences
        for name in {self.cluster.roles.pool_of(role) for role in self.sampling_roles}:
            pool = pools.get(name)
            if pool is None or not pool.gpus or "slots" in pool.model_fields_set:
                continue
            shards = self.shards_at_once
            each = -(-self.groups_at_once * self.samples_per_prompt // shards)
            slots = 1 + min(-(-shards // pool.workers), -(-own // each))
            if slots > pool.slots:
                pools[name] = pool.model_copy(update={"slots": slots})
        if pools != self.cluster.pools:
            self.__dict__["cluster"] = self.cluster.model_copy(update={"pools": pools})
            self.__pydantic_fields_set__.add("cluster")
        return self

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        check_rules(self)
        return self
