"""A layer in float8 without a GPU: its products are computed by a reference, everything else is what runs on one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_speed.fp8 import linear
from tests.support.float8 import emulate, reference_product


@pytest.fixture
def tiled() -> Iterator[None]:
    """Compute in float8 on the CPU, with the limits of a GPU."""
    with emulate(tile=16):
        yield


def layer_of(inputs: int = 64, outputs: int = 96, bias: bool = True, seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Linear(inputs, outputs, bias)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def off(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference as a share of the norm."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def in_float8(layer: nn.Linear) -> nn.Linear:
    twin = copy.deepcopy(layer)
    linear.install(twin)
    return twin


# -- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-28, 1e-6, 1.0, 1e30])
def test_values_of_any_size_keep_their_precision(size: float) -> None:
    x = drawn(32, 32) * size
    most = linear.largest(x)
    back = linear.encode(x, most).double() * linear.step_of(most).double()
    assert off(back, x) < 0.03
    assert back.abs().max() == pytest.approx(x.abs().max().item(), rel=1e-6)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
def test_what_is_not_finite_makes_the_products_nan(value: float, where: str, tiled: None) -> None:
    layer = in_float8(layer_of())
    x, gradient = drawn(16, 64), drawn(16, 96)
    {"input": x, "weight": layer.weight.data, "gradient": gradient}[where][3, 5] = value
    y = layer(x.requires_grad_())
    grad_x, grad_w = torch.autograd.grad(y, [x, layer.weight], gradient)
    reached = {"input": [y, grad_w], "weight": [y, grad_x], "gradient": [grad_x, grad_w]}[where]
    assert all(each.isnan().all() for each in reached)


@pytest.mark.parametrize("fast", [False, True])
def test_the_product_of_torch_is_that_of_the_reference(fast: bool) -> None:
    a, b = (linear.encode(drawn(*shape), linear.largest(drawn(*shape))) for shape in [(48, 64), (96, 64)])
    steps = torch.tensor(0.01), torch.tensor(0.02)
    bias = drawn(96).bfloat16()
    found = linear.product(a, b.t(), *steps, bias, fast)
    torch.testing.assert_close(found, reference_product(a, b.t(), *steps, bias), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(16, 64), (4, 8, 64), (2, 2, 4, 64)])
@pytest.mark.parametrize("autocast", [True, False])
def test_output_and_gradients_are_close_to_bf16s(
    bias: bool, shape: tuple[int, ...], autocast: bool, tiled: None
) -> None:
    plain = layer_of(bias=bias)
    ours, results = in_float8(plain), []
    gradient = drawn(*shape[:-1], 96, seed=2)
    for layer in (plain, ours):
        x = drawn(*shape).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(x)
        y.backward(gradient.to(y.dtype))
        results.append([y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
    for exact, found in zip(*results, strict=True):
        assert found.dtype is exact.dtype
        assert found.shape == exact.shape
        assert off(found, exact) < 0.08
    assert off(results[1][0], results[0][0]) > 0.01  # it is not computed as written


def test_a_frozen_weight_gets_no_gradient(tiled: None) -> None:
    layer = in_float8(layer_of())
    layer.weight.requires_grad_(False)
    x = drawn(16, 64).requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None


def test_the_input_waits_for_backward_in_float8(tiled: None) -> None:
    kept: list[Tensor] = []
    layer, x = in_float8(layer_of()), drawn(32, 64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    own = {parameter.data_ptr() for parameter in layer.parameters()}
    assert sum(t.numel() * t.element_size() for t in kept if t.data_ptr() not in own) == 32 * 64 + 2 * 4


# -- what runs as written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "least"), [(drawn(17, 64), 16), (drawn(0, 64), 16), (drawn(32, 64), 33), (drawn(64), 16)]
)
def test_other_numbers_of_rows_run_as_written(x: Tensor, least: int, tiled: None) -> None:
    plain = layer_of()
    ours = copy.deepcopy(plain)
    linear.install(ours, least)
    assert torch.equal(ours(x), plain(x))


def test_an_evaluation_runs_as_written(tiled: None) -> None:
    plain, x = layer_of().eval(), drawn(16, 64)
    ours = in_float8(plain)
    with torch.no_grad():
        assert torch.equal(ours(x), plain(x))
        assert not torch.equal(ours.train()(x), plain(x))  # a forward that is recomputed later
    assert not torch.equal(ours.eval()(x), plain(x))  # a frozen part of a network that trains


# -- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_layer_is_compiled_whole_and_computes_the_same(dynamic: bool, tiled: None) -> None:
    torch._dynamo.reset()
    layer = in_float8(layer_of())
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (16, 48, 17):
        x = drawn(rows, 64).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = [layer(x), compiled(x)]
        eager, ours = (torch.autograd.grad(y.float().sum(), [x, *layer.parameters()]) for y in outputs)
        assert torch.equal(*outputs)
        assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))


def test_long_sums_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []
    plain = linear.product

    def noted(*given: Any, fast: bool = False) -> Tensor:
        seen.append((given[0].shape[1], fast))
        return plain(*given, fast=fast)

    monkeypatch.setattr(linear, "product", noted)
    layer = layer_of()
    linear.install(layer)
    layer(drawn(48, 64).requires_grad_()).sum().backward()
    features, outputs, rows = layer.in_features, layer.out_features, 48
    assert seen == [(features, True), (outputs, True), (rows, False)]
    linear.remove(layer)
    assert not any(name.startswith("fp8") for name in vars(layer))
