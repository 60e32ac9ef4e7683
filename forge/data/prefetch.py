"""DevicePrefetch: copy batches to the device ahead of use."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from functools import cache, partial
from typing import Any, Protocol

import torch

from forge.data.own_generators import data_roots, states_of
from forge.data.protocols import is_seekable
from forge.env import map_items, move, pick_device
from forge.errors import DataError
from forge.util.generators import find_generators


class DevicePrefetch:
    """A loader whose batches are copied to a CUDA device on a side stream, `depth` of them ahead of use.

    ::

        DevicePrefetch(Loader(dataset, batch_size=64, shuffle=True, num_workers=4), "cuda")

    All other attributes are the inner loader's: its length, `seek`, `fingerprint`, .... `state_dict` is the state after
    the last batch handed out, not after the last one read. On any other device it only forwards to the inner loader.

    No thread is used: loaders may seed the global generators, which must not happen beside a training step. Reading
    ahead takes the host as long as the inner loader takes; give that one workers if it is slow. A loader must not write
    into a batch that it has yielded.
    """

    def __init__(self, loader: Any, device: str | torch.device, depth: int = 2):
        if depth < 1:
            raise DataError(f"DevicePrefetch: depth is {depth}; it must be at least 1.")
        self.loader, self.device, self.depth = loader, pick_device(device), depth
        self._state: list[Any] = []  # of the last batch handed out: one entry, or none before the first
        self.drawn: dict[str, Any] | None = None
        "States of the data's own generators after the last batch handed out, while batches are read ahead."

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._state, self.drawn = [], None
        copies = self._copies()
        if copies is None:
            return iter(self.loader)
        return _Ahead(self, iter(self.loader), copies)

    def __getattr__(self, name: str) -> Any:
        """Return the inner loader's attribute, so that `seek` or `state_dict` exist exactly if the inner has them."""
        if name in ("loader", "__setstate__"):  # read by copy and pickle, before the inner loader is set
            raise AttributeError(name)
        value = getattr(self.loader, name)
        return {"state_dict": self._state_handed_out, "load_state_dict": self._load_state}.get(name, value)

    def _state_handed_out(self) -> Any:
        return copy.deepcopy(self._state[0]) if self._state else self.loader.state_dict()

    def _load_state(self, state: Any) -> None:
        self._state, self.drawn = [], None
        self.loader.load_state_dict(state)

    def _copies(self) -> Copies | None:
        """Return how batches are copied ahead of use, or None if the device does not support it."""
        return side_stream(self.device) if self.device.type == "cuda" else None


class Copies(Protocol):
    """Moves a batch in two halves, so that other copies can begin in between."""

    def begin(self, batch: Any) -> Any:
        """Start moving a batch; return the argument of `finish`."""

    def finish(self, begun: Any) -> Any:
        """Return the batch, safe to use on the current stream."""

    def drop(self, begun: Any) -> None:
        """Make it safe to free a batch that will not be used."""


class _Ahead:
    """One epoch, read `depth` batches ahead. An error of the inner loader is raised in place of its batch."""

    def __init__(self, owner: DevicePrefetch, batches: Iterator[Any], copies: Copies):
        self._owner, self._copies = owner, copies
        self._batches: Iterator[Any] | None = batches
        self._queue: deque[tuple[Any, Exception | None, list[Any], dict[str, Any] | None]] = deque()
        self._keeps_state = not is_seekable(owner.loader) and hasattr(owner.loader, "state_dict")
        owner._state = self._snapshot()
        self._own = find_generators(data_roots(owner.loader))
        owner.drawn = self._states()

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        while self._batches is not None and len(self._queue) <= self._owner.depth:
            self._read(self._batches)
        return self._hand_out()

    def _hand_out(self) -> Any:
        """Separate from `__next__`: an error in the queue keeps that frame alive, with everything the frame holds."""
        if not self._queue:
            raise StopIteration
        begun, error, self._owner._state, self._owner.drawn = self._queue.popleft()
        if error is not None:
            raise error
        return self._copies.finish(begun)

    def _read(self, batches: Iterator[Any]) -> None:
        """Read one batch, or the exception that ends the epoch: StopIteration too, which user code may raise."""
        try:
            begun, error = self._copies.begin(next(batches)), None
        except Exception as raised:
            begun, error, self._batches = None, raised, None
        self._queue.append((begun, error, self._snapshot(), self._states()))

    def __del__(self) -> None:
        """Drop an unfinished epoch: copies under way must not write into memory that has been freed."""
        for begun, error, *_ in self._queue:
            if error is None:
                self._copies.drop(begun)

    def _snapshot(self) -> list[Any]:
        return [copy.deepcopy(self._owner.loader.state_dict())] if self._keeps_state else []

    def _states(self) -> dict[str, Any] | None:
        return states_of(self._own) if self._own else None


class SideStream:
    """Copies from pinned memory, on a CUDA stream beside the computing one.

    Memory for a batch is allocated on the computing stream, and the copy waits for the work queued there so far. So
    memory is reused in the order of the computation, however far the host is ahead of the device; with memory of the
    side stream (and `record_stream`) each batch would be held until the device has caught up.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def begin(self, batch: Any) -> Transfer:
        transfer = Transfer(torch.cuda.current_stream(self.device))
        transfer.batch = _mapped(batch, partial(self._place, transfer))
        self.stream.wait_stream(transfer.owner)
        with torch.cuda.stream(self.stream):
            for there, here in transfer.copies:
                # the pinned copy may be freed: its memory is not reused before the stream has read it
                there.copy_(here, non_blocking=True)
            transfer.arrived.record(self.stream)
        return transfer

    def _place(self, transfer: Transfer, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor's destination on the device; one that cannot be copied ahead is left to `finish`."""
        if type(tensor) is not torch.Tensor or not tensor.is_cpu or not _is_plain(tensor):
            return tensor
        there = torch.empty_like(tensor, device=self.device)
        transfer.copies.append((there, tensor if tensor.is_pinned() else tensor.pin_memory()))
        return there

    def finish(self, begun: Transfer) -> Any:
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(begun.arrived)
        if compute != begun.owner:
            for there, _ in begun.copies:
                there.record_stream(compute)
        return move(begun.batch, self.device)  # the rest: sparse tensors, objects with a `to`

    def drop(self, begun: Transfer) -> None:
        begun.owner.wait_event(begun.arrived)


class Transfer:
    """A batch on its way to the device."""

    __slots__ = ("arrived", "batch", "copies", "owner")

    def __init__(self, owner: torch.cuda.Stream):
        self.owner, self.arrived = owner, torch.cuda.Event()
        self.batch: Any = None
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []


@cache
def side_stream(device: torch.device) -> SideStream:
    """Return the side stream that all loaders of a device use."""
    return SideStream(device)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.requires_grad


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with every tensor in its containers replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if callable(getattr(type(value), "to", None)) and not isinstance(value, MutableMapping):
        return value  # its `to` decides which tensors move: the lengths of a packed sequence stay on the host
    mapped = map_items(value, lambda item: _mapped(item, function))
    return value if mapped is None else mapped
