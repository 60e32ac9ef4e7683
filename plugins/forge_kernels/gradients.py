"""gradcheck: compare the gradients of a task's own autograd.Function with finite differences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

Outputs = tuple[Tensor, ...]


def gradcheck(
    function: Any,
    *inputs: Any,
    second: bool = True,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    nondet_tol: float = 0.0,
) -> None:
    """Raise an AssertionError unless the gradients of a function are those of finite differences.

    ::

        class Square(torch.autograd.Function): ...

        def test_its_gradient():
            gradcheck(Square, torch.randn(3, 4))

    `function` is an `autograd.Function`, or any function of tensors that returns tensors. Floating-point tensors are
    converted to float64, and require gradients; other arguments are passed as they are. It runs
    `torch.autograd.gradcheck` and, unless `second=False`, `gradgradcheck`, which a gradient penalty or
    `create_graph=True` needs. Take small inputs, since every entry is moved on its own, and none at a kink.

    The error names the input, its worst entry, and the analytic and the numerical derivative there.
    """
    call, names = _callable(function, len(inputs))
    arguments = [_prepared(value) for value in inputs]
    if not any(isinstance(value, Tensor) and value.requires_grad for value in arguments):
        raise ValueError("gradcheck got no floating-point tensor to differentiate by. Pass at least one.")
    options: dict[str, Any] = {"eps": eps, "atol": atol, "rtol": rtol, "nondet_tol": nondet_tol}
    with torch.random.fork_rng(devices=[]):
        try:
            torch.autograd.gradcheck(call, arguments, **options)
        except (GradcheckError, RuntimeError) as error:
            raise AssertionError(_first_order(call, arguments, names, eps, atol, rtol, error)) from error
        if not second:
            return
        try:
            torch.autograd.gradgradcheck(call, arguments, **options)
        except (GradcheckError, RuntimeError) as error:
            raise AssertionError(_second_order(call, arguments, names, eps, atol, rtol, error)) from error


def _callable(function: Any, count: int) -> tuple[Callable[..., Any], list[str]]:
    """Return what to call, and the names of its arguments."""
    is_function = isinstance(function, type) and issubclass(function, torch.autograd.Function)
    call = function.apply if is_function else function
    try:
        given = list(inspect.signature(function.forward if is_function else function).parameters)
    except (TypeError, ValueError):
        given = []
    if is_function and function.setup_context is torch.autograd.Function.setup_context:
        given = given[1:]  # ctx
    return call, [given[i] if i < len(given) else f"input {i}" for i in range(count)]


def _prepared(value: Any) -> Any:
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        wide = torch.complex128 if value.is_complex() else torch.float64
        return value.detach().to(wide, copy=True).requires_grad_()
    return value


# -- messages ---------------------------------------------------------------------------------------------------------


def _first_order(
    call: Any, inputs: list[Any], names: list[str], eps: float, atol: float, rtol: float, error: Exception
) -> str:
    try:
        found = _worst(call, inputs, names, eps, atol, rtol)
    except Exception:  # the function itself fails: torch's message says how
        found = None
    if found is None:
        return f"gradcheck failed: {error}"
    return f"The gradient by {found} Is a term missing in backward, or an input at a kink?"


def _second_order(
    call: Any, inputs: list[Any], names: list[str], eps: float, atol: float, rtol: float, error: Exception
) -> str:
    meant = "Pass second=False if nothing differentiates twice."
    if "once_differentiable" in str(error) or "does not require grad" in str(error):
        return f"The gradient cannot be differentiated again: {str(error).partition(chr(10))[0]} {meant}"

    def gradient(*values: Any) -> Outputs:
        outputs = _outputs(call(*values))
        # weights that differ, so that entries do not cancel
        total: Any = sum((output * _weights(output)).sum() for output in outputs)
        wanted = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
        grads = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
        return tuple(grad for grad in grads if grad is not None)

    try:
        found = _worst(gradient, inputs, names, eps, atol, rtol)
    except Exception:
        found = None
    if found is None:
        return f"gradgradcheck failed: {error} {meant}"
    return (
        f"The second derivative by {found} backward must be written in operations that autograd can follow, on tensors "
        f"of ctx.save_for_backward. {meant}"
    )


def _weights(output: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype, device=output.device).reshape(output.shape)


def _worst(call: Any, inputs: list[Any], names: list[str], eps: float, atol: float, rtol: float) -> str | None:
    """Describe the entry whose derivatives differ most beyond what is allowed; None if none does."""
    found: tuple[float, str] | None = None
    outputs = _outputs(call(*inputs))
    for place, value in enumerate(inputs):
        if not isinstance(value, Tensor) or not value.requires_grad:
            continue
        for number, output in enumerate(outputs):
            analytic, numerical = _analytic(output, value), _numerical(call, inputs, place, number, eps)
            excess = (analytic - numerical).abs() - atol - rtol * numerical.abs()
            excess = excess.nan_to_num(nan=float("inf"))
            row, column = divmod(int(excess.argmax()), excess.shape[1])
            if excess[row, column] > 0 and (found is None or float(excess[row, column]) > found[0]):
                of = "" if len(outputs) == 1 else f" of output {number}"
                text = (
                    f"{names[place]!r} is wrong: d{_name('output', row, output.shape)}{of} by "
                    f"d{_name(names[place], column, value.shape)} is {analytic[row, column].item():.6g} by backward, "
                    f"and {numerical[row, column].item():.6g} by finite differences."
                )
                found = float(excess[row, column]), text
    return None if found is None else found[1]


def _outputs(result: Any) -> Outputs:
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(value for value in results if isinstance(value, Tensor) and value.dtype.is_floating_point)


def _analytic(output: Tensor, value: Tensor) -> Tensor:
    """Return the Jacobian by backward: a row for each entry of the output."""
    if not output.requires_grad:
        return output.new_zeros(output.numel(), value.numel())
    rows = []
    for unit in torch.eye(output.numel(), dtype=output.dtype, device=output.device):
        (grad,) = torch.autograd.grad(output, value, unit.reshape(output.shape), retain_graph=True, allow_unused=True)
        rows.append(torch.zeros_like(value).flatten() if grad is None else grad.detach().flatten())
    return torch.stack(rows)


def _numerical(call: Any, inputs: list[Any], place: int, number: int, eps: float) -> Tensor:
    """Return the Jacobian by central differences."""
    columns = []
    for entry in range(inputs[place].numel()):
        ends = []
        for step in (eps, -eps):
            moved = inputs[place].detach().clone()
            moved.view(-1)[entry] += step
            values = [*inputs[:place], moved.requires_grad_(), *inputs[place + 1 :]]
            ends.append(_outputs(call(*values))[number].detach().flatten())
        columns.append((ends[0] - ends[1]) / (2 * eps))
    return torch.stack(columns, 1)


def _name(name: str, flat: int, shape: Sequence[int]) -> str:
    """Return an entry by its place: x[0, 2]."""
    at = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        at.append(str(rest))
    return f"{name}[{', '.join(reversed(at))}]" if at else name
