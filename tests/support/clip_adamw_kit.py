"""What the tests of clip_adamw and ClipAdamW share: lists of tensors beside the reference, networks beside torch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from forge_kernels.ops.clip_adamw import CLIP_ADAMW, clip_adamw
from forge_kernels.ops.clip_adamw_optimizer import ClipAdamW
from tests.support.kernel_kit import DEVICE, distance, poisoned_memory

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "max_norm": 1.0}
FULL = (torch.float32,) * 3


def lists(shapes, dtypes=FULL, scale=1.0, made=0.0) -> list[Any]:
    """Parameters, gradients, both moments, one step counter."""
    param, grad, state = dtypes
    return [
        [torch.randn(shape, device=DEVICE).to(param) for shape in shapes],
        [(torch.randn(shape, device=DEVICE) * scale).to(grad) for shape in shapes],
        [(torch.randn(shape, device=DEVICE) * scale).to(state) for shape in shapes],
        [(torch.rand(shape, device=DEVICE) * scale**2).to(state) for shape in shapes],
        torch.tensor(made, device=DEVICE),
    ]


def mapped(args, function) -> list[Any]:
    return [[function(t) for t in arg] if isinstance(arg, (list, tuple)) else function(arg) for arg in args]


def flat(args) -> list[Tensor]:
    return [t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else [arg])]


def check(args, options=OPTIONS, tolerance=None) -> None:
    """As near to the reference in float64 as the contract says; gradients are not touched."""
    bound = max(CLIP_ADAMW.tolerance[t.dtype] for t in flat(args)) if tolerance is None else tolerance
    assert CLIP_ADAMW.supports(*args, **options) is None, "the reference would run: this would test nothing"
    exact = mapped(args, lambda t: t.detach().double())
    norm = CLIP_ADAMW.reference(*exact, **options)
    grads = mapped([args[1]], torch.clone)[0]
    with poisoned_memory():
        result = clip_adamw(*args, **options)
    for place, (found, right) in enumerate(zip([result, *flat(args)], [norm, *flat(exact)], strict=True)):
        off = distance(found, right)
        assert off <= bound, f"tensor {place} is off by {off:.1e}"
    assert same(args[1], grads)


def same(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0)) for a, b in zip(first, second, strict=True))


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3)).to(DEVICE)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in net.parameters() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 2e-2, "weight_decay": 0.0},
    ]


def pair(max_norm: float = 0.5, **options: Any) -> tuple[nn.Module, ClipAdamW, nn.Module, torch.optim.AdamW]:
    ours, theirs = network(), network()
    return (
        *(ours, ClipAdamW(groups(ours), lr=1e-2, max_norm=max_norm, **options)),
        *(theirs, torch.optim.AdamW(groups(theirs), lr=1e-2, fused=True, **options)),
    )


def backward(net: nn.Module, batch: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(batch)
    net.zero_grad()
    (net(torch.randn(4, 6, generator=generator).to(DEVICE)).square().sum() * scale).backward()


def both_step(ours, optimizer, theirs, right, batch: int) -> Tensor:
    for net in (ours, theirs):
        backward(net, batch)
    optimizer.step()
    norm = clip_grad_norm_(theirs.parameters(), optimizer.max_norm)
    right.step()
    return norm


def assert_close(ours: nn.Module, theirs: nn.Module, **tolerance: Any) -> None:
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), **tolerance)
