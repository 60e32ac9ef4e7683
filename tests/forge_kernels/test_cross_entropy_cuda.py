"""cross_entropy and linear_cross_entropy with real vocabularies, where a row is split over several programs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from forge_kernels.ops.cross_entropy import CROSS_ENTROPY, cross_entropy
from forge_kernels.ops.linear_cross_entropy import linear_cross_entropy
from forge_kernels.triton import cross_entropy_rows
from tests.support.kernel_kit import DEVICE, check_against_reference

pytestmark = pytest.mark.gpu
inf = float("inf")


def batch(rows, classes, dtype=torch.bfloat16):
    logits = (torch.randn(rows, classes, device=DEVICE) * 3).to(dtype).requires_grad_()
    return logits, torch.randint(classes, (rows,), device=DEVICE)


@pytest.mark.parametrize("classes", [9217, 50257, 50304, 128256, 262144])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_split_rows_equal_the_reference(classes, dtype):
    for options in (
        {},
        {"reduction": "sum"},
        {"label_smoothing": 0.1},
    ):
        logits, target = batch(30, classes, dtype)
        target[::7], target[1] = -100, classes - 1
        check_against_reference(CROSS_ENTROPY, (logits, target), options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("classes", "dtype"), [(50304, torch.bfloat16), (262144, torch.float32)])
def test_parts_that_do_not_wait_give_the_same_bits(monkeypatch, smoothing, classes, dtype):
    logits, target = batch(500, classes, dtype)

    def step():
        loss = cross_entropy(logits, target, label_smoothing=smoothing)
        return loss.detach(), torch.autograd.grad(loss, logits)[0]

    prompt = step()
    monkeypatch.setattr(cross_entropy_rows, "PATIENCE", 0)
    late = step()
    assert torch.equal(prompt[0], late[0])
    assert torch.equal(prompt[1], late[1])


def test_runs_are_bit_identical_from_a_graph_without_waits():
    logits, target = batch(4096, 50304)

    def step():
        return torch.autograd.grad(cross_entropy(logits, target), logits)[0]

    first = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [step() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first, other) for other in others)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    captured.zero_()
    graph.replay()
    assert torch.equal(first, captured)


def test_more_than_two_billion_logits():
    logits, target = torch.randn(65536, 50304, device=DEVICE, dtype=torch.bfloat16), torch.arange(65536, device=DEVICE)
    target %= 50304
    rows = torch.tensor([0, 42690, 65535], device=DEVICE)
    few = logits[rows].double().requires_grad_()
    exact = torch.autograd.grad(F.cross_entropy(few, target[rows], reduction="sum"), few)[0]
    loss = cross_entropy(logits.requires_grad_(), target, reduction="sum")
    found = torch.autograd.grad(loss, logits)[0][rows]
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-6)


def test_the_peak_of_a_chunked_head_does_not_grow():
    weight = (torch.randn(50304, 256, device=DEVICE) / 16).bfloat16().requires_grad_()

    def peak(tokens):
        hidden = torch.randn(tokens, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        target = torch.randint(50304, (tokens,), device=DEVICE)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(linear_cross_entropy(hidden, weight, target, chunk=1024), (hidden, weight))
        return torch.cuda.max_memory_allocated() - before - hidden.nbytes

    peak(1024)
    assert peak(8192) < peak(1024) + 2**22
