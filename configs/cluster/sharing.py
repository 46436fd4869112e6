"""The rules of cluster.share_devices: what can take turns, and what would wait for ever."""

from collections.abc import Sequence

from configs.cluster.cluster import ClusterConfig, Role


def check_sharing(cluster: ClusterConfig, roles: Sequence[Role], max_staleness: int) -> None:
    """ValueError, in one sentence, where the engines of these roles cannot have devices in turn."""
    of = cluster.roles.pool_of
    if len({of(role) for role in roles}) == len(roles):
        pools = ", ".join(f"{role} on {of(role)}" for role in roles)
        raise ValueError(
            f"cluster.share_devices = true, but no two roles share a pool ({pools}). Set "
            f"cluster.roles.rollout = {of('actor')}, or cluster.share_devices = false."
        )
    pool = of("rollout")
    if max_staleness > 0 and any(of(role) == pool for role in roles if role != "rollout"):
        raise ValueError(
            f"max_staleness = {max_staleness} samples while another step trains, and with "
            f"cluster.share_devices = true only one of the two has the devices of pool {pool}. Set "
            "max_staleness = 0, or cluster.roles.rollout to a pool of its own."
        )
