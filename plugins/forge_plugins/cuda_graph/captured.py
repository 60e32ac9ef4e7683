"""One captured update: its graph, its input memory, and its metrics."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor, nn

import forge
from forge.diagnose.syncs import own_line
from forge.metrics.means import Means
from forge.optim.optimizers import drop_gradients
from forge.rng import RNGState
from forge.twin.compare import first_difference
from forge.util.frozen import every_module
from forge_plugins.cuda_graph.extent import Extent
from forge_plugins.cuda_graph.graph import Graph
from forge_plugins.cuda_graph.inputs import Inputs
from forge_plugins.cuda_graph.window import GraphWindow

ROWS, PLACES = 1024, 2**16
"""Limits of the metrics kept on the device before they must be delivered: updates, and values in all."""
Row = tuple[int, list[tuple[str, Tensor, Any]]]
"""The metrics of one replay: its number, and each name, value and weight."""


class CaptureFailed(Exception):
    """A step could not be captured; the message is the reason."""


class Captured:
    """An update, or its first part, as a CUDA graph. Construction runs nothing on the device; `replay` does."""

    def __init__(self, step: forge.Step, window: GraphWindow, extent: Extent = Extent.UPDATE, pool: Any = None):
        device = step.trainer.env.device
        self._extent = extent
        self._prepared: list[Any] | None = None
        "The prepared batches, in the graph's memory, for the turns of other optimizers."
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        "What the graph computes, in its memory, for what runs after a replay."
        self._inputs = Inputs(window.tensors, device)
        self._columns: list[tuple[str, int | None]] = []
        self._cursor = torch.zeros(1, dtype=torch.int64, device=device)
        # allocated before the capture: memory allocated inside is overwritten in every replay
        self._places = torch.empty(PLACES, device=device)
        self._table = self._places.view(1, -1)
        self._waiting: list[tuple[int, list[Any]]] = []
        "For each row of the table the number of its replay, and the weights of its micro-batches."
        self._graph = Graph(device, pool)
        self._record(step, window)

    @property
    def pool(self) -> Any:
        """Its memory, for other graphs to share."""
        return self._graph.pool

    @property
    def is_full(self) -> bool:
        """Whether its metrics must be delivered before the next replay."""
        return len(self._waiting) == len(self._table)

    def replay(self, window: GraphWindow, step: forge.Step, number: int) -> None:
        """Run what the graph holds on this window, and then the rest of the update."""
        self._inputs.load(window.tensors)
        self._graph.replay()
        self._waiting.append((number, list(step.items)))
        if self._prepared is not None:
            step.prepared = self._prepared
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._extent.finish(step)

    def take_rows(self) -> list[Row]:
        """Return the metrics of all replays since the last call."""
        waiting, self._waiting = self._waiting, []
        if not self._columns or not waiting:
            return []
        values = self._table[: len(waiting)].clone().unbind()
        self._cursor.zero_()
        rows: list[Row] = []
        for (number, items), row in zip(waiting, values, strict=True):
            named = zip(self._columns, row.unbind(), strict=True)
            rows.append((number, [(name, value, 1 if i is None else items[i]) for (name, i), value in named]))
        return rows

    # -- the capture --------------------------------------------------------------------------------------------------

    def _record(self, step: forge.Step, window: GraphWindow) -> None:
        trainer = step.trainer
        trainer.means.flush()
        inputs = self._inputs.tensors
        batches = window.with_tensors(inputs)

        turn, skipped = step.name, None

        def update() -> None:
            nonlocal skipped
            noted = CapturedMeans(trainer.env.device)
            factors = None if step.factors is None else list(inputs[-1].unbind())
            with step.restored_after(), step.substitute(batches, factors, noted):
                step.begin_turn(turn)
                step.prepared = batches if window.is_prepared else None
                self._extent.run(step)
                if self._extent is not Extent.UPDATE:
                    self._take_gradients(trainer.task)
                self._write_down(noted)
                skipped, self._prepared = step.skip_reason, step.prepared

        traces = HostEffects(trainer.task)
        try:
            self._graph.capture(update)
        except RuntimeError as error:
            traces.undo()
            drop_gradients(step.optimizer)
            self._gradients = []
            where = own_line(traceback.extract_tb(error.__traceback__))  # of the user's code
            reason = f"it cannot be captured at {where}: {str(error).strip().splitlines()[0]}"
            raise CaptureFailed(reason) from error
        self._cursor.zero_()
        frozen = traces.found()
        if frozen is not None or skipped is not None:
            traces.undo()
            raise CaptureFailed(frozen or f"the update was skipped while it was captured: {skipped}")

    def _take_gradients(self, task: nn.Module) -> None:
        """Keep the gradients: memory of theirs that is free would be used by other graphs."""
        self._gradients = [(p, p.grad) for p in task.parameters() if p.grad is not None]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def _write_down(self, noted: CapturedMeans) -> None:
        """Write this update's metrics to the next row of a table, as the last operation of the graph."""
        frozen = sorted({name for name, value, _ in noted.values if not isinstance(value, Tensor)})
        if frozen:
            raise RuntimeError(
                f"the metric {frozen[0]!r} is a plain number, which a graph would repeat; make it a tensor"
            )
        self._columns = [(name, micro) for name, _, micro in noted.values]
        if not self._columns:
            return
        row = torch.stack([value.detach().float().reshape(()) for _, value, _ in noted.values])
        rows = min(ROWS, PLACES // len(row))
        self._table = self._places[: rows * len(row)].view(rows, len(row))
        self._table.index_copy_(0, self._cursor, row[None])
        self._cursor.add_(1)


class HostEffects:
    """Effects of an update on the host that a graph would not repeat: buffers that are replaced rather than written,
    and random numbers drawn on the host."""

    def __init__(self, task: nn.Module):
        self._buffers = [(m._buffers, name, b) for m in every_module(task) for name, b in m._buffers.items()]
        self._names = {id(buffer): name for name, buffer in task.named_buffers()}
        self._random = RNGState.capture(torch.device("cpu"))

    def found(self) -> str | None:
        """Return the first effect, and how to avoid it."""
        for owner, name, buffer in self._buffers:
            if owner.get(name) is not buffer:
                known = self._names.get(id(buffer), name)
                return f"training_step replaces the buffer {known!r}; write into it, as in self.{known}.copy_(...)"
        drawn = first_difference(RNGState.capture(torch.device("cpu")).as_tree(), self._random.as_tree())
        if drawn is None:
            return None
        who = drawn.path.partition(".")[0].replace("python", "random")
        return f"it draws numbers from {who} on the host, which a graph would repeat; draw them on the device"

    def undo(self) -> None:
        """Restore buffers and random state."""
        for owner, name, buffer in self._buffers:
            owner[name] = buffer
        self._random.restore(torch.device("cpu"))


class CapturedMeans(Means):
    """Replaces the run's means during a capture: collects each value with its micro-batch."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.on_host = False
        self.values: list[tuple[str, Any, int | None]] = []
        self._micro = 0

    def add(self, name: str, value: Any, weight: int | Tensor = 1) -> None:
        self.values.append((name, value, None))

    def add_all(self, prefix: str, metrics: Any, weight: int | Tensor) -> None:
        self.values += [(prefix + name, value, self._micro) for name, value in metrics.items()]
        self._micro += 1

    def latest(self, name: str, count: int) -> list[Tensor | float]:
        found = [value for known, value, _ in self.values if known == name]
        return [value.detach() if isinstance(value, Tensor) else value for value in found[-count:]]
