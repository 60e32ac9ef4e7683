"""Evidence: what a run has after an update, marked in a record, to compare runs and those that continue them.

Marked are the batch, the random numbers, the losses, the weights and the optimizer, causes before effects. Aside stands
what no checkpoint holds: attributes and objects of the task and the data, what their classes, closures and globals
hold. A value of these that differs together with what is marked after it is the likely cause; one that differs alone
has not shown yet.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from forge.contract.plugin import Callback, on
from forge.contract.run import Run
from forge.contract.step import Step
from forge.rng import RNGState
from forge.snapshot import frozen_modules, hidden
from forge.twin.compare import Difference, first_difference
from forge.twin.record import Record
from forge.util.digest import digest
from forge.util.frozen import kept_by_hash
from forge.util.walk import GENERATORS, is_atom, walk

BATCH = "the batch"
NUMBERS = "the state of the random numbers"
MEANS = "the loss, a metric or a counter"
WEIGHTS = "the weights"
OPTIMIZER = "the optimizer's state or its learning rate"
UNSAVED = "a value outside the task's state"
MAX_ENTRIES = 2**18
CURES = {
    BATCH: "The data depend on a source that is not seeded per sample: check the dataset and the loader.",
    NUMBERS: "Code draws random numbers a different number of times after a restart, as a cache.",
    WEIGHTS: "The loss was equal, so the update was not: check plugins that change gradients or weights.",
    OPTIMIZER: "A learning-rate schedule or an optimizer keeps state outside its state_dict.",
    UNSAVED: "Make it a buffer (self.register_buffer), or save it with get_extra_state and set_extra_state; let data "
    "and schedules compute what they need from the index, the epoch or the step.",
}
"""Where to look, by the kind of the first value that differs after a resume."""
SEARCH = (
    "Nothing that can be looked into explains it: look for state in files, threads, running generators, hooks, or "
    "objects of other packages. Save it with get_extra_state and set_extra_state."
)


def mark_update(record: Record, trainer: Run, step: Step) -> None:
    """Mark everything of the update that has ended."""
    record.update = trainer.progress.update
    mark_batches(record, trainer, step)
    for path, seal in unsaved(trainer):
        record.mark(path, seal, kind=UNSAVED, aside=True)
    rng = RNGState.capture(trainer.env.device).as_tree()
    for path, state in (rng | hidden.generator_states(trainer).get(hidden.HIDDEN, {})).items():
        record.mark(path, digest(state), kind=NUMBERS)
    record.mark("", dict(_means(trainer)), kind=MEANS)
    record.mark("", trainer.task.state_dict() | _changed_frozen(trainer.task), kind=WEIGHTS)
    for name, state in trainer.optimizers.state_dict(trainer.task).items():
        record.mark(name or "optimizer", state, kind=OPTIMIZER)


def traced(folder: str | Path, kill_at: int | None = None) -> Callback:
    """Return a plugin that marks every update in a new file of the folder: each attempt of a run has its own."""
    record = Record(Path(folder) / f"trace-{len(read_traces(folder)) + 1:03}.jsonl")

    @on("boundary")
    def trace(trainer: Run, step: Step) -> None:
        mark_update(record, trainer, step)
        if kill_at is not None and trainer.progress.update >= kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    return trace


def read_traces(folder: str | Path) -> list[Record]:
    """Return the record of each attempt of a run."""
    return [Record.read(path) for path in sorted(Path(folder).glob("trace-*.jsonl"))]


def mark_batches(record: Record, trainer: Run, step: Step) -> None:
    """Mark every part of every micro-batch of an update."""
    for i, batch in enumerate(step.window):
        named = isinstance(batch, (Mapping, list, tuple))
        found = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if named else [("", batch)]
        for key, part in found:
            place = f"micro-batch {i}, part {key!r}" if named else f"micro-batch {i}"
            record.mark(place, digest(part), trainer.progress.update, kind=BATCH)


def attempts_apart(
    straight: Record, attempts: Sequence[Record], noise: Collection[Difference] = ()
) -> Difference | None:
    """Return the first difference of a run's attempts, of which the last must come to its end, from an uninterrupted
    run, but for noise: what is aside counts alone only if nothing else differs in any."""
    sizes = Counter(mark.update for mark in straight.marks)
    found: list[Difference] = []
    for number, attempt in enumerate(attempts, 1):
        own = Counter(mark.update for mark in attempt.marks)
        last = attempt.updates[-1] if attempt.updates else 0
        if number == len(attempts):
            own.update(update for update in straight.updates if update > last > 0)
        elif own[last] < sizes[last]:  # the kill has cut it
            del own[last]
        one, right = (record.where(lambda mark: mark.update in own) for record in (attempt, straight))  # noqa: B023
        found += filter(None, [first_difference(one, right, noise=noise)])
    return next((each for each in found if not each.aside), found[0] if found else None)


def cure(difference: Difference) -> str:
    """Return where to look for the cause of a resume that is not exact."""
    return CURES.get(difference.kind, SEARCH)


# -- what no checkpoint holds -----------------------------------------------------------------------------------------


def unsaved(trainer: Run) -> Iterator[tuple[str, str]]:
    """Yield (path, digest) of every value of the user's that the task's `state_dict` does not hold."""
    frozen_tensors = [tensor for held in kept_by_hash(trainer.task).values() for tensor in held.tensors().values()]
    saved = (*trainer.task.state_dict(keep_vars=True).values(), *frozen_tensors)
    known = {id(value) for value in saved if isinstance(value, Tensor)}
    roots = hidden.roots(trainer)
    for path, value in walk(roots):
        if path in roots:
            continue
        if isinstance(value, Tensor):
            is_made = value.grad_fn is not None or value.is_inference()  # by the last forward
            if id(value) not in known and not is_made:
                yield path, _sampled(value)
        elif isinstance(value, np.ndarray):
            yield path, _sampled(value)
        elif isinstance(value, (list, dict)):
            yield path, f"{len(value)} items"
        elif isinstance(value, (type, ModuleType, *GENERATORS)):
            continue
        elif isinstance(value, Set) or is_atom(value):
            yield path, digest(value)


def _changed_frozen(task: nn.Module) -> dict[str, Tensor]:
    held = kept_by_hash(task).items()
    return {f"{path}.{name}": value for path, each in held for name, value in frozen_modules.changed(each).items()}


def _means(trainer: Run) -> Iterator[tuple[str, Any]]:
    state = trainer.means.state_dict()
    yield from state["sums"].items()
    yield from ((name, [part.tolist() for part in value]) for name, value in state["kept"].items())
    for name, value in trainer.metrics.items():
        if name.startswith(("train/", "val/")) and isinstance(value, (int, float)):
            yield name, value
    for name in ("micro", "update", "sample", "epoch", "skipped"):
        yield f"progress.{name}", getattr(trainer.progress, name)


def _sampled(value: Any) -> str:
    """Return a digest of a tensor or an array; of a large one, of every n-th entry."""
    size = value.numel() if isinstance(value, Tensor) else value.size
    return digest(value if size <= MAX_ENTRIES else value.reshape(-1)[:: size // MAX_ENTRIES])
