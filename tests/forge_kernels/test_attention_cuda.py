"""attention on a GPU: real sizes, and inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from forge_kernels.ops.attention import ATTENTION, attention
from tests.support.kernel_kit import check_against_reference, run

pytestmark = pytest.mark.gpu


def tensors(b, h, hk, s, t, d, dtype=torch.bfloat16):
    sizes = (h, s), (hk, t), (hk, t)
    return [torch.randn(b, x, n, d, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_() for n, x in sizes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [(4, 12, 12, 1024, 1024, 64), (1, 8, 2, 2000, 2000, 128), (1, 4, 4, 777, 1500, 80), (1, 2, 1, 1000, 300, 256)],
    ids=str,
)
def test_real_sizes_equal_the_reference(sizes, causal):
    check_against_reference(ATTENTION, tensors(*sizes), {"causal": causal})


def test_float32_equals_the_reference():
    check_against_reference(ATTENTION, tensors(1, 4, 2, 300, 300, 64, torch.float32), {"causal": True})


def test_a_cuda_graph_replays_it_on_new_numbers():
    args = tensors(2, 4, 4, 256, 256, 64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(attention, args, {"causal": True})  # compiled before the capture
        grad = torch.randn_like(args[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = attention(*args, causal=True)
        held = [out, *torch.autograd.grad(out, args, grad)]
    with torch.no_grad():
        for x in (*args, grad):
            x.normal_()
    graph.replay()
    out = attention(*args, causal=True)
    for replayed, eager in zip(held, [out, *torch.autograd.grad(out, args, grad)], strict=True):
        assert torch.equal(replayed, eager)
