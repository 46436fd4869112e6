"""Where an update's time goes: operations by group, and the device's share."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from engines.train.profiling import OTHER, SHOWN, by_operation, group_of, recorded, union


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("aten::mm", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("vectorized_elementwise_kernel<4, silu_kernel>", "elementwise"),
        ("_ExpandBackward", "autograd and FSDP"),
        ("aten::multinomial", OTHER),
    ],
)
def test_groups_of_names(name: str, group: str) -> None:
    assert group_of(name) == group


def test_intervals_that_overlap_count_once() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (1, 2), (3, 4)]) == 5
    assert union([]) == 0


def test_what_is_short_is_told_by_its_group() -> None:
    times = [(f"aten::mm {n}", 1.0 + n) for n in range(SHOWN)]
    times += [("aten::mm 0", 1.0), ("aten::bmm", 0.25), ("aten::bmm_2", 0.25), ("nothing", 0.1)]
    found = by_operation(times)
    assert sum(one.seconds for one in found) == pytest.approx(sum(spent for _, spent in times))
    assert sum(one.calls for one in found) == len(times)
    assert found[0].name == f"aten::mm {SHOWN - 1}"
    rest = {one.group: (one.seconds, one.calls) for one in found if not one.name}
    assert rest == {"matrix products": (0.5, 2), OTHER: (0.1, 1)}


def test_products_are_seen_where_they_take_the_time() -> None:
    a = torch.randn(512, 512)
    done, found, trace = recorded(lambda: [a @ a for _ in range(20)][-1], torch.device("cpu"))
    torch.testing.assert_close(done, a @ a)
    groups = found.by_group()
    assert max(groups, key=lambda name: groups[name]) == "matrix products"
    assert 0 < sum(groups.values()) <= 2 * found.seconds  # of one thread, and the profiler's own
    assert found.busy is None
    (product,) = (one for one in found.operations if one.name == "aten::mm")
    assert product.calls == 20
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    assert sum(one.get("name") == "aten::mm" for one in events) == 20
