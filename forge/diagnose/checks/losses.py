"""LossWatch: check the arguments of torch's losses on the first batch."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forge.diagnose.checks.labels import look_at_class_labels
from forge.diagnose.checks.shapes import look_at_equal_shapes, look_at_shapes
from forge.diagnose.checks.user_line import refuse, warn
from forge.errors import TaskError

logger = logging.getLogger("forge")


class LossWatch(TorchFunctionMode):
    """Checks the arguments of torch's own losses while it is entered.

    `averaged` says that the loss is one of several ranks', which are averaged by their numbers of samples.
    """

    def __init__(self, averaged: bool = False):
        super().__init__()
        self._averaged = averaged

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling() and func in _WATCHED:
            self._look(func, args, kwargs)
            with warnings.catch_warnings():
                # torch's own warning about shapes would name the line below, and later the user's
                warnings.filterwarnings("ignore", "Using a target size", UserWarning)
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        try:
            with torch.no_grad():
                _WATCHED[func](given.arguments)
                if self._averaged and func in (F.cross_entropy, F.nll_loss):
                    _look_at_divisor(func.__name__, given.arguments)
        except (TaskError, UserWarning):  # filters may turn warnings into errors
            raise
        except Exception as error:  # values may be unreadable, as under vmap: a check itself must not fail
            logger.debug("could not look at the arguments of %s: %s", func, error)


def _look_at_cross_entropy(given: dict[str, Any]) -> None:
    logits, target, ignore = given["input"], given["target"], given["ignore_index"]
    classes = logits.shape[1] if logits.ndim > 1 else logits.shape[0]
    if target.is_floating_point():
        if target.shape != logits.shape:
            refuse(
                f"cross_entropy got labels of type {_dtype(target)} and shape {tuple(target.shape)}; class labels are "
                "integers. Use y.long()."
            )
    else:
        look_at_class_labels("cross_entropy", logits, target, classes, ignore)
    if classes > 1 and _are_probabilities(logits, dim=1 if logits.ndim > 1 else 0):
        refuse(
            "cross_entropy got probabilities (every row sums to 1), but it applies softmax itself. Pass it the raw "
            "logits: remove the softmax before it.",
            "activation_before_loss",
        )


def _look_at_divisor(loss: str, given: dict[str, Any]) -> None:
    """Warn of a mean over something else than samples: each rank divides by its own count."""
    target, ignored = given["target"], not given["target"].is_floating_point()
    left_out = ignored and bool((target == given["ignore_index"]).any())
    if given["reduction"] == "mean" and (given["weight"] is not None or left_out):
        over = "weights of classes" if given["weight"] is not None else "the targets that ignore_index leaves"
        warn(
            f"{loss} averages over {over}, and not over samples. Each rank divides by its own count, so the mean over "
            "ranks, by their numbers of samples, is not that of one process. Define num_items(batch) on the task, "
            "which returns what the loss divides by, as in `return (labels != -100).sum()`."
        )


def _look_at_nll(given: dict[str, Any]) -> None:
    scores, target = given["input"], given["target"]
    classes = scores.shape[1] if scores.ndim > 1 else scores.shape[0]
    look_at_class_labels("nll_loss", scores, target, classes, given["ignore_index"])
    if bool((scores > 1e-3).any()):
        warn(
            "nll_loss got positive scores, but it wants log-probabilities: if these are logits, use cross_entropy; if "
            "they come from softmax, use log_softmax.",
            "activation_before_loss",
        )


def _look_at_kl_div(given: dict[str, Any]) -> None:
    scores = given["input"]
    # a distribution over the last dimension, or over torch's second; a logarithm of one is never positive
    if scores.ndim and any(_are_probabilities(scores, dim) for dim in {scores.ndim - 1, min(1, scores.ndim - 1)}):
        refuse(
            "kl_div got probabilities (every row sums to 1) as its input, but it wants their logarithm there. Use "
            "log_softmax in place of softmax; the target stays a probability, unless log_target=True.",
            "activation_before_loss",
        )


def _look_at_bce_logits(given: dict[str, Any]) -> None:
    _look_at_binary_targets("binary_cross_entropy_with_logits", given)
    logits = given["input"]
    if logits.numel() >= 16 and bool(((logits >= 0) & (logits <= 1)).all()) and not _is_raw(logits):
        warn(
            "binary_cross_entropy_with_logits got values that all lie in [0, 1]. It applies sigmoid itself: if there "
            "is a sigmoid before it, remove it.",
            "activation_before_loss",
        )


def _look_at_bce(given: dict[str, Any]) -> None:
    _look_at_binary_targets("binary_cross_entropy", given)
    scores = given["input"]
    if bool(((scores < 0) | (scores > 1)).any()):
        refuse(
            "binary_cross_entropy got values outside [0, 1]. Use binary_cross_entropy_with_logits on the raw logits."
        )


def _look_at_binary_targets(loss: str, given: dict[str, Any]) -> None:
    scores, target = given["input"], given["target"]
    if not target.is_floating_point():
        refuse(f"{loss} got labels of type {_dtype(target)}; it wants floats. Use y.float().")
    look_at_equal_shapes(loss, scores, target)
    if target.numel() and (float(target.min()) < 0 or float(target.max()) > 1):
        refuse(f"{loss} got labels from {float(target.min()):g} to {float(target.max()):g}; they lie in [0, 1].")


def _look_at_regression(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda given: look_at_shapes(name, given["input"], given["target"])


_REGRESSION = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.gaussian_nll_loss)
_WATCHED: dict[Any, Callable[[dict[str, Any]], None]] = {
    F.cross_entropy: _look_at_cross_entropy,
    F.nll_loss: _look_at_nll,
    F.kl_div: _look_at_kl_div,
    F.binary_cross_entropy_with_logits: _look_at_bce_logits,
    F.binary_cross_entropy: _look_at_bce,
    **{f: _look_at_regression(f.__name__) for f in _REGRESSION},
}


def _are_probabilities(scores: Tensor, dim: int) -> bool:
    values = scores.detach().float()
    constant = len(values) > 1 and bool((values == values[:1]).all())  # the outputs of an untrained head
    return not constant and bool((values >= 0).all()) and bool(((values.sum(dim) - 1).abs() < 1e-3).all())


def _is_raw(values: Tensor) -> bool:
    """Whether a product, or an operation with a weight, gave these values: they grow with it, so that no activation
    bounds them."""
    node = (values if values._base is None else values._base).grad_fn
    if node is None:
        return True  # nothing says what gave them; the training step has a graph
    if node.name().startswith(("SumBackward", "MmBackward", "BmmBackward")):
        return True
    operands = [operand for operand, _ in node.next_functions if operand is not None]
    turned = [inner for x in operands if x.name().startswith("TBackward") for inner, _ in x.next_functions]
    return any(hasattr(operand, "variable") for operand in (*operands, *turned))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
