"""matmul and mlp at sizes that fill a GPU: the large tiles, a CUDA graph, peak memory."""

from __future__ import annotations

import pytest
import torch

from forge_kernels.ops.matmul import MATMUL
from forge_kernels.ops.mlp import ACTIVATIONS, MLP, mlp, mlp_reference
from tests.support.kernel_kit import check_against_reference, distance

pytestmark = pytest.mark.gpu

half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def new(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(dtype).requires_grad_()


def layers(rows, width, hidden, dtype=torch.bfloat16):
    w1, w2 = new(hidden, width, dtype=dtype, scale=width**-0.5), new(width, hidden, dtype=dtype, scale=hidden**-0.5)
    return new(rows, width, dtype=dtype), w1, new(hidden, dtype=dtype), w2, new(width, dtype=dtype)


@half
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_layers_equal_the_reference(dtype, activation):
    check_against_reference(MLP, layers(4100, 520, 3080, dtype), {"activation": activation})


@half
def test_large_products_equal_the_reference(dtype):
    weight = new(3080, 520, dtype=dtype, scale=520**-0.5)
    check_against_reference(MATMUL, [new(4100, 520, dtype=dtype), weight.t(), new(3080, dtype=dtype)])


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_large_products_of_either_layout_equal_the_reference(layout):
    a = torch.randn(4096, 768, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(768, 3072, device="cuda", dtype=torch.bfloat16)
    a, b = (a, b) if layout == "rows" else (a.t().contiguous().t(), b.t().contiguous().t())
    check_against_reference(MATMUL, [a.requires_grad_(), b.requires_grad_()])


def test_more_than_two_billion_elements_are_addressed_right():
    a, b = new(66000, 64).detach(), new(64, 33000).detach()
    result = MATMUL.function(a, b)
    assert result.numel() > 2**31
    for rows in (slice(0, 100), slice(65000, 66000)):
        assert distance(result[rows], a[rows].double() @ b.double()) < MATMUL.tolerance[torch.bfloat16]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_of_another_device_are_right():
    args = [argument.detach().to("cuda:1").requires_grad_() for argument in layers(300, 64, 128)]
    check_against_reference(MLP, args)
    check_against_reference(MATMUL, [args[0], args[1].detach().t(), args[2]])


def test_a_cuda_graph_gives_the_same_bits():
    args = layers(4096, 768, 3072)
    grad = torch.randn_like(args[0])
    expected = torch.autograd.grad(mlp(*args), args, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(mlp(*args), args, grad)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_peak_memory_is_not_above_that_of_plain_torch():
    args = layers(8192, 1024, 4096)
    grad = torch.randn_like(args[0])

    def peak(function):
        torch.autograd.grad(function(*args), args, grad)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(function(*args), args, grad)
        return torch.cuda.max_memory_allocated()

    assert peak(mlp) <= peak(mlp_reference)
