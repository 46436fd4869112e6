"""The fused norm on CPU gives what vLLM's own operations give, and is what an engine uses."""

import pytest
import torch

ir = pytest.importorskip("vllm.ir")

from configs.environment import cpu_multiplies_bfloat16  # noqa: E402
from engines.rollout import vllm_cpu_kernels as vllm_cpu  # noqa: E402
from engines.rollout.vllm_cpu_kernels import PROVIDER  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def registered():
    vllm_cpu.register()
    vllm_cpu.register()  # vLLM's plugin may come after, in one process: the second changes nothing


def impl(name, provider):
    return getattr(ir.ops, name).impls[provider]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 1e-5),
        pytest.param(
            *(torch.bfloat16, 2 * 2**-8),
            marks=pytest.mark.skipif(
                not cpu_multiplies_bfloat16(), reason="the kernel is not used for it on this CPU"
            ),
        ),
    ],
)
@pytest.mark.parametrize("shape", [(1, 32), (7, 576), (64, 2048)])
def test_the_norm_is_that_of_vllms_operations(shape, dtype, tolerance):
    x, residual = (torch.randn(shape, dtype=dtype) * 3 for _ in range(2))
    weight = torch.randn(shape[-1], dtype=dtype)
    fused = impl("rms_norm", PROVIDER).impl_fn(x, weight, 1e-5)
    plain = impl("rms_norm", "native").impl_fn(x, weight, 1e-5)
    torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance)

    # The norm is of the sum as it is kept, rounded, as in transformers; vLLM's norm is of the exact sum.
    _, total = impl("fused_add_rms_norm", "native").impl_fn(x, residual, weight, 1e-5)
    plain = impl("rms_norm", "native").impl_fn(total, weight, 1e-5)
    fused, held = impl("fused_add_rms_norm", PROVIDER).impl_fn(
        x.clone(), residual.clone(), weight, 1e-5
    )
    torch.testing.assert_close(held, total, rtol=0, atol=0)
    torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(2, 30), torch.ones(30)),
        (torch.ones(2, 128)[:, :64], torch.ones(64)),
        (torch.ones(2, 64), torch.ones(64, dtype=torch.bfloat16)),
        (torch.ones(2, 64), None),
    ],
)
def test_what_the_kernel_does_not_take_goes_to_vllms_operations(x, weight):
    assert not impl("rms_norm", PROVIDER).supports_args(x, weight, 1e-5, None)
    assert not impl("fused_add_rms_norm", PROVIDER).supports_args(x, x, weight, 1e-5, None)


def test_without_avx_512_bfloat16_goes_to_vllms_operations(monkeypatch):
    x, weight = (torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16))
    for there in (True, False):
        monkeypatch.setattr(vllm_cpu, "cpu_multiplies_bfloat16", lambda there=there: there)
        assert impl("rms_norm", PROVIDER).supports_args(x, weight, 1e-5, None) is there


def test_one_adapter_is_multiplied_by_as_by_vllms_operations():
    """By slices of different widths, and by what is left of rank and height as zeros."""
    from types import SimpleNamespace

    from vllm.lora.ops.torch_ops import bgmv_expand_slice, bgmv_shrink

    rank, width, heights, tokens = 8, 48, (32, 16, 16), 5
    x, y = torch.randn(tokens, width), torch.randn(tokens, sum(heights))
    a = tuple(torch.randn(1, 1, rank, width) for _ in heights)
    b = tuple(torch.randn(1, 1, height, rank) for height in heights)
    wanted, begin = y.clone(), 0
    for one_a, one_b, height in zip(a, b, heights, strict=True):
        low, first = torch.zeros(tokens, rank), torch.zeros(tokens, dtype=torch.long)
        bgmv_shrink(x, one_a, low, first, 1.0)
        bgmv_expand_slice(low, one_b, wanted, first, begin, height, True)
        begin += height
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    own, untouched = y.clone(), y.clone()
    PunicaWrapperCPU.add_lora_linear(SimpleNamespace(no_lora=False), own, x, a, b, 1.0, heights)
    torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
    PunicaWrapperCPU.add_lora_linear(
        SimpleNamespace(no_lora=True), untouched, x, a, b, 1.0, heights
    )
    assert torch.equal(untouched, y)
