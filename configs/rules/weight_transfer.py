"""When a trainer can send versions to the engines itself."""

from configs.rules.rule import Rule, where
from configs.run import RunConfig


def _way(config: RunConfig) -> str:
    return f"rollout.weight_transfer = {config.rollout.weight_transfer}"


def _pools(config: RunConfig) -> tuple[str, str]:
    """Of the trainer, and of the engines."""
    return config.cluster.roles.pool_of("actor"), config.cluster.roles.pool_of("rollout")


def _gpus(config: RunConfig) -> tuple[int, int]:
    trainer, engines = (config.cluster.pools[name].gpus for name in _pools(config))
    return trainer, engines


WEIGHT_TRANSFER: tuple[Rule[RunConfig], ...] = where(
    lambda config: config.rollout.weight_transfer != "store",
    Rule(
        needs=lambda config: config.lora is None,
        says=lambda config: (
            f"{_way(config)} sends whole weights, and with lora a version is a small adapter. "
            "Set rollout.weight_transfer = store."
        ),
    ),
    Rule(
        needs=lambda config: not config.cluster.share_devices,
        says=lambda config: (
            f"{_way(config)} needs trainer and engines on their devices at once, and "
            "cluster.share_devices = true gives these to one at a time. Set one of the two otherwise."
        ),
    ),
    Rule(
        needs=lambda config: (
            3 * config.rollout.weight_transfer_timeout
            < min(config.train.deadline, config.rollout.deadline)
        ),
        says=lambda config: (
            f"rollout.weight_transfer_timeout = {config.rollout.weight_transfer_timeout:g} s may "
            f"pass three times in a transfer, longer than train.deadline = "
            f"{config.train.deadline:g} or rollout.deadline = {config.rollout.deadline:g} lets a "
            "call take. Set it lower."
        ),
    ),
    Rule(
        needs=lambda config: all(_gpus(config)) or not any(_gpus(config)),
        says=lambda config: (
            f"{_way(config)} goes from GPU to GPU, or from CPU to CPU, and cluster.pools."
            f"{_pools(config)[0]}.gpus = {_gpus(config)[0]} where cluster.pools."
            f"{_pools(config)[1]}.gpus = {_gpus(config)[1]}. Set rollout.weight_transfer = store."
        ),
    ),
    Rule(
        needs=lambda config: (
            config.rollout.weight_transfer != "ipc"
            or not any(_gpus(config))
            or len({*_pools(config)}) == 1
        ),
        says=lambda config: (
            f"{_way(config)} is for engines on the trainer's own GPUs, and cluster.roles.rollout = "
            f"{_pools(config)[1]} has others. Set rollout.weight_transfer = nccl, or "
            f"cluster.roles.rollout = {_pools(config)[0]}."
        ),
    ),
    Rule(
        needs=lambda config: (
            config.rollout.weight_transfer != "nccl"
            or not any(_gpus(config))
            or len({*_pools(config)}) == 2
        ),
        says=lambda config: (
            f"{_way(config)} needs a GPU for each side, and trainer and engines are both on pool "
            f"{_pools(config)[0]}. Set rollout.weight_transfer = ipc, or another "
            "cluster.roles.rollout."
        ),
    ),
)
