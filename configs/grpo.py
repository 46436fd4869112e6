"""The settings of a GRPO run: those of any run, and the rules that span several parts of them."""

from typing import ClassVar, Self

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from configs.base import Settings
from configs.cluster.cluster import Role
from configs.cluster.sharing import check_sharing
from configs.data import ReasoningGymSource
from configs.engine_rules import check_elastic, check_image_policy
from configs.environment import cpu_multiplies_bfloat16
from configs.form import without
from configs.run import RunConfig
from configs.watch_rules import check_what_watches

GPU_SEQUENCES = 512  # that a vLLM on GPUs decodes at once, unless set


class GRPOConfig(RunConfig):
    """Group relative policy optimisation (arXiv:2402.03300) and its relatives."""

    # Kinds of algorithm.advantage that need what other flows make; the form does not offer them.
    unfit: ClassVar[tuple[str, ...]] = ("gae", "tree", "tree_segment", "tree_sibling")

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
    def _batches_divide(self) -> Self:
        self.check_mini_batches("actor", "train")
        if self.rollout.shards > self.prompts_per_step:
            raise ValueError(
                f"rollout.shards = {self.rollout.shards} is more than prompts_per_step = "
                f"{self.prompts_per_step}. Set rollout.shards to at most {self.prompts_per_step}."
            )
        return self

    @model_validator(mode="after")
    def _estimator_has_its_inputs(self) -> Self:
        if self.algorithm.needs_critic:
            raise ValueError(
                f"algorithm.advantage.kind = {self.algorithm.advantage.kind} needs a critic, which "
                "this flow does not train. Run it with refrain ppo, or set "
                "algorithm.advantage.kind = grpo or another estimator without a critic."
            )
        if self.algorithm.compares_subtrees:
            raise ValueError(
                f"algorithm.advantage.kind = {self.algorithm.advantage.kind} compares completions "
                "within subtrees, and this flow samples none. Run it with refrain tree, or "
                "set algorithm.advantage.kind = dr_grpo, which it would be here."
            )
        return self

    @model_validator(mode="after")
    def _stale_samples_are_corrected(self) -> Self:
        algorithm = self.algorithm
        if self.max_staleness > 0 and not algorithm.corrects_for_behavior:
            raise ValueError(
                f"max_staleness = {self.max_staleness} trains on samples of older policies, and "
                f"algorithm.loss.kind = {algorithm.loss.kind} with algorithm.ratio_against = "
                f"{algorithm.ratio_against} and no algorithm.correction takes no account of them. "
                "Set algorithm.correction = [{kind: truncate}], algorithm.loss.kind = decoupled, or "
                "algorithm.ratio_against = rollout_logprobs with a loss that bounds the ratio, such "
                "as clipped."
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_left(self) -> Self:
        rollout = self.rollout
        if self.over_samples and rollout.shards != self.prompts_per_step:
            raise ValueError(
                f"rollout.over_sampling = {rollout.over_sampling:g} hands out groups one by one, and "
                f"rollout.shards = {rollout.shards} puts several together. "
                f"Set rollout.shards = {self.prompts_per_step}, the number of prompts_per_step."
            )
        if self.carries and self.max_staleness == 0:
            raise ValueError(
                "rollout.partial_rollout = carry trains on groups that an older policy began, and "
                "max_staleness = 0 allows none. Set max_staleness = 1 or more (from 2 on, a step "
                "also samples while another trains), or rollout.partial_rollout = off."
            )
        for name, off in (("overdue", "wait"), ("max_carried_steps", None)):
            if getattr(rollout, name) != off and not self.carries:
                raise ValueError(
                    f"rollout.{name} = {getattr(rollout, name)} is about carried groups, and none "
                    "are. Set rollout.partial_rollout = carry and rollout.over_sampling above 1."
                )
        return self

    @model_validator(mode="after")
    def _episodes_have_what_they_need(self) -> Self:
        of_environment = [
            number
            for number, function in enumerate(self.rewards.functions)
            if function.kind == "environment"
        ]
        if self.episodes is None and of_environment:
            raise ValueError(
                f"rewards.functions.{of_environment[0]}.kind = environment is the reward of an "
                "episode's environment, and episodes = null has none. Set episodes.environment."
            )
        if of_environment and self.episodes and self.episodes.environment.kind == "tools":
            raise ValueError(
                f"rewards.functions.{of_environment[0]}.kind = environment is the reward of an "
                "episode's environment, and functions give none. Set episodes.environment.kind = "
                "class, or rewards.functions to functions that score the answer."
            )
        return self

    @model_validator(mode="after")
    def _stored_logprobs_exist(self) -> Self:
        if self.train.recompute_old_logprobs is False and self.algorithm.needs_stored_logprobs:
            raise ValueError(
                "train.recompute_old_logprobs = false, but the token baselines, a KL in the reward "
                "or of a teacher as an advantage, and normalised corrections need the policy's "
                "log-probs before the update. "
                "Set train.recompute_old_logprobs = auto."
            )
        return self

    @model_validator(mode="after")
    def _proximal_logprobs_are_between_versions(self) -> Self:
        if self.algorithm.proximal == "recompute":
            return self
        train, chosen = self.train, "algorithm.proximal = loglinear"
        if self.max_staleness == 0:
            raise ValueError(
                f"{chosen} interpolates between policy versions, and with max_staleness = 0 every "
                "token is of the version before the update, so it would be the behaviour policy "
                "itself. Set max_staleness higher, algorithm.proximal = recompute, or "
                "algorithm.ratio_against = rollout_logprobs."
            )
        if train.recompute_old_logprobs is True:
            raise ValueError(
                f"{chosen} takes the place of the log-prob pass that train.recompute_old_logprobs = "
                "true asks for. Set train.recompute_old_logprobs = auto, or algorithm.proximal = "
                "recompute."
            )
        if train.epochs * train.mini_batches == 1:
            raise ValueError(
                f"{chosen} spares the log-prob pass before an update of several optimizer steps; "
                "with train.epochs x train.mini_batches = 1 there is none, since the update's first "
                "pass has the exact log-probs. Set algorithm.proximal = recompute, or "
                "train.mini_batches higher."
            )
        return self

    @model_validator(mode="after")
    def _what_watches_fits(self) -> Self:
        check_what_watches(self)
        return self

    @model_validator(mode="after")
    def _a_policy_that_looks_fits(self) -> Self:
        if self.sees_frames:
            check_image_policy(self)
        return self

    @model_validator(mode="after")
    def _elastic_workers_can_train_it(self) -> Self:
        if self.train.engine == "elastic":
            check_elastic(self)
        return self

    def check_mini_batches(self, role: Role, group: str) -> None:
        """ValueError unless a step's samples fill the role's mini-batches; group: its settings."""
        parts = self.train_of(role).mini_batches
        if self.trained_per_step % parts:
            raise ValueError(
                f"prompts_per_step x group_size = {self.trained_per_step} samples cannot be split "
                f"into {group}.mini_batches = {parts} equal parts. "
                f"Set {group}.mini_batches to a divisor of {self.trained_per_step}."
            )
        if self.train_of(role).engine == "elastic":  # any number of workers does
            return
        pool = self.cluster.roles.pool_of(role)
        ranks, shared = self.cluster.pools[pool].workers, self.train_of(role).sequence_parallel
        if ranks % shared:
            raise ValueError(
                f"{group}.sequence_parallel = {shared} does not divide cluster.pools.{pool}.workers "
                f"= {ranks}. Set {group}.sequence_parallel to a divisor of {ranks}."
            )
        if self.trained_per_step // parts < ranks // shared:
            raise ValueError(
                f"A mini-batch of {self.trained_per_step // parts} samples has fewer rows than "
                f"cluster.pools.{pool}.workers = {ranks} ranks. "
                f"Set prompts_per_step or group_size higher, or {group}.mini_batches lower."
            )

    @model_validator(mode="after")
    def _devices_can_be_shared(self) -> Self:
        if self.cluster.share_devices:
            if self.opponent is not None:
                raise ValueError(
                    "cluster.share_devices = true, but the engines of episodes.opponent do not give "
                    "their devices back. Set cluster.share_devices = false, or episodes.opponent = "
                    "null."
                )
            check_sharing(self.cluster, self.engine_roles, self.max_staleness)
            pool = self.cluster.roles.pool_of("reward_model")
            if self.rewards.on_engines and pool in map(
                self.cluster.roles.pool_of, self.engine_roles
            ):
                raise ValueError(
                    "cluster.share_devices = true, but reward models and judges do not give the "
                    f"devices of pool {pool} back. Set cluster.roles.reward_model to another pool."
                )
        return self

    @model_validator(mode="after")
    def _adapters_are_stored_as_they_are(self) -> Self:
        if self.lora is not None and self.store.whole_every > 1:
            raise ValueError(
                f"store.whole_every = {self.store.whole_every} stores versions as differences, and "
                "with lora a version is a small adapter already. Set store.whole_every = 1."
            )
        return self

    @model_validator(mode="after")
    def _something_is_rewarded(self) -> Self:
        if self.needs_rewards and not self.rewards.functions:
            raise ValueError(
                "rewards.functions is empty, so every sample would be worth the same. Set "
                "rewards.functions, such as [{kind: math}]."
            )
        return self

    @model_validator(mode="after")
    def _rewards_fit_data(self) -> Self:
        made = isinstance(self.data.source, ReasoningGymSource)
        for position, function in enumerate(self.rewards.functions):
            if function.kind == "reasoning_gym" and not made:
                raise ValueError(
                    f"rewards.functions.{position}.kind = reasoning_gym scores only reasoning-gym "
                    f"problems, but data.source.kind = {self.data.source.kind}. "
                    "Set it to math or function."
                )
        for model in self.rewards.models:
            alone = None
            if self.group_size == 1:
                alone = "group_size = 1"
            elif suite := self._suite_with_one_answer():
                alone = f"evaluation.suites.{suite}.samples = 1"
            elif self.algorithm.needs_baselines:
                alone = f"algorithm.advantage.kind = {self.algorithm.advantage.kind}"
            if model.pairwise is not None and alone is not None:
                raise ValueError(
                    f"The reward {model.label} compares the answers to a prompt, and {alone} has "
                    "prompts with one answer. Set more, or pairwise = null with a model that scores "
                    "each alone."
                )
        return self

    def _suite_with_one_answer(self) -> str | None:
        """A suite that is scored by the run's rewards and asks for one completion of each row."""
        suites = {} if self.evaluation is None else self.evaluation.suites
        alone = (name for name, one in suites.items() if one.rewards is None and one.samples == 1)
        return next(alone, None)

    @model_validator(mode="after")
    def _store_is_shared(self) -> Self:
        if self.store.uri.startswith("memory:"):
            raise ValueError(
                f"store.uri = {self.store.uri} lives in one process, and workers are others. "
                "Set store.uri to a file:// or s3:// address."
            )
        relative = "://" not in self.store.uri or (
            self.store.uri.startswith("file://") and not self.store.uri.startswith("file:///")
        )
        if self.cluster.kind != "local" and relative:
            raise ValueError(
                f"store.uri = {self.store.uri} is relative to this process, and the workers of "
                f"cluster.kind = {self.cluster.kind} run elsewhere. Set store.uri to "
                "s3://BUCKET/PREFIX, or to file:///PATH on a file system that all nodes share."
            )
        return self

    @model_validator(mode="after")
    def _retraining_fits(self) -> "GRPOConfig":
        if self.promotion is not None and self.evaluation is None:
            raise ValueError(
                f"promotion.alias = {self.promotion.alias} needs an evaluation to go by. "
                "Set evaluation.suites, or evaluation.source to held-out rows."
            )
        goes_on = self.continue_from is not None and self.continue_state == "trainer"
        if goes_on and self.train.schedule != "constant":
            raise ValueError(
                f"continue_state = trainer takes over a train.schedule = {self.train.schedule} "
                "that has come to its end. Set train.schedule = constant, or "
                "continue_state = weights."
            )
        return self
