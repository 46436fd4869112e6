"""Whether a plan fits the nodes."""

from dataclasses import replace

import pytest

from configs.cluster import PoolConfig
from engines.workers.placement import NodeResources, check_placed, place, this_node


def node(name="n", cores=8, gpus=0):
    return NodeResources(name=name, cores=cores, gpus=tuple(str(number) for number in range(gpus)))


def test_every_gpu_has_one_worker():
    pools = {"train": PoolConfig(workers=2, gpus=1), "rollout": PoolConfig(workers=1, gpus=2)}
    placed = place(pools, [node(gpus=4)])
    assert [one.name for one in placed] == ["train-0", "train-1", "rollout-0"]
    taken = [gpu for one in placed for gpu in one.gpus]
    assert sorted(taken) == ["0", "1", "2", "3"]
    assert placed[2].env["CUDA_VISIBLE_DEVICES"].count(",") == 1


def test_a_worker_without_gpus_sees_none():
    (one,) = place({"cpu": PoolConfig(threads=3)}, [node(gpus=1)])
    assert one.env == {
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_the_check_is_per_node_and_not_by_totals():
    pools = {"train": PoolConfig(workers=3, gpus=2)}
    nodes = [node("a", gpus=3), node("b", gpus=3)]  # six GPUs, but room for two workers
    with pytest.raises(ValueError, match=r"cluster.pools.train wants 3 workers with 2 GPUs each"):
        place(pools, nodes)
    assert len(place({"train": PoolConfig(workers=2, gpus=2)}, nodes)) == 2


def test_pools_share_the_gpus_and_the_message_says_what_to_change():
    pools = {"train": PoolConfig(gpus=1), "rollout": PoolConfig(gpus=1)}
    with pytest.raises(ValueError, match=r"let roles share a pool \(cluster.roles\)"):
        place(pools, [node(gpus=1)])


def test_large_workers_are_placed_first():
    pools = {"small": PoolConfig(workers=2, gpus=1), "large": PoolConfig(gpus=2)}
    placed = place(pools, [node("a", gpus=2), node("b", gpus=2)])
    assert {one.node for one in placed if one.pool == "small"} == {"b"}


def test_threads_of_one_worker():
    with pytest.raises(ValueError, match=r"cluster.pools.cpu.threads = 9.*Set it to at most 8"):
        place({"cpu": PoolConfig(threads=9)}, [node(cores=8)])


def test_threads_of_one_pool_but_not_of_pools_that_take_turns():
    with pytest.raises(ValueError, match=r"3 workers with 3 threads each.*Lower"):
        place({"cpu": PoolConfig(workers=3, threads=3)}, [node(cores=8)])
    turns = {"train": PoolConfig(threads=8), "rollout": PoolConfig(threads=8)}
    assert len(place(turns, [node(cores=8)])) == 2
    assert len(place({"cpu": PoolConfig(workers=20)}, [node(cores=8)])) == 20


def test_gpus_are_found_without_torch(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-abc")
    assert this_node().gpus == ("2", "GPU-abc")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert this_node().gpus == ()


def test_gpus_are_counted_by_nvidia_smi(monkeypatch, tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nprintf '0, GPU-a\\n1, GPU-b\\n'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert this_node().gpus == ("0", "1")
    assert this_node().devices == ("GPU-a", "GPU-b")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert (this_node().gpus, this_node().devices) == (("1",), ("GPU-b",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    command.write_text("#!/bin/sh\necho no devices were found >&2\nexit 6\n")
    assert this_node().gpus == ()


def test_workers_that_others_started_are_checked_too():
    pools = {"train": PoolConfig(workers=2, gpus=1, threads=4)}
    good = {"w0": ("train", node("a", gpus=1)), "w1": ("train", node("b", gpus=1))}
    check_placed(pools, good)
    with pytest.raises(ValueError, match="Workers w0 and w1 on a share GPU 0"):
        check_placed(pools, {**good, "w1": ("train", node("a", gpus=1))})
    # Each sees one device of the node's and calls it 0.
    alone = {f"w{n}": ("train", replace(node("a", gpus=1), uuids=(f"GPU-{n}",))) for n in (0, 1)}
    check_placed(pools, alone)
    with pytest.raises(ValueError, match="Workers w0 and w1 on a share GPU GPU-0"):
        check_placed(pools, {**alone, "w1": alone["w0"]})
    with pytest.raises(ValueError, match="worker w1 on b may use 0"):
        check_placed(pools, {**good, "w1": ("train", node("b"))})
    with pytest.raises(ValueError, match="worker w1 on b has 2 cores"):
        check_placed(pools, {**good, "w1": ("train", node("b", cores=2, gpus=1))})
