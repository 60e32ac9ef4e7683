"""Device tables for clip_adamw's kernels: addresses of tensors, assignment of chunks to programs, and settings.
Nothing here waits for the device.

A table is in one of two states:

- **set**: only the host has the values; they are not on the device yet;
- **written**: they were copied to the device, in stream order. All later work may read them there, including graphs
  captured later. That memory is never written again.

    | event                | set                                                     | written               |
    |----------------------|---------------------------------------------------------|-----------------------|
    | an eager step        | copies into new memory; becomes written                 | reads it              |
    | a step in a capture  | records a copy into new memory of its own; **stays set**| reads it              |
    | other values are set | stays set                                               | set; memory released  |

A capture only records the copy: its memory holds the values once its own graph has been replayed, which may be after
the next eager step, after another graph, or never, if the capture fails. So only that graph uses it, and the next step
copies again. Memory that a graph reads, written or recorded, is kept forever, since the lifetime of a graph is unknown.
So a graph keeps the addresses and numbers of its capture, whatever eager steps and other graphs use between its
replays. Only tensors may change from replay to replay: a learning rate on the device is in the table by its address.
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
"Entries of one tensor per program."
COLUMNS = 8
GRAD = 1

_captured: list[Any] = []
"""Memory that captured graphs read, kept forever."""


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on this device, which must be the current one."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keep_in_capture(device: torch.device, unused: Any) -> None:
    """Keep what would be freed now if a graph is being captured: pinned memory that is freed then, after use on the
    capturing stream, spoils torch's allocator of pinned memory for good."""
    if unused is not None and capturing(device):
        _captured.append(unused)


def copied(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to the device, in stream order."""
    return values.to(device, non_blocking=True)


class Lists(NamedTuple):
    """The tensors of an update, one of each per parameter."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    steps: Sequence[Tensor]


class DeviceTable:
    """Numbers on the device that kernels read; see the states above."""

    def __init__(self, values: Tensor, device: torch.device):
        self._device = device
        self._reserve: Tensor | None = None
        self._pinned: Tensor | None = None
        self.set(values)

    def set(self, values: Tensor) -> None:
        """Replace the values; they are copied to the device at the next read."""
        keep_in_capture(self._device, self._pinned)
        self.values = values
        self._pinned = None
        self._written: Tensor | None = None

    def on_device(self, recorded: bool) -> Tensor:
        """Return the values on the device, for work that is queued now, or recorded by a capture."""
        device_values = self._written
        if device_values is None:
            device_values = copied(self._on_host(recorded), self._device)
        if recorded:
            _captured.append((self._pinned, device_values))
        else:
            self._written = device_values
        return device_values

    def _on_host(self, recorded: bool) -> Tensor:
        """Return the values in pinned memory; a capture, which must not pin memory, uses the reserve."""
        if self._device.type == "cpu":
            return self.values
        if not recorded and self._reserve is None:
            self._reserve = torch.empty_like(self.values, pin_memory=True)
        if self._pinned is None:
            pinned, self._reserve = (self._reserve, None) if recorded else (None, self._reserve)
            if pinned is None:
                pinned = torch.empty_like(self.values, pin_memory=True)
            self._pinned = pinned.copy_(self.values)
        return self._pinned


class ClipSettings:
    """The settings of every parameter group on the device; a learning rate on the device is read by address."""

    def __init__(self, device: torch.device):
        self._device = device
        self._rows: list[tuple[float, ...]] = []
        self._table: DeviceTable | None = None

    def on_device(self, rows: Sequence[tuple[Any, ...]], recorded: bool) -> Tensor:
        """Return a row (lr, beta1, beta2, eps, weight_decay) per group, copied only if a value changed."""
        plain = [self._plain(*row) for row in rows]
        if self._table is None or plain != self._rows:
            packed = b"".join(struct.pack("5d3q", *row, 0, 0) for row in plain)
            values = torch.frombuffer(bytearray(packed), dtype=torch.int64)
            if self._table is None or len(plain) != len(self._rows):
                self._table = DeviceTable(values, self._device)
            else:
                self._table.set(values)
            self._rows = plain
        if recorded:
            _captured.append([lr for lr, *_ in rows])
        return self._table.on_device(recorded)

    def _plain(self, lr: float | Tensor, *others: float) -> tuple[float, ...]:
        if isinstance(lr, Tensor) and lr.device == self._device and lr.dtype == torch.float32:
            return (0.0, *others, lr.data_ptr())
        return (float(lr), *others, 0)


class Kind(NamedTuple):
    """Properties that all tensors of one launch share: dtypes, and whether addresses are divisible by 16."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    aligned: bool


class ClipPlan:
    """The addresses of an update's tensors, and the assignment of their chunks to programs.

    Gradients have the memory order of their parameters (see `matching_order`).
    """

    def __init__(self, lists: Lists, groups: Sequence[int]):
        params, grads, exp_avgs, _, _ = lists
        device = params[0].device
        kept = self._kept(lists)
        self._groups = list(groups)
        self._refs = list(map(weakref.ref, kept))
        self._kept_at = list(map(Tensor.data_ptr, kept))
        self._grads_at = list(map(Tensor.data_ptr, grads))
        self._grad_refs = list(map(weakref.ref, grads))
        self._grads_are = list(map(_layout_of, grads))
        self._grads_aligned = [at % 16 == 0 for at in self._grads_at]
        columns = _int64([[t.data_ptr() for t in each] for each in lists])
        aligned = (columns[:4] % 16 == 0).all(0).tolist()
        kinds = [
            Kind(p.dtype, g.dtype, m.dtype, a) for p, g, m, a in zip(params, grads, exp_avgs, aligned, strict=True)
        ]
        self._order = _int64(sorted(range(len(kinds)), key=lambda i: str(kinds[i])))
        sizes = _int64([p.numel() for p in params])
        first_of_step = {at: i for i, at in reversed(list(enumerate(columns[4].tolist())))}
        counts = torch.zeros_like(sizes)
        counts[list(first_of_step.values())] = 1
        rows = torch.stack([*columns, sizes, _int64(self._groups), counts], 1)[self._order]

        self.device, self.tensor_count = device, len(kinds)
        self.settings = ClipSettings(device)
        self.tensors = DeviceTable(rows, device)
        self.chunks, self.launches = self._divide(sizes, kinds)
        self.chunk_count = len(self.chunks.values)
        self.partials = torch.empty(self.chunk_count, dtype=torch.float32, device=device)
        self.rates = torch.empty(len(kinds), COLUMNS, dtype=torch.float32, device=device)
        self.clip = torch.empty(2, dtype=torch.float32, device=device)

    def _divide(self, sizes: Tensor, kinds: list[Kind]) -> tuple[DeviceTable, list[tuple[Kind, int, int]]]:
        """Return each chunk's row and number in its tensor, and each launch's kind, first chunk and length."""
        number = (sizes[self._order] + CHUNK - 1) // CHUNK
        ends = number.cumsum(0)
        rows = torch.repeat_interleave(torch.arange(len(kinds), device="cpu"), number)
        places = torch.arange(len(rows), device="cpu") - torch.repeat_interleave(ends - number, number)
        launches: list[tuple[Kind, int, int]] = []
        begin = 0
        for i, end in zip(self._order.tolist(), ends.tolist(), strict=True):
            if launches and launches[-1][0] == kinds[i]:
                begin = launches.pop()[1]
            if end > begin:
                launches.append((kinds[i], begin, end - begin))
            begin = end
        return DeviceTable(torch.stack([rows, places], 1).to(torch.int32), self.device), launches

    @staticmethod
    def _kept(lists: Lists) -> list[Tensor]:
        """Return the tensors that stay the same from update to update."""
        return [*lists.params, *lists.exp_avgs, *lists.exp_avg_sqs, *lists.steps]

    def fits(self, lists: Lists, groups: Sequence[int]) -> bool:
        """Whether this plan is for these tensors at their addresses; the plan is updated if only gradients moved."""
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
        known = all(map(is_, map(call, self._grad_refs), grads))
        grads_at = list(map(Tensor.data_ptr, grads))
        if known and grads_at == self._grads_at:
            return True
        if list(map(_layout_of, grads)) != self._grads_are or [at % 16 == 0 for at in grads_at] != self._grads_aligned:
            return False
        self._grad_refs = list(map(weakref.ref, grads))
        if grads_at != self._grads_at:
            self._grads_at = grads_at
            rows = self.tensors.values.clone()
            rows[:, GRAD] = _int64(grads_at)[self._order]
            self.tensors.set(rows)
        return True

    def tables(self, settings: Sequence[tuple[Any, ...]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the device tables for the next launches: tensors, chunks, and groups with these settings."""
        recorded = capturing(self.device)
        if recorded:
            _captured.append((self.partials, self.rates, self.clip))
        return (
            self.tensors.on_device(recorded),
            self.chunks.on_device(recorded),
            self.settings.on_device(settings, recorded),
        )


def order_in_memory(tensor: Tensor) -> list[tuple[int, int]]:
    """Return sizes and strides that determine the order of entries in memory; empty for an empty tensor."""
    if not tensor.numel():
        return []
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def matching_order(lists: Lists) -> Lists:
    """Replace gradients whose memory order differs from their parameters' by copies.

    A copy belongs to one step. It may be released once the step is launched, also in a capture: torch reuses its memory
    only for work that is queued later.
    """
    pairs = zip(lists.params, lists.grads, strict=True)
    grads = [
        grad
        if order_in_memory(param) == order_in_memory(grad)
        else torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        for param, grad in pairs
    ]
    return lists._replace(grads=grads)


def _layout_of(grad: Tensor) -> tuple[Any, ...]:
    return type(grad), grad.dtype, grad.device, grad.shape, grad.stride()


def _int64(numbers: Sequence[Any]) -> Tensor:
    """Make an int64 tensor in host memory, regardless of torch's default device."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


_recent: list[ClipPlan] = []


def plan_for(lists: Lists) -> ClipPlan | None:
    """Return a recent plan that fits these tensors, if any."""
    groups = [0] * len(lists.params)
    for plan in _recent:
        if plan.fits(lists, groups):
            return plan
    return None


def new_plan(lists: Lists) -> ClipPlan:
    """Make a plan for one parameter group, and keep it among the recent ones."""
    plan = ClipPlan(lists, [0] * len(lists.params))
    keep_in_capture(plan.device, _recent[7:])
    _recent[:] = [plan, *_recent[:7]]
    return plan
