"""Tables of addresses on the device, for a kernel that works on many tensors in one launch.

Nothing here waits for the device. A table is made anew when something in it changes and is never written twice, so that
a CUDA graph goes on reading what it has captured; what a graph reads is kept for good.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from operator import call, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 8192
"Entries of one tensor that one program works on."
COLUMNS = 8
GRAD = 1

_captured: list[Any] = []


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records what is done now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Lists(NamedTuple):
    """The tensors of an update: the same number of each."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    steps: Sequence[Tensor]


class Table:
    """Numbers that kernels read, sent to the device without waiting."""

    def __init__(self, values: Tensor, device: torch.device):
        self._device = device
        self._reserve: Tensor | None = None
        self.send(values)

    def send(self, values: Tensor) -> None:
        """Put these in the place of the old ones."""
        if self._device.type == "cpu":
            self.here = self.there = values
            return
        captured = capturing(self._device)
        pinned, self._reserve = (self._reserve, None) if captured else (None, self._reserve)
        if pinned is None:
            pinned = torch.empty_like(values, pin_memory=True)
        if self._reserve is None and not captured:  # during a capture it is better to pin nothing
            self._reserve = torch.empty_like(values, pin_memory=True)
        self.here = pinned.copy_(values)
        self.there = self.here.to(self._device, non_blocking=True)


class Settings:
    """The numbers of every parameter group on the device; a learning rate that is there already is read there."""

    def __init__(self, device: torch.device):
        self._device = device
        self._rows: list[tuple[float, ...]] = []
        self._table: Table | None = None

    def set(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """One (lr, beta1, beta2, eps, weight_decay) per group. Sent only if one of them is not as before."""
        plain = [self._plain(*row) for row in rows]
        if plain == self._rows:
            return
        self._rows = plain
        packed = b"".join(struct.pack("5d3q", *row, 0, 0) for row in plain)
        values = torch.frombuffer(bytearray(packed), dtype=torch.int64)
        if self._table is None or self._table.there.shape != values.shape:
            self._table = Table(values, self._device)
        else:
            self._table.send(values)

    def _plain(self, lr: float | Tensor, *others: float) -> tuple[float, ...]:
        if isinstance(lr, Tensor) and lr.device == self._device and lr.dtype == torch.float32:
            return (0.0, *others, lr.data_ptr())
        return (float(lr), *others, 0)

    def table(self) -> Table:
        assert self._table is not None, "set them first"
        return self._table


class Kind(NamedTuple):
    """What one launch can serve together: dtypes, and whether all addresses are divisible by 16."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    aligned: bool


class Plan:
    """Where the tensors of an update are, and which program works on which part of which tensor."""

    def __init__(self, lists: Lists, groups: Sequence[int]):
        self._copies = _alike(lists.params, lists.grads)  # in use until the next plan
        lists = lists._replace(grads=self._copies or lists.grads)
        params, grads, exp_avgs, _, _ = lists
        device = params[0].device
        kept = self._kept(lists)
        self._groups = list(groups)
        self._refs = list(map(weakref.ref, kept))
        self._kept_at = list(map(Tensor.data_ptr, kept))
        self._grads_at = list(map(Tensor.data_ptr, grads))
        self._grad_refs = list(map(weakref.ref, grads))
        self._grads_are = [(grad.dtype, grad.numel(), grad.stride()) for grad in grads]
        self._grads_aligned = [at % 16 == 0 for at in self._grads_at]
        columns = torch.tensor([[t.data_ptr() for t in each] for each in lists])
        aligned = (columns[:4] % 16 == 0).all(0).tolist()
        kinds = [
            Kind(p.dtype, g.dtype, m.dtype, a) for p, g, m, a in zip(params, grads, exp_avgs, aligned, strict=True)
        ]
        self._order = torch.tensor(sorted(range(len(kinds)), key=lambda i: str(kinds[i])))
        sizes = torch.tensor([p.numel() for p in params])
        first_of_step = {at: i for i, at in reversed(list(enumerate(columns[4].tolist())))}
        counts = torch.zeros(len(kinds), dtype=torch.int64)
        counts[list(first_of_step.values())] = 1
        rows = torch.stack([*columns, sizes, torch.tensor(self._groups), counts], 1)[self._order]

        self.device, self.tensor_count = device, len(kinds)
        self.settings = Settings(device)
        self.tensors = Table(rows, device)
        self.chunks, self.launches = self._divide(sizes, kinds)
        self.chunk_count = len(self.chunks.there)
        self.partials = torch.empty(self.chunk_count, device=device)
        self.rates = torch.empty(len(kinds), COLUMNS, device=device)
        self.clip = torch.empty(2, device=device)

    def _divide(self, sizes: Tensor, kinds: list[Kind]) -> tuple[Table, list[tuple[Kind, int, int]]]:
        """For each chunk its row and its number in that tensor; for each launch its kind, first chunk and length."""
        number = (sizes[self._order] + CHUNK - 1) // CHUNK
        ends = number.cumsum(0)
        rows = torch.repeat_interleave(torch.arange(len(kinds)), number)
        places = torch.arange(len(rows)) - torch.repeat_interleave(ends - number, number)
        launches: list[tuple[Kind, int, int]] = []
        begin = 0
        for i, end in zip(self._order.tolist(), ends.tolist(), strict=True):
            if launches and launches[-1][0] == kinds[i]:
                begin = launches.pop()[1]
            if end > begin:
                launches.append((kinds[i], begin, end - begin))
            begin = end
        return Table(torch.stack([rows, places], 1).to(torch.int32), self.device), launches

    @staticmethod
    def _kept(lists: Lists) -> list[Tensor]:
        """Those that are the same from update to update."""
        return [*lists.params, *lists.exp_avgs, *lists.exp_avg_sqs, *lists.steps]

    def fits(self, lists: Lists, groups: Sequence[int]) -> bool:
        """Whether these are the tensors of this plan, where they were; gradients may have moved, and are followed."""
        kept = self._kept(lists)
        if (
            len(kept) != len(self._refs)
            or len(lists.grads) != len(self._grads_at)
            or self._groups != groups
            or not all(map(is_, map(call, self._refs), kept))
        ):
            return False
        if list(map(Tensor.data_ptr, kept)) != self._kept_at:
            return False
        try:
            return self._follow(lists.grads)
        except RuntimeError:  # a sparse gradient has no address
            return False

    def _follow(self, grads: Sequence[Tensor]) -> bool:
        if not all(map(is_, map(call, self._grad_refs), grads)):
            if [(grad.dtype, grad.numel(), grad.stride()) for grad in grads] != self._grads_are:
                return False
            self._grad_refs = list(map(weakref.ref, grads))
        grads_at = list(map(Tensor.data_ptr, grads))
        if grads_at == self._grads_at:
            return True
        if [at % 16 == 0 for at in grads_at] != self._grads_aligned:
            return False
        self._grads_at = grads_at
        rows = self.tensors.here.clone()
        rows[:, GRAD] = torch.tensor(grads_at)[self._order]
        self.tensors.send(rows)
        return True

    def keep_for_graph(self) -> None:
        """The graph that is being captured will read all of this, as long as it lives, and cannot say how long."""
        tables = (self.tensors, self.chunks, self.settings.table())
        scratch = (self.partials, self.rates, self.clip, self._copies)
        _captured.append(([(table.here, table.there) for table in tables], scratch))


def order_in_memory(tensor: Tensor) -> list[tuple[int, int]]:
    """What decides which entry follows which in memory."""
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _alike(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """All gradients, each in its parameter's order in memory, if one of them is not; else none."""
    pairs = list(zip(params, grads, strict=True))
    if all(order_in_memory(param) == order_in_memory(grad) for param, grad in pairs):
        return []
    return [torch.empty_like(param, dtype=grad.dtype).copy_(grad) for param, grad in pairs]


_recent: list[Plan] = []


def plan_for(lists: Lists) -> Plan | None:
    """The plan that was made for these tensors, if it is one of the last few."""
    groups = [0] * len(lists.params)
    for plan in _recent:
        if plan.fits(lists, groups):
            return plan
    return None


def new_plan(lists: Lists) -> Plan:
    """A plan for one parameter group, remembered among the last few."""
    plan = Plan(lists, [0] * len(lists.params))
    _recent[:] = [plan, *_recent[:7]]
    return plan
