"""What holds for every kernel: strides, autocast, torch.compile, derivatives, transforms, devices, wrong arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge.errors import KernelError
from forge_kernels.contract import INTERPRETED, Kernel
from forge_kernels.ops.attention import ATTENTION
from forge_kernels.ops.cross_entropy import CROSS_ENTROPY
from forge_kernels.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from forge_kernels.ops.matmul import MATMUL
from forge_kernels.ops.mlp import MLP
from forge_kernels.ops.norms import LAYER_NORM, RMS_NORM
from forge_kernels.ops.softmax import SOFTMAX
from forge_kernels.triton.attention import attention, attention_backward
from forge_kernels.triton.cross_entropy import cross_entropy, scale_
from forge_kernels.triton.linear_cross_entropy import linear_cross_entropy
from forge_kernels.triton.matmul import matmul
from forge_kernels.triton.mlp import first, hidden_grad
from forge_kernels.triton.norms import norm
from forge_kernels.triton.softmax import softmax
from tests.support.kernel_kit import DEVICE, check_against_reference, check_compiles_whole, distance, in_float64, run


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def classes(rows: int, count: int) -> Tensor:
    return torch.randint(count, (rows,), device=DEVICE)


def heads(size: int = 18) -> tuple[Tensor, ...]:
    return leaf(1, 4, 20, size), leaf(1, 2, 24, size), leaf(1, 2, 24, size)


def layers() -> tuple[Tensor, ...]:
    shapes = ((3, 8), (12, 8), (12,), (4, 12), (4,))
    return tuple(leaf(*shape, dtype=torch.float16) for shape in shapes)


ARGUMENTS: dict[str, tuple[Kernel, Callable[[], tuple[Any, ...]]]] = {
    "softmax": (SOFTMAX, lambda: (leaf(3, 10),)),
    "rms_norm": (RMS_NORM, lambda: (leaf(3, 8), leaf(8))),
    "layer_norm": (LAYER_NORM, lambda: (leaf(3, 8), leaf(8), leaf(8))),
    "attention": (ATTENTION, heads),
    "cross_entropy": (CROSS_ENTROPY, lambda: (leaf(4, 30), classes(4, 30))),
    "linear_cross_entropy": (LINEAR_CROSS_ENTROPY, lambda: (leaf(6, 10), leaf(50, 10), classes(6, 50))),
    "matmul": (MATMUL, lambda: (leaf(3, 6, 5), leaf(5, 4), leaf(4))),
    "mlp": (MLP, layers),
}
every_kernel = pytest.mark.parametrize(("kernel", "make"), ARGUMENTS.values(), ids=ARGUMENTS)

STAND_INS: dict[str, tuple[Kernel, Any, Callable[[], tuple[Any, ...]]]] = {
    "softmax": (SOFTMAX, F.softmax, lambda: (leaf(3, 8, dtype=torch.bfloat16), -1)),
    "rms_norm": (RMS_NORM, F.rms_norm, lambda: (leaf(3, 8), (8,), leaf(8))),
    "layer_norm": (LAYER_NORM, F.layer_norm, lambda: (leaf(3, 8), (8,), leaf(8))),
    "attention": (ATTENTION, F.scaled_dot_product_attention, lambda: (leaf(1, 2, 10, 16),) * 3),
    "cross_entropy": (CROSS_ENTROPY, F.cross_entropy, lambda: (leaf(4, 30), classes(4, 30))),
}
every_stand_in = pytest.mark.parametrize(("kernel", "original", "make"), STAND_INS.values(), ids=STAND_INS)


def stand_in_of(kernel: Kernel) -> Callable[..., Any]:
    (call,) = kernel.replaces.values()
    return call


def spread(x: Tensor) -> Tensor:
    """The same numbers, every second entry of a larger tensor."""
    return torch.stack([x.detach(), x.detach()], -1)[..., 0].requires_grad_(x.requires_grad)


def turned(x: Tensor) -> Tensor:
    """The same numbers, with the first dimension innermost in memory."""
    last = x.dim() - 1
    return x.detach().movedim(0, last).contiguous().movedim(last, 0).requires_grad_(x.requires_grad)


@pytest.mark.parametrize("layout", [spread, turned])
@every_kernel
def test_strides_do_not_matter(kernel: Kernel, make: Any, layout: Any) -> None:
    check_against_reference(kernel, [layout(arg) for arg in make()])


@every_kernel
def test_rows_that_share_memory_are_read(kernel: Kernel, make: Any) -> None:
    x, *rest = make()
    check_against_reference(kernel, [x.detach()[:1].expand(x.shape).requires_grad_(), *rest])


@every_kernel
def test_each_gradient_alone_is_right(kernel: Kernel, make: Any) -> None:
    args = make()
    for place in [place for place, arg in enumerate(args) if arg.requires_grad]:
        alone = [arg.detach().requires_grad_(i == place) for i, arg in enumerate(args) if arg.is_floating_point()]
        check_against_reference(kernel, [*alone, *(arg for arg in args if not arg.is_floating_point())])


@pytest.mark.parametrize("name", ["matmul", "mlp", "attention", "linear_cross_entropy"])
def test_autocast_casts_arguments_and_gradients_keep_dtypes(name: str) -> None:
    kernel, make = ARGUMENTS[name]
    args = [arg.detach().float().requires_grad_() if arg.is_floating_point() else arg for arg in make()]
    with torch.autocast(DEVICE, torch.bfloat16):
        result, *gradients = run(kernel.function, args, {})
    assert result.dtype == (torch.float32 if "entropy" in name else torch.bfloat16)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    rounded = [arg.bfloat16().detach().requires_grad_() if arg.is_floating_point() else arg for arg in args]
    exact = run(kernel.reference, in_float64(rounded), {})
    for ours, right in zip((result, *gradients), exact, strict=True):
        assert distance(ours, right) < 2 * kernel.tolerance[torch.bfloat16]


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax"])
def test_autocast_keeps_bfloat16_with_float32_weights(name: str) -> None:
    kernel, make = ARGUMENTS[name]
    x, *rest = make()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert kernel.function(x.bfloat16(), *rest).dtype == torch.bfloat16


@every_kernel
def test_float64_runs_as_plain_torch(kernel: Kernel, make: Any) -> None:
    args = in_float64(make())
    assert kernel.supports(*args) == "it does not support float64"
    assert torch.equal(kernel.function(*args), kernel.reference(*args))


@pytest.mark.slow
@every_kernel
def test_it_compiles_whole(kernel: Kernel, make: Any) -> None:
    check_compiles_whole(kernel, make())


@pytest.mark.slow
@every_stand_in
def test_a_stand_in_compiles_whole(kernel: Kernel, original: Any, make: Any) -> None:
    stand_in, args = stand_in_of(kernel), make()

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("the original was called")

    for autocast in (False, True):
        torch.compiler.reset()
        compiled = torch.compile(partial(stand_in, never), fullgraph=True, backend="aot_eager")
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            torch.testing.assert_close(compiled(*args), stand_in(never, *args))


@pytest.mark.slow
def test_the_operators_are_registered_as_torch_asks() -> None:
    q, k, v = (x.detach() for x in heads(16))
    out, lse = attention(q, k, v, True, 0.25)
    x, w1, b1, w2, _ = layers()
    logits, target = leaf(3, 20), classes(3, 20)
    registered: list[tuple[Any, tuple[Any, ...]]] = [
        (softmax, (leaf(3, 5), torch.float32)),
        (norm, (leaf(3, 5), leaf(5), leaf(5), 1e-5, True, torch.float32)),
        (norm, (leaf(3, 5), leaf(5), None, 1e-5, False, torch.bfloat16)),
        (attention, (*heads(16), True, 0.25)),
        (attention_backward, (torch.randn_like(out), q, k, v, out, lse, True, 0.25)),
        (cross_entropy, (logits.detach(), torch.empty_like(logits), target, -100, 0.1, True)),
        (scale_, (logits.detach(), torch.tensor(2.0, device=DEVICE))),
        (linear_cross_entropy, (leaf(3, 6), leaf(20, 6), leaf(20), target, -100, 0.0, True, 2, [True] * 3)),
        (matmul, (leaf(3, 5), leaf(5, 4), leaf(4))),
        (first, (x, w1, b1, "gelu", True)),
        (first, (x.detach(), w1.detach(), b1.detach(), "gelu", False)),
        (hidden_grad, (leaf(3, 4, dtype=torch.float16).detach(), w2.detach(), x.detach() @ w1.detach().t(), "gelu")),
    ]
    for operator, args in registered:
        torch.library.opcheck(operator, args)


@every_kernel
def test_a_second_derivative_is_an_error_or_right(kernel: Kernel, make: Any) -> None:
    x, *rest = make()

    def second(function: Callable[..., Any]) -> Tensor:
        (slope,) = torch.autograd.grad(function(x, *rest).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    if kernel is MATMUL:  # its backward is torch's own products
        torch.testing.assert_close(second(kernel.function), second(kernel.reference), rtol=1e-4, atol=1e-4)
        return
    with pytest.raises((RuntimeError, KernelError), match=r"no autograd formula was registered|differentiated once"):
        second(kernel.function)


def func_grad(function: Callable[..., Any], x: Tensor, tangent: Tensor) -> Tensor:
    return torch.func.grad(lambda x: function(x).sin().sum())(x)


def func_jvp(function: Callable[..., Any], x: Tensor, tangent: Tensor) -> Tensor:
    return torch.func.jvp(function, (x,), (tangent,))[1]


def dual_numbers(function: Callable[..., Any], x: Tensor, tangent: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


def compiled_jvp(function: Callable[..., Any], x: Tensor, tangent: Tensor) -> Tensor:
    torch.compiler.reset()
    return torch.compile(partial(func_jvp, function), fullgraph=True, backend="aot_eager")(x, tangent)


every_transform = pytest.mark.parametrize(
    "transform", [func_grad, func_jvp, dual_numbers, pytest.param(compiled_jvp, marks=pytest.mark.slow)]
)


def check_transformed(transform: Any, function: Callable[[Tensor], Any], plainly: Any, x: Tensor) -> None:
    """Transformed, a function that may run a kernel is what plain torch is: an error too, as from those of torch's own
    operators that have no forward mode."""
    with sdpa_kernel(SDPBackend.MATH):  # the only one of torch's that has forward mode
        tangent = torch.randn_like(x)
        try:
            right = transform(plainly, x, tangent)
        except Exception as error:  # of torch's many classes
            with pytest.raises(type(error)):
                transform(function, x, tangent)
            return
        torch.testing.assert_close(transform(function, x, tangent), right)


@every_transform
@every_kernel
def test_transforms_run_as_plain_torch(kernel: Kernel, make: Any, transform: Any) -> None:
    x, *rest = (arg.detach() for arg in make())
    check_transformed(transform, lambda x: kernel.function(x, *rest), lambda x: kernel.reference(x, *rest), x)


@every_transform
@every_stand_in
def test_transforms_of_a_stand_in_are_those_of_torch(kernel: Kernel, original: Any, make: Any, transform: Any) -> None:
    x, *rest = make()
    stand_in, x = stand_in_of(kernel), x.detach()
    check_transformed(transform, lambda x: stand_in(original, x, *rest), lambda x: original(x, *rest), x)


@every_kernel
def test_every_launch_is_on_the_device_of_its_tensors(
    kernel: Kernel, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    within: list[Tensor] = []
    launches: list[bool] = []
    owner, name = (GridExecutor, "__call__") if INTERPRETED else (JITFunction, "run")
    launch = getattr(owner, name)

    @contextmanager
    def noted_device(tensor: Tensor) -> Iterator[None]:
        within.append(tensor)
        yield
        within.pop()

    def noted_launch(*args: Any, **options: Any) -> Any:
        launches.append(bool(within))
        return launch(*args, **options)

    for module in [module for path, module in sys.modules.items() if path.startswith("forge_kernels.triton.")]:
        if hasattr(module, "device_of"):
            monkeypatch.setattr(module, "device_of", noted_device)
    monkeypatch.setattr(owner, name, noted_launch)
    run(kernel.function, make(), {})
    assert launches
    assert all(launches)


@every_kernel
def test_what_is_not_floating_point_is_refused(kernel: Kernel, make: Any) -> None:
    args = make()
    for dtype in (torch.int64, torch.bool, torch.complex64):
        wrong = [arg.detach().to(dtype) if arg.is_floating_point() else arg for arg in args]
        with pytest.raises(KernelError, match=r"floating-point"):
            kernel.function(*wrong)


@pytest.mark.parametrize("device", [DEVICE, "meta"])  # where the kernel would run, and where the reference would
@pytest.mark.parametrize("name", ["matmul", "mlp", "attention"])
def test_dtypes_that_differ_are_refused(name: str, device: str) -> None:
    kernel, make = ARGUMENTS[name]
    x, *rest = (arg.detach().to(device) for arg in make())
    with pytest.raises(KernelError, match=r"(one|same) dtype"):
        kernel.function(x.bfloat16(), *rest)


LOSSES = {"cross_entropy": (leaf(3, 5), classes(3, 5)), "linear_cross_entropy": (leaf(3, 5), leaf(7, 5), classes(3, 7))}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "average"}, "mean, sum, none; it got 'average'"),
        ({"label_smoothing": 1.5}, "between 0 and 1; it got 1.5"),
    ],
)
def test_options_of_losses_that_make_no_sense_are_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        ARGUMENTS[name][0].function(*LOSSES[name], **options)


@pytest.mark.parametrize(
    ("name", "shapes", "message"),
    [
        ("attention", ((1, 4, 8, 16), (1, 2, 8, 8), (1, 2, 8, 8)), r"key heads, T, size.*\(1, 2, 8, 8\)"),
        ("attention", ((1, 3, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16)), "multiple"),
        ("cross_entropy", ((3, 5), (4,)), r"one target for every row.*\(3,\).*\(4,\)"),
        ("cross_entropy", ((5,), ()), r"logits \(\.\.\., classes\); it got \(5,\)"),
        ("cross_entropy", ((3, 0), (3,)), r"it got \(3, 0\)"),
        ("linear_cross_entropy", ((3, 5), (7, 4), (3,)), r"hidden \(\.\.\., width\).*\(3, 5\).*\(7, 4\)"),
        ("linear_cross_entropy", ((3, 5), (7, 5), (4,)), r"one target for every row.*\(3,\).*\(4,\)"),
        ("linear_cross_entropy", ((3, 5), (7, 5), (3,), (5,)), r"bias of \(7,\); it got \(5,\)"),
        ("matmul", ((3, 5), (4, 5)), r"\(\.\.\., K\).*\(3, 5\), \(4, 5\) and None"),
        ("matmul", ((3, 5), (5, 4), (3,)), r"bias of \(N,\).*\(3,\)"),
        ("mlp", ((3, 5), (5, 6), (6,), (4, 6), (4,)), r"w1 of \(H, D\).*\(3, 5\), \(5, 6\)"),
        ("mlp", ((3, 5), (6, 5), (6,), (4, 6), (6,)), r"b2 of \(D',\)"),
        ("rms_norm", ((3, 5), (3,)), r"weight of shape \(5,\).*\(3,\)"),
        ("rms_norm", ((),), "has none"),
        ("layer_norm", ((3, 5), (5,), (1, 5)), r"bias of shape \(5,\).*\(1, 5\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, shapes: Any, message: str) -> None:
    args = [torch.ones(shape, device=DEVICE) for shape in shapes]
    if "entropy" in name:
        place = 1 if name == "cross_entropy" else 2
        args[place] = args[place].long()
    with pytest.raises(KernelError, match=message):
        ARGUMENTS[name][0].function(*args)


def test_other_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(KernelError, match=r"no activation 'tanh'.*gelu, gelu_erf, relu, silu"):
        MLP.function(*layers(), activation="tanh")
    with pytest.raises(KernelError, match="at least 1 token; it got 0"):
        LINEAR_CROSS_ENTROPY.function(*LOSSES["linear_cross_entropy"], chunk=0)
    for kernel in (RMS_NORM, LAYER_NORM, SOFTMAX):
        with pytest.raises(KernelError, match=r"not torch\.int64"):
            kernel.function(leaf(3, 5), dtype=torch.int64)
