"""Whether the mean of the ranks' losses is the loss of the whole batch: executed and compared, once, on few samples.

forge weighs the loss of a rank, and of a micro-batch, by its number of samples. That is right for a mean over samples.
A loss that divides by something else (the tokens that `ignore_index` leaves, a mask, weights of classes) needs
`num_items`. Which of them a loss is, its values say: those of parts of a batch, alone and together.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forge.contract.step import Step
from forge.data.accumulation_windows import batch_size
from forge.data.sample_rng import seeded
from forge.data.sharding import Cut, part_of
from forge.env import move
from forge.errors import DataError
from forge.snapshot.sandbox import uncompiled, without_side_effects

logger = logging.getLogger("forge")

PARTS = 3
CLEAR, NONE = 0.02, 0.002
"""Deviations from a mean, in parts of the distance between the losses that it is of: one that is told, and the largest
that counts as none."""
NOISE = 16
"""Rounding errors of a loss, in units in its last place."""

Losses = dict[tuple[int, ...], float]
"""The loss of each union of parts."""


def tell_of_other_means(step: Step, model: Callable[..., Any], who: str) -> None:
    """Warn if the update of several ranks is not that of the whole batch, with the cure. All ranks must call it."""
    trainer = step.trainer
    env = trainer.env
    if trainer.task_defines_num_items or not trainer.task.check_first_batch or env.divides_samples:
        return
    padding = trainer.padding or [False] * len(step.window)
    sizes = [0 if padded else batch_size(raw) or 0 for raw, padded in zip(step.window, padding, strict=True)]
    least = -env.all_max([-sizes[0]])[0]
    if least >= PARTS:
        lengths = sorted({1, least // PARTS})
        choices = [[_part(step.window[0], i * n, n, sizes[0]) for i in range(PARTS)] for n in lengths]
    else:  # a sample of each micro-batch of each rank
        pieces = [_part(raw, 0, 1, size) for raw, size in zip(step.window, sizes, strict=True) if size]
        by_rank = env.gather(move(pieces[:PARTS], torch.device("cpu")))[:: env.world // env.data_world]
        choices = [[piece for each in by_rank for piece in each][:PARTS]]
    unit = NOISE * max(torch.finfo(p.dtype).eps for p in trainer.task.parameters() if p.is_floating_point())
    found = [_kind_of(_losses(step, model, parts), unit) for parts in choices if len(parts) > 1]
    told = next((kind for each in env.gather(found) for kind in each if kind is not None), None)
    if told is not None and env.is_main:
        logger.warning("%s: %s %s", who, type(trainer.task).__name__, told)


def _part(raw: Any, begin: int, count: int, size: int) -> Any:
    """Return some samples of a batch; None if it cannot be divided."""
    try:
        return part_of(raw, Cut(begin, begin + count, count), size)
    except DataError:
        return None


def _losses(step: Step, model: Callable[..., Any], parts: Sequence[Any]) -> Losses | None:
    """Return the loss of every union of parts of a batch; None where it is not a function of the samples."""
    trainer = step.trainer
    name, device = next(iter(trainer.optimizers)), trainer.env.device

    def loss(chosen: Sequence[int], word: int) -> float:
        batch = joined([parts[i] for i in chosen])
        with seeded(word, device):
            output = model(trainer.hooks.forge_prepare_batch(step, batch), "train", name)
        return float(output if isinstance(output, Tensor) else output["loss"])

    unions = [each for count in range(1, len(parts) + 1) for each in itertools.combinations(range(len(parts)), count)]
    try:
        with _without_a_trace(step):
            losses = {union: loss(union, 0) for union in unions}
            again = loss(unions[-1], 1)
    except Exception as error:
        logger.debug("The loss of a part of a batch is not known: %s", error)
        return None
    draws = abs(again - losses[unions[-1]]) > 1e-6 * abs(again)
    return None if draws or not all(map(math.isfinite, losses.values())) else losses


def _kind_of(losses: Losses | None, unit: float) -> str | None:
    """Say what is wrong with the mean over ranks, or None: for a mean over samples, and for what is no mean at all."""
    if losses is None:
        return None
    alone = [losses[(i,)] for i in range(sum(len(union) == 1 for union in losses))]
    unions = [union for union in losses if len(union) > 1]
    noise = unit * max(map(abs, losses.values()))
    apart = max(alone) - min(alone)

    def furthest(expected: Callable[[tuple[int, ...]], float]) -> float:
        return max(abs(losses[union] - expected(union)) for union in unions)

    def mean(union: tuple[int, ...], weights: Sequence[float]) -> float:
        return sum(weights[i] * alone[i] for i in union) / sum(weights[i] for i in union)

    if furthest(lambda union: mean(union, [1.0] * len(alone))) <= max(CLEAR * apart, 10 * noise):
        return None
    if furthest(lambda union: sum(alone[i] for i in union)) <= noise:
        return (
            "adds its loss up over the samples of a batch, but ranks and micro-batches are averaged, so the update is "
            "smaller than that of one process. Take the mean over samples."
        )
    weights = [1.0]
    for left, right in itertools.pairwise(range(len(alone))):
        share = (losses[left, right] - alone[right]) / ((alone[left] - alone[right]) or math.inf)
        if not 0 < share < 1:
            return None
        weights.append(weights[-1] * (1 - share) / share)
    if furthest(lambda union: mean(union, weights)) > max(NONE * apart, noise):
        return None  # the samples of a batch depend on each other, as in a contrastive loss
    return (
        "averages its loss over something else than samples (tokens that ignore_index or a mask leaves, weights of "
        f"classes): samples of one batch count as {' : '.join(f'{weight:.3g}' for weight in weights)}. Each rank "
        "and micro-batch divides by its own count, so the mean over them is not that over the batch: the update is not "
        "that of one process and one batch. Define num_items(batch) on the task, which returns what the loss divides "
        "by, as in `return (labels != -100).sum()`."
    )


def joined(batches: Sequence[Any]) -> Any:
    """Return collated batches as one."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches)) if first.ndim else first
    if isinstance(first, dict):
        return {key: joined([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple):
        parts = [joined(each) for each in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, list) and first and isinstance(first[0], (Tensor, dict, list, tuple)):
        return [joined(each) for each in zip(*batches, strict=True)]
    return list(itertools.chain(*batches)) if isinstance(first, list) else first


@contextmanager
def _without_a_trace(step: Step) -> Iterator[None]:
    """Evaluate without dropout and batch statistics, and leave everything as it was."""
    trainer = step.trainer
    modes = [(module, module.training) for module in trainer.task.modules()]
    precision = torch.get_float32_matmul_precision()
    means, attributes = (
        trainer.means.savepoint(),
        [(module, _copied(vars(module))) for module in trainer.task.modules()],
    )
    with ExitStack() as stack:
        for context in (without_side_effects(trainer), step.restored_after(), uncompiled(), torch.no_grad()):
            stack.enter_context(context)
        trainer.task.eval()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            for module, mode in modes:
                module.training = mode
            for module, before in attributes:
                _put_back(module, before)
            trainer.means.rollback(means)


def _copied(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return a module's own attributes, and copies of lists and dicts among them; not its parameters and parts."""
    own = {name: value for name, value in attributes.items() if name not in vars(nn.Module()) and name != "trainer"}
    return {
        name: (value, value.copy() if isinstance(value, (list, dict, set)) else None) for name, value in own.items()
    }


def _put_back(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    for name in [name for name in vars(module) if name not in before and name not in vars(nn.Module())]:
        if name != "trainer":
            del vars(module)[name]
    for name, (value, copied) in before.items():
        vars(module)[name] = value
        if isinstance(value, list):
            value[:] = copied
        elif copied is not None:
            value.clear()
            value.update(copied)
