"""Estimate BatchNorm's statistics for averaged weights from the training data, without side effects on the run."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import forge
from forge.data.accumulation_windows import set_epoch
from forge.data.adapt import has_single_position, resumable_reason
from forge.data.sample_rng import seeded
from forge.data.sharding import Portion
from forge.snapshot.sandbox import kept_buffers, uncompiled
from forge.torch_internals import BatchNorm


def batch_norms(task: torch.nn.Module) -> list[Any]:
    """Return the BatchNorm modules whose statistics training updates; frozen ones are in evaluation mode."""
    return [m for m in task.modules() if isinstance(m, BatchNorm) and m.training and m.running_mean is not None]


def unreadable(trainer: forge.Run, over: bool) -> str | None:
    """Return why the training data cannot be read a second time now, or None. After training (`over`) it always can."""
    loader, step = trainer.loaders["train"][None], trainer.step
    if over:
        return None
    if has_single_position(loader):
        return f"{type(loader).__name__} keeps its position, which a second pass would move."
    if resumable_reason(loader) is not None:
        return (
            "this loader may give another order on each pass. Use forge.data.Loader, forge.data.TensorLoader "
            "or a torch DataLoader."
        )
    inner = loader
    while hasattr(inner, "loader"):
        inner = inner.loader
    if getattr(inner, "persistent_workers", False) and step is not None and not step.ends_epoch:
        return "persistent workers serve one pass at a time. Validate at epoch ends, or set persistent_workers=False."
    return None


def estimate(
    trainer: forge.Run, modules: list[Any], limit: int | None, seed: int
) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """Return the number of batches and, for each buffer, its mean over them; nothing else is changed.

    Like torch.optim.swa_utils.update_bn, but through the hooks of a training step, with gradients enabled, since a
    training step may need them, and with each module in its training mode.
    """
    loader, means = trainer.loaders["train"][None], trainer.means.savepoint()
    moving: list[Any] = [buffer for module in modules for buffer in (module.running_mean, module.running_var)]
    momenta = [module.momentum for module in modules]
    seen = 0
    try:
        with kept_buffers(trainer.task), seeded(seed, trainer.env.device), uncompiled():
            for module in modules:
                module.reset_running_stats()
                module.momentum = None  # the mean of all batches instead of the last few
            set_epoch(loader, 0)
            for raw in itertools.islice(loader, limit):
                is_padding = isinstance(raw, Portion) and not raw.samples
                # a padding batch runs, since a forward may wait for all ranks, but another rank counts it
                with kept_buffers(nn.ModuleList(modules)) if is_padding else nullcontext():
                    _forward(trainer, raw.batch if isinstance(raw, Portion) else raw)
                seen += not is_padding
            found = [(buffer, _over_ranks(trainer, buffer, seen)) for buffer in moving]
            seen = trainer.env.all_max([seen])[0]  # a rank with padding batches only takes the number of the others
    finally:
        for module, momentum in zip(modules, momenta, strict=True):
            module.momentum = momentum
        trainer.means.rollback(means)
    return seen, found


def _over_ranks(trainer: forge.Run, value: Tensor, seen: int) -> Tensor:
    """Return the mean over all ranks, weighted by their batches."""
    if trainer.env.world == 1:
        return value.clone()
    weight = torch.tensor(float(seen), device=value.device)
    return trainer.env.sum(value * weight) / trainer.env.sum(weight)


def _forward(trainer: forge.Run, raw: Any) -> None:
    """Run the forward of training on a batch, once for each optimizer."""
    step = forge.Step(trainer, "train", [raw])
    batch = trainer.hooks.forge_prepare_batch(step, raw)
    for name in trainer.optimizers:
        step.begin_turn(name)
        trainer.hooks.forge_forward(step, batch)
