"""clip_adamw within torch: autograd, torch.compile, torch.func, and whatever defaults are set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.nn.utils import clip_grad_norm_

from forge_kernels.ops.clip_adamw import CLIP_ADAMW, clip_adamw, clip_adamw_op
from tests.support.clip_adamw_kit import OPTIONS, assert_close, backward, check, flat, lists, mapped, pair, same


def test_autograd_knows_that_parameters_have_changed():
    args = lists([(5,)])
    args[0][0].requires_grad_()
    loss = args[0][0].square().sum()
    clip_adamw(*args, **OPTIONS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("trained", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiles_whole(trained):
    args = lists([(5,), (3, 4)])
    args[0] = [p.requires_grad_(trained) for p in args[0]]
    expected = mapped(args, lambda t: t.detach().clone())
    norm = clip_adamw(*expected, **OPTIONS)
    torch.compiler.reset()
    compiled = torch.compile(clip_adamw, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args, **OPTIONS), norm)
    assert same(flat(args), flat(expected))


@pytest.mark.slow
def test_the_operator_is_registered_as_torch_asks():
    args = lists([(5,), (3, 4)])
    torch.library.opcheck(clip_adamw_op, (*args[:4], [args[4]], None, 1e-2, 0.9, 0.999, 1e-8, 0.1, 1.0, None))


def test_the_same_tensor_twice_is_not_compiled():
    args = lists([(5,), (5,)])
    args[0] = [args[0][0]] * 2
    torch.compiler.reset()
    compiled = torch.compile(clip_adamw, fullgraph=True, backend="aot_eager")
    with pytest.raises(Unsupported, match="Observed exception"):
        compiled(*args, **OPTIONS)


@pytest.mark.slow
def test_a_changing_learning_rate_compiles_whole():
    args = lists([(5,)])
    expected = mapped(args, torch.clone)
    torch.compiler.reset()
    compiled = torch.compile(clip_adamw, fullgraph=True, backend="aot_eager")
    for lr in (1e-2, 2e-2, 3e-2):
        compiled(*args, **{**OPTIONS, "lr": lr})
        clip_adamw(*expected, **{**OPTIONS, "lr": lr})
    assert same(flat(args), flat(expected))


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


ODD_DEFAULTS = [(torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta"), (torch.bfloat16, "meta")]


@pytest.mark.parametrize("default", ODD_DEFAULTS)
@pytest.mark.parametrize("function", [clip_adamw, CLIP_ADAMW.reference])
def test_torchs_defaults_change_nothing(function, default):
    args = lists([(5,), (3, 4)])
    expected = mapped(args, torch.clone)
    norm = function(*expected, **OPTIONS)
    with defaults(*default):
        result = function(*args, **OPTIONS)
        empty = function([], [], [], [], expected[4].clone(), **OPTIONS)
    assert result.dtype == norm.dtype == empty.dtype == torch.float32
    assert empty.device.type == "cpu"
    assert torch.equal(result, norm)
    assert same(flat(args), flat(expected))


@pytest.mark.parametrize(
    "default", [*(pytest.param(each, marks=pytest.mark.slow) for each in ODD_DEFAULTS[:-1]), ODD_DEFAULTS[-1]]
)
def test_torchs_defaults_change_nothing_for_the_optimizer(default):
    ours, optimizer, theirs, right = pair()
    for batch in range(2):
        backward(ours, batch)
        with defaults(*default):
            optimizer.step()
        backward(theirs, batch)
        clip_grad_norm_(theirs.parameters(), 0.5)
        right.step()
    assert optimizer._plan is not None
    assert_close(ours, theirs)


def test_among_dual_numbers_the_reference_runs():
    args = lists([(5,)])
    check(args)  # so that there is a plan for them
    expected = mapped(args, torch.clone)
    with torch.autograd.forward_ad.dual_level():
        assert "forward-mode" in str(CLIP_ADAMW.supports(*args, **OPTIONS))
        norm = clip_adamw(*args, **OPTIONS)
    assert torch.equal(norm, CLIP_ADAMW.reference(*expected, **OPTIONS))
    assert same(flat(args), flat(expected))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd])
def test_functorch_refuses_what_it_cannot_undo(transform):
    args = lists([(5,)])
    check(args)
    before = mapped(args, torch.clone)

    def loss(x: Tensor) -> Tensor:
        grads = [grad * x.sum() for grad in args[1]]
        clip_adamw(args[0], grads, *args[2:], **OPTIONS)
        return x.sum()

    with pytest.raises(RuntimeError, match=r"in-place|inplace"):
        transform(loss)(torch.ones(2, device=args[0][0].device))
    assert same(flat(args), flat(before))
