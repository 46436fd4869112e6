"""What has to hold in every run: how samples divide, who draws and scores them, where they are."""

import re
from collections.abc import Callable, Iterable

from configs.algorithm.algorithm import AlgorithmConfig
from configs.cluster import Role, patch_sentence
from configs.credentials import credential_sentence
from configs.data import ReasoningGymSource
from configs.model import PretrainedModel
from configs.rewards import RewardModelReward
from configs.rollout import ThinkingConfig, cut_by
from configs.rules.rule import Rule, of_each, where
from configs.run import RunConfig


def mini_batches(role: Role, group: str) -> tuple[Rule[RunConfig], ...]:
    """A step's samples fill the mini-batches of a role that trains; group: its settings."""

    def samples(config: RunConfig) -> int:
        return config.trained_per_step // config.train_of(role).mini_batches

    def ranks(config: RunConfig) -> int:
        return config.cluster.pools[config.cluster.roles.pool_of(role)].workers

    def workers(config: RunConfig) -> str:
        return f"cluster.pools.{config.cluster.roles.pool_of(role)}.workers = {ranks(config)}"

    def shared(config: RunConfig) -> int:
        return config.train_of(role).sequence_parallel

    divide: Rule[RunConfig] = Rule(
        needs=lambda config: config.trained_per_step % config.train_of(role).mini_batches == 0,
        says=lambda config: (
            f"prompts_per_step x group_size = {config.trained_per_step} samples cannot be split "
            f"into {group}.mini_batches = {config.train_of(role).mini_batches} equal parts. "
            f"Set {group}.mini_batches to a divisor of {config.trained_per_step}."
        ),
    )
    of_ranks: tuple[Rule[RunConfig], ...] = (
        Rule(
            needs=lambda config: ranks(config) % shared(config) == 0,
            says=lambda config: (
                f"{group}.sequence_parallel = {shared(config)} does not divide {workers(config)}. "
                f"Set {group}.sequence_parallel to a divisor of {ranks(config)}."
            ),
        ),
        Rule(
            needs=lambda config: samples(config) >= ranks(config) // shared(config),
            says=lambda config: (
                f"A mini-batch of {samples(config)} samples has fewer rows than "
                f"{workers(config)} ranks. "
                f"Set prompts_per_step or group_size higher, or {group}.mini_batches lower."
            ),
        ),
    )
    # Of elastic workers any number does.
    return divide, *where(lambda config: config.train_of(role).engine != "elastic", *of_ranks)


BATCHES: tuple[Rule[RunConfig], ...] = (
    *mini_batches("actor", "train"),
    Rule(
        needs=lambda config: config.rollout.shards <= config.prompts_per_step,
        says=lambda config: (
            f"rollout.shards = {config.rollout.shards} is more than prompts_per_step = "
            f"{config.prompts_per_step}. Set rollout.shards to at most {config.prompts_per_step}."
        ),
    ),
)


ADDRESS = re.compile(r"(tcp|tls)://(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]+):(?P<port>\d{1,5})")


EVERYWHERE = ("0.0.0.0", "[::]")


def address_sentence(config: RunConfig) -> str:
    """Why nobody can join a scheduler at cluster.address; empty where somebody may."""
    address = config.cluster.address
    if address is None:
        return ""
    parts = ADDRESS.fullmatch(address)
    if parts is None or not 1 <= int(parts["port"]) <= 65535:
        return (
            f"cluster.address = {address} is no address of a scheduler. Set it as tcp://HOST:PORT, "
            "or as tls://HOST:PORT."
        )
    if parts["host"] in EVERYWHERE:
        return (
            f"cluster.address = {address} is where a scheduler listens, and not where others reach "
            "it. Set it to the address or name of the scheduler's machine."
        )
    return ""


CLUSTERS: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: not address_sentence(config),
        says=address_sentence,
        new_runs_only=True,
    ),
    Rule(
        needs=lambda config: not patch_sentence(config.cluster.kubernetes),
        says=lambda config: patch_sentence(config.cluster.kubernetes),
        new_runs_only=True,
    ),
)


BIASES = "train.router_bias_update_rate"


SPREAD = "train.expert_parallel"


def for_mixtures(setting: Callable[[RunConfig], tuple[str, str]]) -> Rule[RunConfig]:
    """A rule of what only mixtures of experts have a use for.

    setting: it, and what to set instead; empty where it is not asked for.
    """
    return Rule[RunConfig](
        needs=lambda config: not setting(config)[0] or isinstance(config.model, PretrainedModel),
        says=lambda config: (
            f"{setting(config)[0]} is for mixtures of experts, and model.kind = {config.model.kind} "
            f"makes a model without any. Set {setting(config)[1]}."
        ),
    )


_ROUTERS: tuple[Rule[RunConfig], ...] = where(
    lambda config: any(config.train.of_experts),
    Rule[RunConfig](
        needs=lambda config: (
            not config.train.router_bias_update_rate
            or (config.lora is None and config.train.engine == "fsdp")
        ),
        says=lambda config: (
            f"{BIASES} = {config.train.router_bias_update_rate:g} changes the model itself at each "
            "optimizer step, which neither adapters nor elastic workers do. Set lora = null and "
            f"train.engine = fsdp, or {BIASES} = 0."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: not config.train.router_replay or config.train.engine == "fsdp",
        says=lambda config: (
            "train.router_replay = true, and elastic workers do not replay routing. Set train.engine "
            "= fsdp, or train.router_replay = false."
        ),
    ),
    for_mixtures(lambda config: config.train.of_experts),
    Rule[RunConfig](
        needs=lambda config: config.train.sequence_parallel == 1 and not config.train.compile,
        says=lambda config: (
            f"{config.train.of_experts[0]} needs layers that are not compiled, and whole samples on "
            "each rank. Set train.sequence_parallel = 1 and train.compile = false."
        ),
    ),
)

_SPREAD: tuple[Rule[RunConfig], ...] = where(
    lambda config: config.train.expert_parallel > 1,
    for_mixtures(lambda config: (f"{SPREAD} = {config.train.expert_parallel}", f"{SPREAD} = 1")),
    Rule[RunConfig](
        needs=lambda config: config.lora is None and not config.train.compile,
        says=lambda config: (
            f"{SPREAD} = {config.train.expert_parallel} needs layers that are not compiled and have "
            f"no adapters. Set lora = null and train.compile = false, or {SPREAD} = 1."
        ),
    ),
)

EXPERTS = _ROUTERS + _SPREAD


WHOLE = "rollout.top_p = 1, rollout.top_k = 0 and rollout.min_p = 0"


MASK = "rollout.sampling_mask"


LOGLINEAR = "algorithm.proximal = loglinear"


STALE_SAMPLES: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: config.max_staleness == 0 or config.algorithm.corrects_for_behavior,
        says=lambda config: (
            f"max_staleness = {config.max_staleness} trains on samples of older policies, and "
            f"algorithm.loss.kind = {config.algorithm.loss.kind} with algorithm.ratio_against = "
            f"{config.algorithm.ratio_against} and no algorithm.correction takes no account of them. "
            "Set algorithm.correction = [{kind: truncate}], algorithm.loss.kind = decoupled, or "
            "algorithm.ratio_against = rollout_logprobs with a loss that bounds the ratio, such "
            "as clipped."
        ),
    ),
)


def user_of_rollout_logprobs(algorithm: AlgorithmConfig) -> tuple[str, str]:
    """The setting by which the update uses the rollout engine's log-probs, and one that does not.

    Both empty where it uses none of them.
    """
    if algorithm.correction:
        return "algorithm.correction", "algorithm.correction = []"
    if algorithm.ratio_against == "rollout_logprobs":
        return "algorithm.ratio_against = rollout_logprobs", "ratio_against = old_logprobs"
    if algorithm.loss.kind == "decoupled":
        return "algorithm.loss.kind = decoupled", "algorithm.loss.kind = clipped"
    if algorithm.proximal == "loglinear":
        return LOGLINEAR, "algorithm.proximal = recompute"
    return "", ""


def _compares_a_part(config: RunConfig) -> str:
    cut = cut_by(config.rollout)
    setting, instead = user_of_rollout_logprobs(config.algorithm)
    return (
        f"{cut} draws from a part of the policy's distribution, and {setting} compares the "
        "log-probs of that part with the trainer's, which are of the whole: weights would be "
        f"wrong for every token. Set {MASK} = true, by which both are of that part, or {WHOLE}, or "
        f"{instead}."
    )


LOGPROBS: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: (
            config.train.recompute_old_logprobs is not False
            or not config.algorithm.needs_stored_logprobs
        ),
        says=lambda config: (
            "train.recompute_old_logprobs = false, but the token baselines, a KL in the reward "
            "or of a teacher as an advantage, and normalised corrections need the policy's "
            "log-probs before the update. "
            "Set train.recompute_old_logprobs = auto."
        ),
    ),
    *where(
        lambda config: config.algorithm.proximal == "loglinear",
        Rule[RunConfig](
            needs=lambda config: config.max_staleness > 0,
            says=lambda config: (
                f"{LOGLINEAR} interpolates between policy versions, and with max_staleness = 0 every "
                "token is of the version before the update, so it would be the behaviour policy "
                "itself. Set max_staleness higher, algorithm.proximal = recompute, or "
                "algorithm.ratio_against = rollout_logprobs."
            ),
        ),
        Rule[RunConfig](
            needs=lambda config: config.train.recompute_old_logprobs is not True,
            says=lambda config: (
                f"{LOGLINEAR} takes the place of the log-prob pass that train.recompute_old_logprobs "
                "= true asks for. Set train.recompute_old_logprobs = auto, or algorithm.proximal = "
                "recompute."
            ),
        ),
        Rule[RunConfig](
            needs=lambda config: config.train.epochs * config.train.mini_batches > 1,
            says=lambda config: (
                f"{LOGLINEAR} spares the log-prob pass before an update of several optimizer steps; "
                "with train.epochs x train.mini_batches = 1 there is none, since the update's first "
                "pass has the exact log-probs. Set algorithm.proximal = recompute, or "
                "train.mini_batches higher."
            ),
        ),
    ),
    Rule(
        needs=lambda config: (
            not cut_by(config.rollout)
            or config.rollout.sampling_mask
            or not any(user_of_rollout_logprobs(config.algorithm))
        ),
        says=_compares_a_part,
        new_runs_only=True,
    ),
)


def has_agents(config: RunConfig) -> bool:
    """Whether programs ask the policy by themselves, in a task at least."""
    played = config.played.values()
    return any(episodes.environment.kind == "agent" for episodes in played)


SAMPLING_MASK: tuple[Rule[RunConfig], ...] = where(
    lambda config: config.rollout.sampling_mask,
    Rule[RunConfig](
        needs=lambda config: bool(cut_by(config.rollout)) or has_agents(config),
        says=lambda config: (
            f"{MASK} = true keeps the words that rollout.top_p, top_k and min_p leave, or a grammar "
            f"that an agent asks for, and here all are left. Set one of them, or {MASK} = false."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: config.rollout.top_k != 1,
        says=lambda config: (
            f"rollout.top_k = 1 leaves one word, whose probability is 1: with {MASK} = true no token "
            f"would train. Set rollout.top_k higher, or {MASK} = false."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: (
            config.rollout.engine != "vllm"
            or config.rollout.top_k > 0
            or not cut_by(config.rollout)
        ),
        says=lambda config: (
            f"{MASK} = true and {cut_by(config.rollout)}, and vLLM gives the words left only "
            "with top_k. Set rollout.top_k to more than a token has likely words, such as 1000, or "
            f"{MASK} = false."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: not config.sees_frames,
        says=lambda config: (
            f"{MASK} = true does not go with episodes.sees = frames. Set {MASK} = false."
        ),
    ),
)


OWN_PROCESS: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: not config.rollout.own_process or config.rollout.engine == "vllm",
        says=lambda config: (
            f"rollout.own_process = true is for vLLM's front end, and rollout.engine = "
            f"{config.rollout.engine}. Set rollout.own_process = false, or rollout.engine = vllm."
        ),
    ),
)


SPECULATION: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: config.rollout.speculative is None or config.rollout.engine == "vllm",
        says=lambda config: (
            f"rollout.speculative is vLLM's, and rollout.engine = {config.rollout.engine}. Set "
            "rollout.speculative = null, or rollout.engine = vllm."
        ),
    ),
    Rule(
        needs=lambda config: (
            config.rollout.speculative is None
            or "speculative_config" not in config.rollout.engine_args
        ),
        says=lambda config: (
            "rollout.speculative and rollout.engine_args.speculative_config are two ways to propose "
            "tokens, and vLLM takes one. Remove one of them."
        ),
    ),
    *where(
        lambda config: (
            config.rollout.speculative is not None
            or "speculative_config" in config.rollout.engine_args
        ),
        Rule(
            needs=lambda config: config.rollout.min_p == 0,
            says=lambda config: (
                f"rollout.min_p = {config.rollout.min_p:g}, and vLLM takes no min_p where tokens are "
                "proposed. Set rollout.min_p = 0, or rollout.speculative = null."
            ),
            new_runs_only=True,
        ),
        Rule(
            needs=lambda config: (
                not config.rollout.sampling_mask and not config.train.router_replay
            ),
            says=lambda config: (
                "rollout.sampling_mask and train.router_replay want what vLLM knows of each token, "
                "and where tokens are proposed that was not tried. Set both to false, or "
                "rollout.speculative = null."
            ),
            new_runs_only=True,
        ),
    ),
)

SAMPLING: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: all(config.rollout.stop),
        says=lambda config: (
            f"rollout.stop = {list(config.rollout.stop)} has an empty string, which every text "
            "has, so each completion would end at its first token. Remove it."
        ),
        new_runs_only=True,
    ),
    Rule(
        needs=lambda config: "structured_outputs_config" not in config.rollout.engine_args,
        says=lambda config: (
            "rollout.engine_args.structured_outputs_config is set by Refrain itself. Remove it."
        ),
        new_runs_only=True,
    ),
    *OWN_PROCESS,
    *SPECULATION,
)


def _thinking(config: RunConfig) -> ThinkingConfig:
    assert config.rollout.thinking is not None
    return config.rollout.thinking


def _longest_turn(config: RunConfig) -> tuple[str, int]:
    """The setting that bounds a turn, and its tokens; of several tasks, the shortest."""
    turns = [episodes.max_turn_tokens for episodes in config.played.values()]
    if bounds := [turn for turn in turns if turn is not None]:
        return "episodes.max_turn_tokens", min(bounds)
    return "rollout.max_new_tokens", config.rollout.max_new_tokens


THINKING: tuple[Rule[RunConfig], ...] = where(
    lambda config: config.rollout.thinking is not None,
    Rule[RunConfig](
        needs=lambda config: _thinking(config).budget < _longest_turn(config)[1],
        says=lambda config: (
            f"rollout.thinking.budget = {_thinking(config).budget} leaves no answer within "
            f"{' = '.join(map(str, _longest_turn(config)))} tokens. Set it lower, or "
            f"{_longest_turn(config)[0]} higher."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: not config.sees_frames,
        says=lambda config: (
            "rollout.thinking does not go with episodes.sees = frames. Set rollout.thinking = null."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: not config.train.router_replay,
        says=lambda config: (
            "rollout.thinking puts words into completions whose experts no engine has told, and "
            "train.router_replay = true needs those of each token. Set one of them to null or false."
        ),
    ),
)


def _positions(config: RunConfig) -> Iterable[int]:
    return range(len(config.rewards.functions))


def _models(config: RunConfig) -> Iterable[RewardModelReward]:
    return config.rewards.models


def _alone(config: RunConfig) -> str | None:
    """The setting by which some prompt has a single answer; None where none does."""
    setting, size = config.smallest_group
    if size == 1:
        return f"{setting} = 1"
    for name, suite in config.suites.items():
        if suite.rewards is None and suite.samples == 1:
            return f"evaluation.suites.{name}.samples = 1"
    if config.algorithm.needs_baselines:
        return f"algorithm.advantage.kind = {config.algorithm.advantage.kind}"
    return None


def _gym_sources(config: RunConfig, position: int) -> int:
    """How many sources of reasoning-gym a reward scores; 0 where it scores others too."""
    data = config.data.scored_by(config.rewards.functions[position].label)
    gym = [isinstance(prompts.source, ReasoningGymSource) for prompts in data]
    return len(gym) if all(gym) else 0


REWARDS: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: not config.needs_rewards or len(config.rewards.functions) > 0,
        says=lambda config: (
            "rewards.functions is empty, so every sample would be worth the same. Set "
            "rewards.functions, such as [{kind: math}]."
        ),
    ),
    of_each(
        _positions,
        needs=lambda config, position: (
            config.rewards.functions[position].kind != "reasoning_gym"
            or _gym_sources(config, position) == 1
        ),
        says=lambda config, position: (
            f"rewards.functions.{position}.kind = reasoning_gym scores only reasoning-gym "
            f"problems, but data.source.kind = {config.data.source.kind}. "
            "Set it to math or function."
            if not config.data.tasks
            else f"rewards.functions.{position}.kind = reasoning_gym scores the problems of one "
            "reasoning-gym task. Give each such task one, with a name of its own, and name it in "
            "the task's rewards."
        ),
    ),
    of_each(
        _models,
        needs=lambda config, model: model.pairwise is None or _alone(config) is None,
        says=lambda config, model: (
            f"The reward {model.label} compares the answers to a prompt, and {_alone(config)} has "
            "prompts with one answer. Set more, or pairwise = null with a model that scores "
            "each alone."
        ),
    ),
)


def _pools(config: RunConfig) -> list[str]:
    """The pool of each role whose engines take turns."""
    return [config.cluster.roles.pool_of(role) for role in config.engine_roles]


def _rollout_has_its_own(config: RunConfig) -> bool:
    of = config.cluster.roles.pool_of
    return all(of(role) != of("rollout") for role in config.engine_roles if role != "rollout")


def _nothing_is_shared(config: RunConfig) -> str:
    of = config.cluster.roles.pool_of
    pools = ", ".join(f"{role} on {of(role)}" for role in config.engine_roles)
    return (
        f"cluster.share_devices = true, but no two roles share a pool ({pools}). Set "
        f"cluster.roles.rollout = {of('actor')}, or cluster.share_devices = false."
    )


SHARING: tuple[Rule[RunConfig], ...] = where(
    lambda config: config.cluster.share_devices,
    Rule(
        needs=lambda config: config.opponent is None,
        says=lambda config: (
            "cluster.share_devices = true, but the engines of episodes.opponent do not give "
            "their devices back. Set cluster.share_devices = false, or episodes.opponent = "
            "null."
        ),
    ),
    Rule(
        needs=lambda config: len({*_pools(config)}) < len(config.engine_roles),
        says=_nothing_is_shared,
    ),
    Rule(
        needs=lambda config: config.max_staleness == 0 or _rollout_has_its_own(config),
        says=lambda config: (
            f"max_staleness = {config.max_staleness} samples while another step trains, and with "
            "cluster.share_devices = true only one of the two has the devices of pool "
            f"{config.cluster.roles.rollout}. Set max_staleness = 0, or cluster.roles.rollout to a "
            "pool of its own."
        ),
    ),
    Rule(
        needs=lambda config: (
            not config.rewards.on_engines
            or config.cluster.roles.pool_of("reward_model") not in _pools(config)
        ),
        says=lambda config: (
            "cluster.share_devices = true, but reward models and judges do not give the "
            f"devices of pool {config.cluster.roles.pool_of('reward_model')} back. Set "
            "cluster.roles.reward_model to another pool."
        ),
    ),
)


def _is_relative(uri: str) -> bool:
    return "://" not in uri or (uri.startswith("file://") and not uri.startswith("file:///"))


STORAGE: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: not config.store.uri.startswith("memory:"),
        says=lambda config: (
            f"store.uri = {config.store.uri} lives in one process, and workers are others. "
            "Set store.uri to a file:// or s3:// address."
        ),
    ),
    Rule(
        needs=lambda config: config.cluster.kind == "local" or not _is_relative(config.store.uri),
        says=lambda config: (
            f"store.uri = {config.store.uri} is relative to this process, and the workers of "
            f"cluster.kind = {config.cluster.kind} run elsewhere. Set store.uri to "
            "s3://BUCKET/PREFIX, or to file:///PATH on a file system that all nodes share."
        ),
    ),
)

# Settings are stored with the run and shown.
CREDENTIALS: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: not credential_sentence(config),
        says=credential_sentence,
        new_runs_only=True,
    ),
)


RETRAINING: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: (
            config.continue_from is None
            or config.continue_state != "trainer"
            or config.train.schedule == "constant"
        ),
        says=lambda config: (
            f"continue_state = trainer takes over a train.schedule = {config.train.schedule} "
            "that has come to its end. Set train.schedule = constant, or "
            "continue_state = weights."
        ),
    ),
)
