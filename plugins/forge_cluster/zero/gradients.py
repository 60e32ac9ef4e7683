"""Sum each gradient on the rank that owns its parameter, while the backward pass runs; no other rank keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge.errors import TaskError


class OwnedGradients:
    """The gradients of the parameters that are trained now.

    Messages leave in one order on all ranks, the reverse of the parameters': a gradient is sent once it and all before
    it are there.
    """

    def __init__(self, owners: Mapping[int, int], rank: int, world: int):
        self._owners, self._rank, self._world = owners, rank, world
        self._hooks: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self._order: list[int] = []
        "What is watched, in the order of the messages."
        self._ready: dict[int, nn.Parameter] = {}
        self._sent: list[tuple[nn.Parameter, Tensor, Any]] = []
        self._totals: dict[nn.Parameter, Tensor] = {}
        "The sums of the window's gradients so far, of what this rank owns."

    def watch(self, task: nn.Module | None) -> None:
        """Take the gradients of what the task trains now, or none."""
        named = list(task.named_parameters()) if task is not None else []
        trained = {id(parameter): (name, parameter) for name, parameter in reversed(named) if parameter.requires_grad}
        self._names, self._order = {key: name for key, (name, _) in trained.items()}, [*trained]
        for key, (_, parameter) in trained.items():
            if key not in self._hooks:  # some may be thawed
                self._hooks[key] = parameter.register_post_accumulate_grad_hook(self._add)

    def finish(self) -> None:
        """Wait for the window's last messages; set `.grad` of the parameters that this rank owns."""
        if self._names:
            self._receive()
        for parameter, total in self._totals.items():
            parameter.grad = total if parameter.is_contiguous() else torch.empty_like(parameter).copy_(total)
        self._totals = {}

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    def _add(self, parameter: Any) -> None:
        if id(parameter) not in self._names:
            return
        if id(parameter) in self._ready or len(self._sent) == len(self._order):
            self._receive()
        self._ready[id(parameter)] = parameter
        while len(self._sent) < len(self._order) and self._order[len(self._sent)] in self._ready:
            self._send(self._ready[self._order[len(self._sent)]])

    def _send(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.contiguous().div_(self._world), None
        work = dist.reduce(gradient, self._owners[id(parameter)], async_op=True)
        self._sent.append((parameter, gradient, work))

    def _receive(self) -> None:
        """End a micro-batch: every gradient has come, and every message has arrived."""
        missing = [name for key, name in self._names.items() if key not in self._ready]
        if missing:
            raise TaskError(
                f"zero.stage=2: a micro-batch gave no gradient to {', '.join(missing[:3])} on rank {self._rank}. Every "
                "parameter that is trained must take part in the loss: freeze it (-p freeze), or use zero.stage=1 with "
                "zero.find_unused=true."
            )
        for parameter, gradient, work in self._sent:
            work.wait()
            if self._owners[id(parameter)] == self._rank:
                total = self._totals.get(parameter)
                self._totals[parameter] = gradient if total is None else total.add_(gradient)
        self._ready, self._sent = {}, []
