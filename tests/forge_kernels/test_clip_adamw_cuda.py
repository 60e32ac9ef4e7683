"""ClipAdamW on a CUDA device: no host syncs, CUDA graphs, long tensors, loss scaling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from forge_kernels.ops.clip_adamw import clip_adamw
from forge_kernels.ops.clip_adamw_optimizer import ClipAdamW

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_syncs() -> Iterator[None]:
    """A host sync is an error meanwhile, once the test says so."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(100, 333), nn.GELU(), nn.Linear(333, 7)).cuda()


def groups(net: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in net.parameters() if p.ndim > 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in net.parameters() if p.ndim == 1]}]


def backward(net: nn.Module, x: Tensor) -> None:
    net.zero_grad(set_to_none=True)
    net(x).square().sum().backward()


def torch_trained(batches: Tensor, rates: list[float]) -> nn.Module:
    net = network()
    optimizer = torch.optim.AdamW(groups(net), lr=1.0, fused=True)
    for x, rate in zip(batches, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        backward(net, x)
        clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return net


def assert_close(net: nn.Module, right: nn.Module) -> None:
    torch.testing.assert_close(list(net.parameters()), list(right.parameters()), rtol=1e-4, atol=1e-5)


def batches(count: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(5)
    return torch.randn(count, 32, 100, device="cuda", generator=generator)


def test_the_host_never_waits_while_rates_change(no_syncs):
    net, inputs, rates, held = network(), batches(6), [1e-2 / (1 + n) for n in range(6)], []
    optimizer = ClipAdamW(groups(net), max_norm=0.5)
    for number, (x, rate) in enumerate(zip(inputs, rates, strict=True)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        held.append([p.grad for p in net.parameters()])  # so that the next gradients are elsewhere
        backward(net, x)
        optimizer.step()
        if number == 0:
            torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
    assert_close(net, torch_trained(inputs, rates))


def test_a_graph_of_the_whole_step_reads_its_own_tables():
    net, inputs, rate = network(), batches(12), torch.tensor(1e-2, device="cuda")
    optimizer, x = ClipAdamW(groups(net), lr=rate, max_norm=0.5), torch.empty(32, 100, device="cuda")
    rates = [1e-2 * 0.9**n for n in range(12)]

    def step() -> None:
        backward(net, x)
        optimizer.step()

    graphs: list[torch.cuda.CUDAGraph] = []
    for number, batch in enumerate(inputs):
        x.copy_(batch)
        rate.fill_(rates[number])
        if number in (3, 8):  # two graphs, with eager steps before, between and after
            net.zero_grad(set_to_none=True)
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                step()
        if number in (3, 5, 8, 9, 11):
            graphs[number % len(graphs)].replay()
        else:
            step()
        del batch
        junk = [torch.full((size,), torch.nan, device="cuda") for size in (7, 100, 333, 2331, 33300, 65536)]
        del junk
    assert_close(net, torch_trained(inputs, rates))
    assert {float(state["step"]) for state in optimizer.state.values()} == {12.0}


@pytest.mark.parametrize("fails", [False, True])
def test_eager_steps_after_an_unplayed_capture_send_tables(fails):
    net, inputs, rates = network(), batches(4), [1e-2, 1e-2, 3e-2, 3e-2]
    optimizer, x = ClipAdamW(groups(net), max_norm=0.5), torch.empty(32, 100, device="cuda")
    graph = torch.cuda.CUDAGraph()
    for number, (batch, rate) in enumerate(zip(inputs, rates, strict=True)):
        x.copy_(batch)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if number == 2:  # with the rate of the eager step that follows
            net.zero_grad(set_to_none=True)
            with pytest.raises(RuntimeError, match="broke off") if fails else nullcontext(), torch.cuda.graph(graph):
                backward(net, x)
                optimizer.step()
                if fails:
                    raise RuntimeError("broke off")
        backward(net, x)
        optimizer.step()
    assert_close(net, torch_trained(inputs, rates))


def test_gradients_in_another_order_are_copied_anew():
    net, inputs, rates = network(), batches(5), [1e-2] * 5
    optimizer, x = ClipAdamW(groups(net), lr=1e-2, max_norm=0.5), torch.empty(32, 100, device="cuda")
    graph = torch.cuda.CUDAGraph()

    def step() -> None:
        backward(net, x)
        for param in net.parameters():
            if param.ndim == 2 and param.grad is not None:
                param.grad = param.grad.t().contiguous().t()
        optimizer.step()

    for number, batch in enumerate(inputs):
        x.copy_(batch)
        if number == 2:
            net.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                step()
        if number in (2, 4):
            graph.replay()
        else:
            step()
    assert_close(net, torch_trained(inputs, rates))


def test_the_norm_of_a_step_stays_with_it():
    net = network()
    optimizer, inputs, norms = ClipAdamW(groups(net), lr=0.0, max_norm=0.5), batches(2), []
    for x in inputs:
        backward(net, x)
        optimizer.step()
        norms.append(optimizer.total_norm)
    for x, norm in zip(inputs, norms, strict=True):
        backward(net, x)
        torch.testing.assert_close(norm, clip_grad_norm_(net.parameters(), 0.5))


def test_a_grad_scaler_works_without_waiting():
    net, right, x = network(), network(), batches(1)[0]
    optimizer, plain = ClipAdamW(groups(net), max_norm=0.5), torch.optim.AdamW(groups(right), fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(net(x).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    backward(right, x)
    clip_grad_norm_(right.parameters(), 0.5)
    plain.step()
    assert_close(net, right)
    before = [p.clone() for p in net.parameters()]
    net.zero_grad()
    scaler.scale(net(x * torch.inf).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, net.parameters(), before))
    assert scaler.get_scale() == 512.0


def test_the_same_gradients_give_the_same_bits():
    results = []
    for _ in range(2):
        net = network()
        optimizer = ClipAdamW(groups(net), max_norm=0.5)
        for x in batches(3):
            for param, seed in zip(net.parameters(), range(4), strict=True):
                generator = torch.Generator(device="cuda").manual_seed(seed)
                param.grad = torch.randn(param.shape, device="cuda", generator=generator) * x.mean()
            optimizer.step()
        results.append(list(net.parameters()))
    assert all(map(torch.equal, *results))


@pytest.mark.slow
def test_more_entries_than_32_bits_can_count():
    size = 2**31 + 8193
    param, exp_avg, exp_avg_sq = (torch.zeros(size, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    grad = torch.ones(size, dtype=torch.bfloat16, device="cuda")
    step = torch.zeros((), device="cuda")
    options = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    norm = clip_adamw([param], [grad], [exp_avg], [exp_avg_sq], step, **options)
    torch.testing.assert_close(norm, torch.tensor(float(size) ** 0.5, device="cuda"))
    assert (param == -0.5).all()
