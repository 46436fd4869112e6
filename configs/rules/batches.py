"""How a step's samples divide: into shards, mini-batches, and rows of the ranks that train."""

from configs.cluster.cluster import Role
from configs.rules.rule import Rule, where
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
