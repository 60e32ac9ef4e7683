"""fp8 on a CUDA device: torch's products are those of the reference, compiled whole, captured, without a sync."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge.testing import TinyTask, assert_same, fit_tiny
from forge_plugins import AMP, Compile, CudaGraph
from forge_speed.fp8 import CAPABILITY, FP8, linear
from tests.support.float8 import reference_product

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def float8_units() -> None:
    if torch.cuda.get_device_capability() < CAPABILITY:
        pytest.skip("needs a GPU with float8 units")


class Wide(TinyTask):
    """Layers whose sizes are multiples of 16."""

    def __init__(self) -> None:
        super().__init__(lr=1 / 64)  # a float32 number, as in a captured update
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 16))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, fused=True)


def batches(sizes: tuple[int, ...] = (64, 64, 64, 64)) -> list[tuple[Tensor, Tensor]]:
    make = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 64, generator=make), torch.randint(16, (n,), generator=make)) for n in sizes]


def fitted(*plugins: Any, **options: Any) -> tuple[TinyTask, Any]:
    return fit_tiny(list(plugins), task=Wide(), train=batches(), val=batches(), device="cuda", **options)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def pair(inputs: int = 256, outputs: int = 512) -> tuple[nn.Linear, nn.Linear]:
    """A layer, and its copy in float8."""
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs).cuda()
    ours = copy.deepcopy(plain)
    linear.install(ours)
    return plain, ours


def results(layer: Any, x: Tensor, gradient: Tensor, *weights: Tensor) -> list[Tensor]:
    """The output, and the gradients of input and weights, under autocast."""
    x = x.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *weights], gradient.to(y.dtype))]


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("sizes", [(16, 16, 16), (48, 256, 512), (1024, 768, 2048)])
def test_torchs_product_is_that_of_the_reference(fast: bool, sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    a, b = drawn(rows, inner), drawn(columns, inner, seed=2)
    most_a, most_b = linear.largest(a), linear.largest(b)
    steps = linear.step_of(most_a), linear.step_of(most_b)
    a8, b8 = linear.encode(a, most_a), linear.encode(b, most_b)
    bias = drawn(columns).bfloat16()
    found = linear.product(a8, b8.t(), *steps, bias, fast)
    assert found.dtype is torch.bfloat16
    assert off(found, reference_product(a8, b8.t(), *steps, bias)) < 0.01


def test_a_layer_does_not_wait_for_the_device() -> None:
    _, ours = pair()
    x, gradient = drawn(64, 256), drawn(64, 512)
    results(ours, x, gradient, *ours.parameters())  # allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(ours, x, gradient, *ours.parameters())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_fit_has_no_breaks_and_is_close() -> None:
    torch._dynamo.reset()
    _, eager = fitted(AMP("bf16"), FP8("all"))
    _, result = fitted(AMP("bf16"), FP8("all"), Compile())
    assert result.metrics["compile/breaks"] == 0
    assert result.metrics["train/loss"] == pytest.approx(eager.metrics["train/loss"], rel=0.02)


def test_captured_updates_compute_as_uncaptured_ones() -> None:
    captured, _ = fitted(AMP("bf16"), FP8("all"), CudaGraph())
    assert_same(captured, fitted(AMP("bf16"), FP8("all"))[0])
