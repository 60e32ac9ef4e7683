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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forge_ship.engine import Engine, ExportError, Port
from forge_ship.serving.rejected_inputs import reason_to_reject

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
    answer: asyncio.Future[Outputs]


@dataclass(slots=True)
class WaitingGroup:
    """Requests that fit into one batch: the axes beside the batch are equal."""

    requests: deque[QueuedRequest] = field(default_factory=deque)
    rows: int = 0


class WaitingRequests:
    """Requests in order of arrival, grouped by what can be computed together. It has no clock: `now` is given."""

    def __init__(self, max_batch: int, max_wait: float):
        self.max_batch, self.max_wait = max_batch, max_wait
        self._groups: dict[Any, WaitingGroup] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: Any, request: QueuedRequest) -> None:
        group = self._groups.setdefault(key, WaitingGroup())
        group.requests.append(request)
        group.rows += request.rows
        self._count += 1

    def remove(self, key: Any, request: QueuedRequest) -> None:
        """Remove a request whose caller has gone; do nothing if a batch has taken it."""
        group = self._groups.get(key)
        if group is not None and request in group.requests:
            group.requests.remove(request)
            self._forget(key, group, request)

    def due_in(self, now: float) -> float | None:
        """Return the seconds until a batch is due, 0 if one is; None if no request waits."""
        return min((max(0.0, self._due(group) - now) for group in self._groups.values()), default=None)

    def take(self, now: float) -> list[QueuedRequest]:
        """Remove and return the next batch: of the groups that are due, the one whose first request is the oldest."""
        due = [(group.requests[0].arrived, key) for key, group in self._groups.items() if self._due(group) <= now]
        key = min(due, key=lambda pair: pair[0])[1]
        group, batch, rows = self._groups[key], [], 0
        while group.requests and rows + group.requests[0].rows <= self.max_batch:
            request = group.requests.popleft()
            batch.append(request)
            rows += request.rows
            self._forget(key, group, request)
        return batch

    def _due(self, group: WaitingGroup) -> float:
        """Return when a group is due: at once if it fills a batch."""
        return 0.0 if group.rows >= self.max_batch else group.requests[0].arrived + self.max_wait

    def _forget(self, key: Any, group: WaitingGroup, request: QueuedRequest) -> None:
        group.rows -= request.rows
        self._count -= 1
        if not group.requests:
            del self._groups[key]


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
        self._waiting = WaitingRequests(max_batch, max_wait if self.batches else 0.0)
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
        request = QueuedRequest(inputs, rows, self._loop.time(), self._loop.create_future())
        key = self._key(inputs) if self.batches else object()
        self._waiting.add(key, request)
        request.answer.add_done_callback(lambda answer: answer.cancelled() and self._waiting.remove(key, request))
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

    def _pump(self) -> None:
        """Start the next batch if the engine is idle and one is due, else set the timer."""
        now = self._loop.time()
        due = self._waiting.due_in(now) if self.busy_since is None and not self._closed else None
        if due is None:
            return
        if due > 0:
            if self._timer is None:
                self._timer = self._loop.call_later(due, self._wake)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.busy_since = now
        self._jobs.put(self._waiting.take(now))

    def _wake(self) -> None:
        self._timer = None
        self._pump()

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
                return [self._explained(batch[0], error)]
        return [self._compute([request])[0] for request in batch]

    def _explained(self, request: QueuedRequest, error: BaseException) -> BaseException:
        """Log an engine's error, and return it, or that the request is to blame."""
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in request.inputs.items())
        text = " ".join(str(error).split())[:MAX_LOG]
        reason = reason_to_reject(error, request.inputs, request.rows, self._engine.inputs, self._run)
        level = logging.ERROR if reason is None else logging.WARNING
        logger.log(level, "The model failed on %s: %s: %s", shapes, type(error).__name__, text)
        return error if reason is None else InputRejected(reason, error)

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
                known = isinstance(outcome, InputRejected)
                request.answer.set_exception(outcome if known else EngineFailure(outcome))
            else:
                request.answer.set_result(outcome)
        if self.observe is not None:
            self.observe(sum(request.rows for request in batch), len(batch), seconds)


class EngineFailure(Exception):
    """What an engine raised; it may be anything, so it is carried, not raised again."""

    def __init__(self, cause: BaseException):
        super().__init__(f"{type(cause).__name__}: {cause}")


class InputRejected(Exception):
    """A request that the engine cannot compute, though it computes others; the message says what is wrong with it."""

    def __init__(self, reason: str, cause: BaseException):
        super().__init__(reason)
        self.failure = EngineFailure(cause)


def can_batch(engine: Engine) -> bool:
    """Return whether requests can be computed together: every input and output has the axis "batch" once. An output
    without it may depend on all rows, and an input without it belongs to one request."""
    return all(_batch_axis(port) >= 0 for port in (*engine.inputs, *engine.outputs))


def _batch_axis(port: Port) -> int:
    """Return the position of the axis "batch", -1 unless there is exactly one."""
    return port.shape.index("batch") if port.shape.count("batch") == 1 else -1
