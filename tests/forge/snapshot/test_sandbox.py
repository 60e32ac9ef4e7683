"""What runs beforehand, or once more, leaves no trace: buffers and random numbers are put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forge.snapshot.sandbox import kept, kept_buffers, uncompiled, without_side_effects


class Holds(nn.Module):
    """Buffers of every kind that a module may have, some of them in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(3)
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("none", None)
        with torch.inference_mode():
            self.register_buffer("evaluated", torch.ones(2))


def dense(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.to_dense().clone() for name, buffer in module.named_buffers()}


def disturb(module: Any) -> None:
    """Change every buffer: in place, or by another tensor."""
    module.inner(torch.randn(5, 3))
    module.flag.logical_not_()
    module.sparse.mul_(2)
    module.evaluated = torch.zeros(2)
    module.inner.running_var = torch.zeros(3)


def test_every_buffer_is_put_back_in_its_own_memory() -> None:
    module: Any = Holds()
    before, own = dense(module), dict(module.named_buffers())
    with kept_buffers(module):
        disturb(module)
        changed = [name for name, buffer in dense(module).items() if not torch.equal(buffer, before[name])]
    assert sorted(changed) == sorted(before)
    for name, buffer in module.named_buffers():
        assert buffer is own[name], name
        assert torch.equal(buffer.to_dense(), before[name]), name


def test_after_an_error_too() -> None:
    module: Any = Holds()
    before = dense(module)

    def fail() -> None:
        with kept_buffers(module):
            disturb(module)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert all(torch.equal(buffer, before[name]) for name, buffer in dense(module).items())


def test_weights_keep_every_bit_and_their_gradients() -> None:
    weights = [nn.Parameter(torch.tensor([1.0, -0.0, float("nan")])), nn.Parameter(torch.randn(2).half())]
    weights[0].grad = torch.ones(3)
    before = [weight.detach().clone() for weight in weights]
    with kept(weights), torch.no_grad():
        for weight in weights:
            weight.add_(1)
    for weight, bits in zip(weights, before, strict=True):
        assert torch.equal(weight.detach().view(torch.uint8), bits.view(torch.uint8))
        assert weight.requires_grad
    assert weights[0].grad is not None


def test_random_numbers_go_on_as_if_nothing_had_been_drawn() -> None:
    trainer: Any = SimpleNamespace(env=SimpleNamespace(device=torch.device("cpu")), task=Holds())
    before = dense(trainer.task)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with without_side_effects(trainer):
        torch.rand(7)
        disturb(trainer.task)
    assert torch.equal(torch.rand(4), expected)
    assert all(torch.equal(buffer, before[name]) for name, buffer in dense(trainer.task).items())


def test_a_compiled_module_runs_as_it_is_written() -> None:
    calls: list[bool] = []

    def seen(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return x + 1

    compiled = torch.compile(seen, backend="eager")
    with uncompiled():
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert calls == [False]
