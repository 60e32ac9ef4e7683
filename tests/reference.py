"""Hand-written training loops: what forge is held against, bit for bit. Plain PyTorch, nothing of forge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    epochs: int,
    *,
    window: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    schedule: Any = None,
    seed: int | None = None,
) -> None:
    """Zero, forward, loss, backward, clip, step, schedule: as one writes it by hand, last short window included."""
    if seed is not None:
        torch.manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for start in range(0, len(batches), window):
            micros = batches[start : start + window]
            sizes = [len(x) for x, _ in micros]
            optimizer.zero_grad()
            for micro, size in zip(micros, sizes, strict=True):
                loss = loss_of(model, micro)
                if len(set(sizes)) == 1:
                    loss = loss if len(micros) == 1 else loss / len(micros)
                else:
                    loss = loss * (size / sum(sizes))
                loss.backward()
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            if clip_value is not None:
                torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)
            optimizer.step()
            if schedule is not None:
                schedule.step()


def train_gan(
    gan: Any,
    optimizers: dict[str, torch.optim.Optimizer],
    batches: Sequence[torch.Tensor],
    epochs: int,
    *,
    window: int = 1,
    clip_norm: float | None = None,
    turns: Callable[[str, int], bool] = lambda name, update: True,
) -> None:
    """Two optimizers over the same window, each with only its own parameters trained and clipped."""
    nets = {"discriminator": gan.discriminator, "generator": gan.generator}
    update = 0
    for _ in range(epochs):
        for start in range(0, len(batches), window):
            micros = batches[start : start + window]
            total = sum(len(m) for m in micros)
            alike = len({len(m) for m in micros}) == 1
            for name, optimizer in optimizers.items():
                if not turns(name, update):
                    continue
                for other, net in nets.items():
                    net.requires_grad_(other == name)
                for micro in micros:
                    loss = gan.loss(micro, name)
                    if alike:
                        loss = loss / len(micros) if len(micros) > 1 else loss
                    else:
                        loss = loss * (len(micro) / total)
                    loss.backward()
                if clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(nets[name].parameters(), clip_norm)
                optimizer.step()
                optimizer.zero_grad()
            for net in nets.values():
                net.requires_grad_(True)
            update += 1
