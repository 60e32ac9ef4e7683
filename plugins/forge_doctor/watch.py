"""Watch a step as it runs: losses with their inputs, mixed-up dimensions, activations, the first input."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from forge.diagnose.checks.user_line import users_frame
from forge.torch_internals import pytree
from forge.util.text import short_path
from forge_plugins.torch_internals import is_functorch_wrapped

NAMES = (
    *("cross_entropy", "nll_loss", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "gaussian_nll_loss", "poisson_nll_loss"),
    *("soft_margin_loss", "hinge_embedding_loss", "margin_ranking_loss", "cosine_embedding_loss", "multi_margin_loss"),
    *("multilabel_soft_margin_loss", "triplet_margin_loss", "ctc_loss"),
)
MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
LOSSES = {getattr(F, name): name for name in NAMES}
REGRESSION = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
PAIRWISE = {"sub", "__sub__", "__rsub__", "rsub", "mul", "__mul__", "__rmul__", "add", "__add__", "__radd__", "div"}
PAIRWISE |= {"__truediv__", "pow", "__pow__", "where", "minimum", "maximum"}
OVER_DIM = {"softmax", "log_softmax", "argmax", "argmin", "_softmax", "_log_softmax"}
DATA = Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]
VIEWS = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select", "Slice", "Transpose", "Permute", "T"}
VIEWS |= {"ToCopy", "Alias", "Clone", "Expand", "AsStrided", "Index", "MaskedSelect", "Unbind", "SqueezeMultiple"}


@dataclass(frozen=True, slots=True)
class LossCall:
    """One call of a loss of torch's."""

    name: str
    given: dict[str, Any]
    "Arguments by name, defaults included."
    where: str

    @property
    def input(self) -> Any:
        return next(iter(self.given.values()))

    @property
    def target(self) -> Any:
        return self.given.get("target")


@dataclass(frozen=True, slots=True)
class Oddity:
    """A call that mixes up dimensions."""

    kind: str
    text: str
    where: str


class CallWatch(TorchFunctionMode):
    """Looks at each call of torch's functions, before it or after it; not at those that a look makes itself."""

    _inside = False

    def before(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What is returned here is given to `after`."""

    def after(self, name: str, args: Any, kwargs: Any, result: Any, noted: Any) -> None:
        pass

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        noted = self._look(self.before, func, name, args, kwargs)
        result = func(*args, **kwargs)
        self._look(self.after, name, args, kwargs, result, noted)
        return result

    def _look(self, look: Any, *given: Any) -> Any:
        """A look must not fail: values may be unreadable, as under vmap."""
        self._inside = True
        try:
            return look(*given)
        except Exception:
            return None
        finally:
            self._inside = False


class ActivationWatch(CallWatch):
    """Notes which units of each activation are 0 for all samples, or which share of its outputs is at its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, Tensor]] = []
        "The activation, its line, and what was noted, in the order of the calls."

    def after(self, name: str, args: Any, kwargs: Any, result: Any, noted: Any) -> None:
        kind = name.rstrip("_")
        if kind not in ("relu", "sigmoid", "tanh") or not isinstance(result, Tensor):
            return
        if result.ndim > 1 and result.numel() > 64:
            self.found.append((kind, where(), _at_rest(kind, result.detach())))


def _at_rest(kind: str, output: Tensor) -> Tensor:
    """Which units, channels of pictures or places of the last dimension, are 0; of other kinds the share at an end."""
    if kind == "relu":
        return (output <= 0).movedim(1 if output.ndim == 4 else -1, -1).flatten(0, -2).all(0)
    ends = output.abs() > 0.99 if kind == "tanh" else (output < 0.01) | (output > 0.99)
    return ends.float().mean()


@contextmanager
def first_input(task: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Note the first layer with a matrix that runs, and what it is given."""
    seen: list[tuple[str, Tensor]] = []

    def note(path: str) -> Any:
        def before(module: nn.Module, args: Any) -> None:
            if not seen and args and isinstance(args[0], Tensor):
                seen.append((path, args[0].detach()))

        return before

    layers = [(path, module) for path, module in task.named_modules() if isinstance(module, MATRICES)]
    handles = [module.register_forward_pre_hook(note(path)) for path, module in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def gradient_sizes(task: nn.Module) -> list[tuple[str, float]]:
    """The size of each matrix's gradient against its own, by layer."""
    found: list[tuple[str, float]] = []
    for path, module in task.named_modules():
        weight = getattr(module, "weight", None) if isinstance(module, MATRICES) else None
        if isinstance(weight, Tensor) and weight.grad is not None and weight.requires_grad:
            size = float(weight.detach().double().norm())
            if size > 0:
                found.append((path, float(weight.grad.double().norm()) / size))
    return found


class StepWatch(CallWatch):
    """Notes losses, broadcasts and dimensions while it is entered. `batch` is the number of samples."""

    def __init__(self, batch: int | None):
        super().__init__()
        self.batch = batch
        self.losses: list[LossCall] = []
        self.oddities: list[Oddity] = []
        self.terms: list[tuple[Tensor, str]] = []
        "Scalars with a gradient that are added up, with their lines."
        self.dropped: list[Tensor] = []
        "Outputs of dropout."

    def after(self, name: str, args: Any, kwargs: Any, result: Any, noted: Any) -> None:
        if "dropout" in name and isinstance(result, Tensor) and result is not args[0]:
            self.dropped.append(result)

    def settle(self) -> None:
        """Let go of every graph, and of what is not needed once the step is judged."""
        for call in self.losses:  # in place: others may hold a call
            call.given.update(_detached(call.given))
        for noted in (self.dropped, self.terms):
            noted.clear()

    def before(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if any(
            isinstance(x, Tensor) and is_functorch_wrapped(x) for x in args
        ):  # under vmap or grad: values are unreadable
            return
        if func in LOSSES:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            self.losses.append(LossCall(LOSSES[func], dict(given.arguments), where()))
        elif func == DATA and args[0].grad_fn is not None:
            text = f"The step computes with .data of a tensor of shape {tuple(args[0].shape)}, which has a graph"
            self.oddities.append(Oddity("hidden_from_autograd", text, where()))
        elif name in PAIRWISE and len(args) > 1 and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
            self._look_at_pair(name, args[0], args[1])
        elif name in OVER_DIM and args and isinstance(args[0], Tensor):
            self._look_at_dimension(name, args[0], kwargs.get("dim", args[1] if len(args) > 1 else None))

    def _look_at_pair(self, name: str, a: Tensor, b: Tensor) -> None:
        if not a.ndim and not b.ndim:
            if "add" in name and (a.requires_grad or b.requires_grad):
                self.terms += [(x, where()) for x in (a, b) if x.requires_grad]
            return
        short, long = sorted((a, b), key=lambda x: x.ndim)
        n = self.batch
        crossed = n is not None and n > 1 and tuple(short.shape) == (n,) and tuple(long.shape) == (n, 1)
        if crossed and (a.requires_grad != b.requires_grad or not torch.is_grad_enabled()):
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            text = f"{name.strip('_')} of shapes {shapes} gives {n} x {n} numbers: each prediction meets every target"
            self.oddities.append(Oddity("broadcast_loss", text, where()))

    def _look_at_dimension(self, name: str, x: Tensor, dim: Any) -> None:
        n = self.batch
        if "softmax" in name and x.ndim in (3, 4) and dim in (x.ndim - 2, -2) and x.shape[-1] == x.shape[-2] > 1:
            text = f"{name.strip('_')} of shape {tuple(x.shape)} runs over queries: a query's weights do not sum to 1"
            self.oddities.append(Oddity("wrong_dimension", text, where()))
        if dim == 0 and x.ndim == 2 and n is not None and n > 1 and x.shape[0] == n and x.shape[1] not in (1, n):
            text = f"{name.strip('_')} of shape {tuple(x.shape)} runs over dimension 0, the batch"
            self.oddities.append(Oddity("wrong_dimension", text, where()))


def where() -> str:
    """Return the user's current line."""
    frame = users_frame()
    return "" if frame is None else f"{short_path(Path(frame.f_code.co_filename))}:{frame.f_lineno}"


def origin(tensor: Tensor) -> str:
    """Return the name of the operation that computed a tensor, past views and casts: "Softmax", "Relu", "Addmm"."""
    return next(origins(tensor), "")


def origins(tensor: Tensor) -> Iterator[str]:
    """Yield the names of the operations on the way back from a tensor, along their first inputs, without views."""
    node = tensor.grad_fn
    while node is not None:
        name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
        if name not in VIEWS:
            yield name
        node = next((child for child, _ in node.next_functions if child is not None), None)


def _detached(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tree)
