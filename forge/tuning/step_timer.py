"""Time the updates of a trial, in chunks without a wait inside, and compare its weights with the start's."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping

from torch import Tensor

from forge.contract.hooks import hookimpl
from forge.contract.run import Run
from forge.contract.step import Step
from forge.engine.trainer import Trainer
from forge.env import Env
from forge.errors import ForgeError
from forge.tuning.step_reading import StepReading
from forge.tuning.trial import TuningTrial
from forge.twin.compare import first_difference
from forge.util import peak_memory

CHECK_AT = 6
"""Updates before the timing starts; then the weights are compared."""
CHUNK, CHUNKS = 0.05, 5
"""The least seconds of a chunk, and how many chunks there are at least."""
SECONDS, LONG = 0.6, 6.0
"""The least seconds of a timing, and those after which three chunks are enough."""
SHORT_EPOCH = 0.3
"""An epoch of fewer seconds is one chunk, since its end costs time too."""
MOST = 2000
"""The most updates of a trial."""

Weights = dict[str, Tensor]


class StepTimer(TuningTrial):
    """Measure one trial. `share` is the number of ranks among which batches are divided."""

    def __init__(self, share: int = 1):
        super().__init__()
        self.name = "forge.tuning.step_timer"
        self.most = MOST
        self.share = share
        if share == 1:
            self.forge_setup_env = None  # pyright: ignore[reportAttributeAccessIssue]
        self.weights: Weights = {}
        self.chunks: list[float] = []
        "Seconds of an update, in each chunk."
        self.ready = 0.0
        self.memory: int | None = None
        self._began = time.perf_counter()
        self._from, self._updates, self._size = 0.0, 0, 0

    @hookimpl
    def forge_setup_env(self, trainer: Trainer) -> Env:
        return OneOfMany(trainer.device, self.share)

    @hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        super().forge_start(trainer)
        peak_memory.start(trainer.env.device)

    @hookimpl
    def forge_step_end(self, step: Step) -> None:
        trainer, update = step.trainer, step.index + 1
        if update < CHECK_AT:
            return
        if update == CHECK_AT:
            trainer.env.synchronize()
            self.ready = time.perf_counter() - self._began
            self._keep_weights(trainer)
            self._from = time.perf_counter()
            return
        self._updates += 1
        if self._updates >= (self._size or 1):
            self._end_chunk(trainer)

    @hookimpl
    def forge_end(self, trainer: Trainer) -> None:
        if self.chunks or self.weights:
            self.memory = peak_memory.peak(trainer.env.device)

    def reading(self, start: Mapping[str, Tensor]) -> StepReading:
        """Return the result, compared with the weights of the start."""
        if not self.chunks:
            raise ForgeError("The data end too soon to measure anything.")
        ms = 1000 * statistics.median(self.chunks)
        if not all(weight.isfinite().all() for weight in self.weights.values()):
            raise ForgeError(f"the weights are not finite after {CHECK_AT} updates")
        same = first_difference(self.weights, start) is None
        return StepReading(ms, self.memory, max(0.0, self.ready - CHECK_AT * ms / 1000), same)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _end_chunk(self, trainer: Run) -> None:
        trainer.env.synchronize()
        now = time.perf_counter()
        each = (now - self._from) / self._updates
        if not self._size:  # the first update after the warm-up says how long a chunk must be
            self._size = max(1, math.ceil(CHUNK / each))
            epoch = trainer.updates_per_epoch
            if epoch is not None and self._size < epoch and epoch * each < SHORT_EPOCH:
                self._size = epoch
        else:
            self.chunks.append(each)
        total = sum(self.chunks) * self._size
        enough = CHUNKS if total < LONG else 3
        if len(self.chunks) >= enough and total >= SECONDS:
            trainer.max_updates = trainer.progress.update
        self._from, self._updates = time.perf_counter(), 0

    def _keep_weights(self, trainer: Run) -> None:
        self.weights = {
            name: p.detach().to("cpu", copy=True).contiguous() for name, p in trainer.task.named_parameters()
        }


class OneOfMany(Env):
    """One process that gets its share of every batch, as the first of several ranks would, and exchanges nothing."""

    def __init__(self, device: str, share: int):
        super().__init__(device)
        self.data_world = share
