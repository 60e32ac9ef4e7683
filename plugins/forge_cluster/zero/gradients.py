"""Sum each gradient on the rank that owns its parameter, while the backward pass runs; no other rank keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge.errors import TaskError


class Bucket:
    """Parameters of one owner whose gradients are sent as one message."""

    def __init__(self, owner: int):
        self.owner = owner
        self.parameters: list[nn.Parameter] = []
        self.ready: set[int] = set()
        self.sent: tuple[Tensor, Any] | None = None
        "The message under way."
        self.total: Tensor | None = None
        "On the owner: the sum of the window's gradients so far."

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    def fits(self, parameter: nn.Parameter, limit: float) -> bool:
        first = self.parameters[0]
        alike = (first.dtype, first.device) == (parameter.dtype, parameter.device)
        return alike and self.nbytes + parameter.nbytes <= limit


class OwnedGradients:
    """The gradients of the parameters that are trained now.

    Messages leave in one order on all ranks, the reverse of the parameters': a bucket is sent once its gradients and
    all buckets before it are there.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], owners: Mapping[int, int], rank: int, world: int, mb: float):
        self._rank, self._world = rank, world
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._buckets = _buckets(list(named.values()), owners, mb * 2**20)
        self._of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._next = 0

    def add(self, parameter: nn.Parameter) -> None:
        """Take a gradient that has just been computed."""
        bucket = self._of.get(id(parameter))
        if bucket is None:
            return
        if id(parameter) in bucket.ready or self._next == len(self._buckets):
            self._begin()
        bucket.ready.add(id(parameter))
        while self._next < len(self._buckets) and self._is_full(self._buckets[self._next]):
            self._send(self._buckets[self._next])
            self._next += 1

    def finish(self) -> None:
        """Wait for the window's last messages; set `.grad` of the parameters that this rank owns."""
        self._begin()
        for bucket in self._buckets:
            total, bucket.total = bucket.total, None
            if total is not None:
                parts = total.split([parameter.numel() for parameter in bucket.parameters])
                for parameter, part in zip(bucket.parameters, parts, strict=True):
                    parameter.grad = _shaped(part, parameter)

    def _begin(self) -> None:
        """End a micro-batch: every gradient has come, and every message has arrived."""
        if self._next < len(self._buckets):
            missing = [self._names[id(p)] for b in self._buckets for p in b.parameters if id(p) not in b.ready]
            raise TaskError(
                f"zero.stage=2: a micro-batch gave no gradient to {', '.join(missing[:3])} on rank {self._rank}. Every "
                "parameter that is trained must take part in the loss: freeze it (-p freeze), or use zero.stage=1 with "
                "zero.find_unused=true."
            )
        for bucket in self._buckets:
            assert bucket.sent is not None
            (flat, work), bucket.sent = bucket.sent, None
            work.wait()
            bucket.ready.clear()
            if bucket.owner == self._rank:
                bucket.total = flat if bucket.total is None else bucket.total.add_(flat)
        self._next = 0

    def _is_full(self, bucket: Bucket) -> bool:
        return len(bucket.ready) == len(bucket.parameters)

    def _send(self, bucket: Bucket) -> None:
        gradients: list[Any] = [parameter.grad for parameter in bucket.parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(self._world)
        for parameter in bucket.parameters:
            parameter.grad = None
        bucket.sent = flat, dist.reduce(flat, bucket.owner, async_op=True)


def _buckets(parameters: Sequence[nn.Parameter], owners: Mapping[int, int], limit: float) -> list[Bucket]:
    """Return buckets in the order in which backward fills them; several owners' fill at once."""
    done: list[Bucket] = []
    filling: dict[int, Bucket] = {}
    for parameter in reversed(parameters):
        owner = owners[id(parameter)]
        if owner in filling and not filling[owner].fits(parameter, limit):
            done.append(filling.pop(owner))
        filling.setdefault(owner, Bucket(owner)).parameters.append(parameter)
    return [*done, *filling.values()]


def _shaped(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a gradient with the strides of its parameter."""
    shaped = flat.view(parameter.shape)
    return shaped if parameter.is_contiguous() else torch.empty_like(parameter).copy_(shaped)
