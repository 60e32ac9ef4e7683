"""mlp against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from forge.errors import KernelError
from forge.kernels.ops.mlp import MLP, FusedMLP, mlp, mlp_reference, swap
from tests.kernel_kit import DEVICE, check_against_reference, check_compiles_whole, distance, run

sizes = st.integers(8, 70)


def arguments(*rows, width=20, hidden=40, out=24, dtype=torch.float16, biases=(True, True)):
    def new(*shape, scale=1.0):
        return (torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_()

    b1 = new(hidden) if biases[0] else None
    b2 = new(out) if biases[1] else None
    return [new(*rows, width), new(hidden, width, scale=0.3), b1, new(out, hidden, scale=0.3), b2]


@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    width=sizes,
    hidden=sizes,
    out=sizes,
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    biases=st.tuples(st.booleans(), st.booleans()),
    activation=st.sampled_from([None, "gelu", "gelu_erf", "relu", "silu"]),
)
def test_any_shape_and_dtype_equals_the_reference(rows, width, hidden, out, dtype, biases, activation):
    torch.manual_seed(width * hidden * out)
    args = arguments(*rows, width=width, hidden=hidden, out=out, dtype=dtype, biases=biases)
    few = 4 * MLP.tolerance[dtype]  # the slope is taken at a rounded value, which shows where there are few elements
    check_against_reference(MLP, args, {"activation": activation}, few)


@pytest.mark.parametrize("activation", ["gelu", "gelu_erf"])
def test_several_tiles_equal_the_reference(activation):
    torch.manual_seed(0)
    args = arguments(140, width=72, hidden=264, out=24, dtype=torch.bfloat16)
    check_against_reference(MLP, args, {"activation": activation})


def test_strides_do_not_matter():
    torch.manual_seed(0)
    x, w1, b1, w2, b2 = (argument.detach() for argument in arguments(10, 6))
    args = [x.transpose(0, 1), w1.t().contiguous().t(), b1, torch.stack([w2, w2], 2)[..., 0], b2]
    check_against_reference(MLP, [argument.requires_grad_() for argument in args])


@pytest.mark.parametrize("empty", ["rows", "width", "hidden", "out"])
def test_an_empty_one_is_as_in_torch(empty):
    torch.manual_seed(0)
    size = {"rows": 4, "width": 5, "hidden": 6, "out": 7, empty: 0}
    args = arguments(size["rows"], width=size["width"], hidden=size["hidden"], out=size["out"])
    check_against_reference(MLP, args)


@pytest.mark.parametrize("place", range(5))
def test_one_gradient_alone_is_right(place):
    torch.manual_seed(place)
    args = [argument.detach() for argument in arguments(12)]
    args[place].requires_grad_()
    check_against_reference(MLP, args)


def test_without_gradients_nothing_is_kept():
    args = arguments(12)
    with torch.no_grad():
        result = mlp(*args)
    assert not result.requires_grad
    assert distance(result, mlp_reference(*args).detach()) < 2e-3


def test_under_autocast_arguments_are_cast_and_gradients_come_in_their_dtype():
    args = arguments(12, dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        results = run(mlp, args, {})
        exact = run(mlp_reference, args, {})
    assert [result.dtype for result in results] == [torch.bfloat16] + [torch.float32] * 5
    for result, right in zip(results, exact, strict=True):
        assert distance(result, right) < 2e-2


def test_a_second_backward_gives_the_same():
    args = arguments(12)
    result = mlp(*args).square().sum()
    first = torch.autograd.grad(result, args, retain_graph=True)
    second = torch.autograd.grad(result, args)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_compiles_whole():
    check_compiles_whole(MLP, arguments(3, 4))


def test_compiles_whole_under_autocast():
    args = arguments(3, 4, dtype=torch.float32)

    def under_autocast(*args):
        with torch.autocast(DEVICE, torch.bfloat16):
            return mlp(*args)

    torch.compiler.reset()
    compiled = run(torch.compile(under_autocast, fullgraph=True, backend="aot_eager"), args, {})
    for result, right in zip(compiled, run(under_autocast, args, {}), strict=True):
        torch.testing.assert_close(result, right)


def test_the_operators_are_registered_as_torch_asks():
    from forge.kernels.triton.mlp import first, hidden_grad, second

    x, w1, b1, w2, b2 = arguments(5, width=6, hidden=8, out=4)
    pre, hidden = torch.randn(2, 5, 8, device=DEVICE).half()
    torch.library.opcheck(first, (x, w1, b1, "gelu"))
    torch.library.opcheck(second, (pre.requires_grad_(), hidden, b1, w2, b2, "gelu"))
    torch.library.opcheck(hidden_grad, (torch.randn(5, 4, device=DEVICE).half(), w2.detach(), pre.detach(), "gelu"))


def test_shapes_that_do_not_fit_are_refused():
    x, w1, b1, w2, b2 = arguments(3)
    with pytest.raises(KernelError, match=r"w1 of \(H, D\).*\(3, 20\), \(20, 40\)"):
        mlp(x, w1.t(), b1, w2, b2)
    with pytest.raises(KernelError, match=r"b2 of \(D',\)"):
        mlp(x, w1, b1, w2, b1)


def test_dtypes_that_differ_are_refused():
    x, *rest = arguments(3)
    with pytest.raises(KernelError, match=r"one dtype.*x torch.bfloat16.*w1 torch.float16"):
        mlp(x.bfloat16(), *rest)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_sequential_of_linear_gelu_linear_is_swapped_with_its_own_parameters(approximate):
    plain = nn.Sequential(nn.Linear(20, 40), nn.GELU(approximate), nn.Linear(40, 8, bias=False))
    plain = plain.to(DEVICE, torch.bfloat16).eval()
    fused = swap(plain)
    assert isinstance(fused, FusedMLP)
    assert not fused.training
    assert list(fused.state_dict()) == ["0.weight", "0.bias", "2.weight"]
    assert all(a is b for a, b in zip(fused.parameters(), plain.parameters(), strict=True))
    x = torch.randn(3, 5, 20, device=DEVICE, dtype=torch.bfloat16)
    assert distance(fused(x).detach(), plain(x).detach()) < 1e-2


def test_float32_goes_to_plain_torch():
    args = arguments(12, dtype=torch.float32)
    assert torch.equal(mlp(*args), mlp_reference(*args))


def test_names_of_the_layers_stay():
    from collections import OrderedDict

    plain = nn.Sequential(OrderedDict(fc=nn.Linear(4, 8), act=nn.GELU(), proj=nn.Linear(8, 4)))
    fused = swap(plain)
    assert fused is not None
    assert list(fused.state_dict()) == list(plain.state_dict())


def test_any_other_module_is_left_alone():
    class Own(nn.Sequential):
        pass

    hooked = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    hooked[0].register_forward_hook(lambda *_: None)
    others = [
        nn.Linear(4, 8),
        nn.Sequential(nn.Linear(4, 8), nn.GELU()),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)),
        nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Dropout()),
        Own(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
        hooked,
    ]
    assert [swap(other) for other in others] == [None] * len(others)
