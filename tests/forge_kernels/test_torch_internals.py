"""What the kernels do on the day that a private name of torch is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from forge_kernels import torch_internals
from forge_kernels.ops.softmax import SOFTMAX
from forge_kernels.triton.cross_entropy import times


@pytest.mark.parametrize("name", sorted(torch_internals.NAMES))
def test_this_torch_has_every_name(name: str) -> None:
    assert torch_internals.NAMES[name].find()[1] == []


def test_without_the_test_for_transforms_plain_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)
    assert SOFTMAX.supports(x) is None
    monkeypatch.delattr("torch._C._are_functorch_transforms_active")
    monkeypatch.setattr(torch_internals, "functorch_is_active", torch_internals.NAMES["functorch_is_active"].get())
    assert "torch.func" in (SOFTMAX.supports(x) or "")
    torch.testing.assert_close(SOFTMAX.function(x), F.softmax(x, -1))


@pytest.mark.parametrize(
    "name",
    [
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "torch.utils._python_dispatch._get_current_dispatch_mode",
    ],
)
def test_without_knowing_the_graph_no_gradient_is_overwritten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(saved)
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return times(ctx.saved_tensors[0], grads[0])

    def overwrites() -> bool:
        saved.fill_(1.0)
        Scaled.apply(torch.ones(4, requires_grad=True)).backward(torch.tensor(2.0))
        return bool(saved[0] == 2)

    saved = torch.ones(4)
    assert overwrites()
    monkeypatch.delattr(name)
    assert not overwrites()
