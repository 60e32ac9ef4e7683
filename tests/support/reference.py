"""Hand-written training loops: what forge is held against, bit for bit. Plain PyTorch, nothing of forge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


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
    levers = Levers(
        window=window,
        clip_norm=clip_norm,
        clip_value=clip_value,
        schedule=(lambda _: schedule) if schedule is not None else None,
    )
    train_with_levers(model, loss_of, optimizer, batches, epochs, levers, seed)


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


# ---------------------------------------------------------------------------------------------------------------------
# Rounding to int8


class Rounded(torch.autograd.Function):
    """Rounding to a grid by plain arithmetic; gradients pass inside of the grid."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, least: int, most: int) -> Any:
        whole = torch.round(x * (1 / scale)) + zero
        ctx.save_for_backward((whole >= least) & (whole <= most))
        return (whole.clamp(least, most) - zero) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None, None, None, None


class RoundedLinear(nn.Linear):
    """Rounds; ranges are means at first, then averages that move by a hundredth."""

    low: torch.Tensor
    high: torch.Tensor
    seen: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            share = max(1 / (float(self.seen) + 1), 0.01)
            now = input.detach().float()
            self.low.copy_(torch.lerp(self.low, now.min(), share))
            self.high.copy_(torch.lerp(self.high, now.max(), share))
            self.seen.add_(1)
        if not self.seen:
            return F.linear(input, self.weight, self.bias)
        low, high = self.low.clamp(max=0), self.high.clamp(min=0)
        scale = (high - low) / 255
        x: Any = Rounded.apply(input.float(), scale, torch.round(-low / scale), 0, 255)
        rows = self.weight.detach().abs().amax(1, keepdim=True) / 127
        weight: Any = Rounded.apply(self.weight, rows, torch.zeros(()), -127, 127)
        return F.linear(x.to(input.dtype), weight, self.bias)


def round_layers(model: nn.Module) -> None:
    """Make every linear layer of a model a rounded one."""
    layers: list[Any] = [layer for layer in model.modules() if type(layer) is nn.Linear]
    for layer in layers:
        layer.__class__ = RoundedLinear
        for name in ("low", "high", "seen"):
            layer.register_buffer(name, torch.zeros(()), persistent=False)


# ---------------------------------------------------------------------------------------------------------------------
# Every lever at once


@dataclass(kw_only=True)
class Levers:
    """What a strong training script does by hand; each is off unless it is set."""

    window: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    dtype: torch.dtype | None = None
    "Forward under autocast; float16 with a GradScaler."
    scale: float = 2.0**16
    growth_interval: int = 2000
    left_out: Sequence[int] = ()
    "Updates that somebody skips, whatever their gradients."
    rho: float | None = None
    "Sharpness-aware minimisation."
    adaptive: bool = False
    "With each parameter's climb by its size."
    decay: float | None = None
    "Exponential moving average."
    swa_every: int | None = None
    "Stochastic weight averaging: updates between two samples."
    frozen: Sequence[nn.Module] = ()
    thaw_at: int | None = None
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None


@dataclass
class Outcome:
    average: list[torch.Tensor] | None
    skipped: int
    scales: list[float]
    "Of the loss, after each update."


def train_with_levers(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    epochs: int,
    levers: Levers,
    seed: int | None,
) -> Outcome:
    """One loop that does all of it, in the order in which it has to be done."""
    if seed is not None:
        torch.manual_seed(seed)
    device = next(model.parameters()).device.type
    random_numbers = torch.cuda if device == "cuda" else torch
    model.train()
    for module in levers.frozen:
        module.requires_grad_(False)
        module.eval()
    schedule = levers.schedule(optimizer) if levers.schedule is not None else None
    half = levers.dtype is torch.float16
    scaler = torch.amp.GradScaler(device, levers.scale, growth_interval=levers.growth_interval, enabled=half)
    average: list[torch.Tensor] | None = None
    taken = update = skipped = 0
    scales: list[float] = []
    moved = False  # whether the weights have changed since they were last taken

    def run_window(micros: Sequence[Any]) -> None:
        sizes = [len(x) for x, _ in micros]
        for micro, size in zip(micros, sizes, strict=True):
            with torch.autocast(device, levers.dtype or torch.bfloat16, enabled=levers.dtype is not None):
                loss = loss_of(model, micro)
            if len(set(sizes)) > 1:
                loss = loss * (size / sum(sizes))
            elif len(micros) > 1:
                loss = loss / len(micros)
            scaler.scale(loss).backward()

    for _ in range(epochs):
        for start in range(0, len(batches), levers.window):
            micros = batches[start : start + levers.window]
            optimizer.zero_grad()
            rng = random_numbers.get_rng_state()
            run_window(micros)
            if levers.rho is not None:
                after = random_numbers.get_rng_state()
                random_numbers.set_rng_state(rng)
                climb_and_run(model, levers.rho, levers.adaptive, lambda micros=micros: run_window(micros))
                random_numbers.set_rng_state(after)
            scaler.unscale_(optimizer)
            if levers.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), levers.clip_norm)
            if levers.clip_value is not None:
                torch.nn.utils.clip_grad_value_(model.parameters(), levers.clip_value)
            before = scaler.get_scale()
            if update not in levers.left_out:
                scaler.step(optimizer)
            scaler.update()
            updated = scaler.get_scale() >= before and update not in levers.left_out
            scales.append(scaler.get_scale())
            update += 1
            skipped += not updated
            moved = moved or updated
            if schedule is not None and updated:
                schedule.step()
            weights = [p.detach() for p in model.parameters()]
            if levers.decay is not None and updated:
                average = step_average(average, weights, 1 - levers.decay)
            if levers.swa_every is not None and update % levers.swa_every == 0 and moved:
                average = step_average(average, weights, 1 / (taken + 1))
                taken, moved = taken + 1, False
            if update == levers.thaw_at:
                for module in levers.frozen:
                    module.requires_grad_(True)
                    module.train()
    return Outcome(average, skipped, scales)


def climb_and_run(model: nn.Module, rho: float, adaptive: bool, run_window: Callable[[], None]) -> None:
    """Sharpness-aware minimisation's second pass; weights and BatchNorm's statistics are put back.

    w + rho * g / |g|, or with T = |w| + 0.01: w + rho * T² g / |T g|.
    """
    moving = [p for p in model.parameters() if p.grad is not None]
    held = [t.detach().clone() for t in (*moving, *model.buffers())]
    with torch.no_grad():
        sizes = [p.abs() + 0.01 if adaptive else torch.ones_like(p) for p in moving]
        scaled = [p.grad * size for p, size in zip(moving, sizes, strict=True) if p.grad is not None]
        length = rho / (torch.nn.utils.get_total_norm(scaled) + 1e-12)
        for p, size, gradient in zip(moving, sizes, scaled, strict=True):
            p.add_(gradient * size * length)
    for p in moving:
        p.grad = None
    run_window()
    with torch.no_grad():
        for tensor, value in zip((*moving, *model.buffers()), held, strict=True):
            tensor.copy_(value)


def step_average(average: list[torch.Tensor] | None, weights: list[torch.Tensor], share: float) -> list[torch.Tensor]:
    """Move an average towards the weights; the first time it is a copy of them."""
    if average is None:
        return [w.clone() for w in weights]
    for a, w in zip(average, weights, strict=True):
        a.lerp_(w, share)
    return average
