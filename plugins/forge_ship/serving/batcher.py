"""The batcher: requests that arrive one by one are computed together.

One thread runs the engine. While it computes, requests wait; when it is done, the next batch takes all that wait, up to
`max_batch` rows. An idle engine waits until a batch is full or until its first request has waited `max_wait` seconds.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_ship.engine import Engine, ExportError, Port

logger = logging.getLogger("forge")

Outputs = dict[str, Tensor]
Outcome = Outputs | BaseException
Observe = Callable[[int, int, float], None]
"""Gets the rows, the requests and the seconds of a batch."""
MAX_LOG = 300
"""Characters of an engine's error in a line of the log."""


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request that waits for the engine."""

    inputs: Mapping[str, Tensor]
    rows: int
    arrived: float
    key: Any
    "Requests with the same can be computed together."
    answer: asyncio.Future[Outputs]


def next_batch(
    waiting: Sequence[QueuedRequest], max_batch: int, max_wait: float, now: float
) -> tuple[list[QueuedRequest], float | None]:
    """Return the batch to compute now; where none is due, an empty one and the seconds until one is.

    Requests are in order of arrival. They are due once they fill a batch, or the first has waited `max_wait` seconds.
    Of several batches that are due, the one whose first request is the oldest goes first.
    """
    groups: dict[Any, list[QueuedRequest]] = {}
    for request in waiting:
        groups.setdefault(request.key, []).append(request)
    wait: float | None = None
    for group in groups.values():
        is_full = sum(request.rows for request in group) >= max_batch
        left = 0.0 if is_full else group[0].arrived + max_wait - now
        if left <= 0:
            rows, batch = 0, []
            for request in group:
                rows += request.rows
                if rows > max_batch:
                    break
                batch.append(request)
            return batch, 0.0
        wait = left if wait is None else min(wait, left)
    return [], wait


class Batcher:
    """Compute requests in batches, in one thread. Use it from one event loop."""

    def __init__(self, engine: Engine, max_batch: int = 32, max_wait: float = 0.002, observe: Observe | None = None):
        self.observe = observe
        self.busy_since: float | None = None
        "When the batch that is being computed began, by the loop's clock."
        self.batches = can_batch(engine)
        "Whether requests are computed together."
        self._engine = engine
        self._inputs = [(port.name, _batch_axis(port)) for port in engine.inputs]
        self._outputs = [(port.name, _batch_axis(port)) for port in engine.outputs]
        self._max_batch, self._max_wait = max_batch, max_wait if self.batches else 0.0
        self._waiting: list[QueuedRequest] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._jobs: queue.SimpleQueue[list[QueuedRequest] | None] = queue.SimpleQueue()
        # a daemon: an engine that never returns must not keep the process from ending
        self._thread = threading.Thread(target=self._work, name="forge-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many requests wait for the engine."""
        return len(self._waiting)

    def submit(self, inputs: Mapping[str, Tensor], rows: int) -> asyncio.Future[Outputs]:
        """Queue a request, whose inputs are valid; the future gets its outputs. Cancel it to withdraw the request."""
        if self._closed:
            raise ExportError("The server is stopping.")
        key = self._key(inputs) if self.batches else object()
        request = QueuedRequest(inputs, rows, self._loop.time(), key, self._loop.create_future())
        self._waiting.append(request)
        request.answer.add_done_callback(lambda answer: answer.cancelled() and self._withdraw(request))
        self._pump()
        return request.answer

    def close(self, patience: float = 1.0) -> None:
        """End the thread after the batch that it computes; wait at most `patience` seconds for it."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._jobs.put(None)
        self._thread.join(patience)

    def _key(self, inputs: Mapping[str, Tensor]) -> Any:
        """Return what must be equal in a batch: every size but that of the batch."""
        return tuple((*inputs[name].shape[:axis], *inputs[name].shape[axis + 1 :]) for name, axis in self._inputs)

    def _withdraw(self, request: QueuedRequest) -> None:
        if request in self._waiting:  # else a batch has taken it
            self._waiting.remove(request)

    def _pump(self) -> None:
        """Start the next batch if the engine is idle and one is due, else set the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.busy_since is not None or self._closed:
            return
        now = self._loop.time()
        batch, wait = next_batch(self._waiting, self._max_batch, self._max_wait, now)
        if batch:
            taken = set(batch)
            self._waiting = [request for request in self._waiting if request not in taken]
            self.busy_since = now
            self._jobs.put(batch)
        elif wait is not None:
            self._timer = self._loop.call_later(wait, self._pump)

    def _work(self) -> None:
        """Run the engine; the body of the thread."""
        while (batch := self._jobs.get()) is not None:
            start = time.perf_counter()
            outcomes = self._compute(batch)
            seconds = time.perf_counter() - start
            try:
                self._loop.call_soon_threadsafe(self._finish, batch, outcomes, seconds)
            except RuntimeError:  # the loop has ended, and with it all who waited
                return

    def _compute(self, batch: list[QueuedRequest]) -> Sequence[Outcome]:
        """Return the outcome of each request. If a batch fails, each of its requests is computed alone, so that an
        error goes to the request that causes it."""
        try:
            return self._together(batch)
        except BaseException as error:  # a thread that ended would leave every caller waiting
            if len(batch) == 1:
                return [self._failed(batch[0], error)]
        return [self._compute([request])[0] for request in batch]

    def _failed(self, request: QueuedRequest, error: BaseException) -> EngineFailure:
        """Log an engine's error: callers are not told what it says."""
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in request.inputs.items())
        text = " ".join(str(error).split())[:MAX_LOG]
        logger.error("The model failed on %s: %s: %s", shapes, type(error).__name__, text)
        return EngineFailure(f"{type(error).__name__}: {text}")

    def _together(self, batch: list[QueuedRequest]) -> list[Outputs]:
        if len(batch) == 1:
            return [self._run(batch[0].inputs, batch[0].rows)]
        sizes = [request.rows for request in batch]
        joined = {name: torch.cat([request.inputs[name] for request in batch], axis) for name, axis in self._inputs}
        outputs = self._run(joined, sum(sizes))
        parts = {name: outputs[name].split(sizes, axis) for name, axis in self._outputs}
        return [{name: parts[name][index] for name in parts} for index in range(len(batch))]

    def _run(self, inputs: Mapping[str, Tensor], rows: int) -> Outputs:
        outputs = self._engine(inputs)
        for name, axis in self._outputs:
            if axis >= 0 and outputs[name].shape[axis] != rows:
                raise ExportError(f"The output {name} has {outputs[name].shape[axis]} rows for a batch of {rows}.")
        return {name: outputs[name].detach() for name, _ in self._outputs}

    def _finish(self, batch: list[QueuedRequest], outcomes: Sequence[Outcome], seconds: float) -> None:
        self.busy_since = None
        self._pump()  # first: the engine computes while the answers are given out
        for request, outcome in zip(batch, outcomes, strict=True):
            if request.answer.done():  # its caller has gone
                continue
            if isinstance(outcome, BaseException):
                request.answer.set_exception(outcome)
            else:
                request.answer.set_result(outcome)
        if self.observe is not None:
            self.observe(sum(request.rows for request in batch), len(batch), seconds)


class EngineFailure(Exception):
    """An engine failed, on any request or by its own fault; it may have raised anything, so it is told, not raised."""


def can_batch(engine: Engine) -> bool:
    """Return whether requests can be computed together: every input and output has the axis "batch" once. An output
    without it may depend on all rows, and an input without it belongs to one request."""
    return all(_batch_axis(port) >= 0 for port in (*engine.inputs, *engine.outputs))


def zeros_of(port: Port, rows: int) -> Tensor:
    """Return zeros of an input's shape; a dynamic axis has the least size that the data had."""
    seen = port.seen or {}
    sizes = [
        rows if size == "batch" else seen.get(size, (1, 1))[0] if isinstance(size, str) else size for size in port.shape
    ]
    return torch.zeros(sizes, dtype=getattr(torch, port.dtype))


def _batch_axis(port: Port) -> int:
    """Return the position of the axis "batch", -1 unless there is exactly one."""
    return port.shape.index("batch") if port.shape.count("batch") == 1 else -1
