"""Check of a loader: cut anywhere and begun again by a new process, it gives the batches that it would have given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from forge.data.accumulation_windows import Feed, batch_size, is_stateful
from forge.data.accumulation_windows import check_loader as refuse_no_loader
from forge.data.adapt import adopt, resumable_reason
from forge.data.protocols import Indexed, is_live, is_seekable
from forge.data.sample_rng import restored_generators, seed_generators
from forge.errors import DataError
from forge.rng import RNGState
from forge.twin.compare import first_difference
from forge.twin.record import Record
from forge.util.digest import digest

State = tuple[dict[str, Any], RNGState] | None

CPU = torch.device("cpu")
EPOCHS = 2
SEED = 20


def check_loader(make: Callable[[], Any], task: nn.Module | None = None) -> str:
    """Check that a run over a loader resumes exactly; return the protocol by which it does.

    `make` makes the loader, as a restarted script does: equal ones, at the same place in the same data. A live loader
    collects with `task`. Raises AssertionError where a pass that is cut goes on with other batches, and where an
    `Indexed` loader counts its samples wrongly. The names of the protocols are those of `forge.contract.protocols`.
    """
    given = make()
    kind = type(given).__name__
    refuse_no_loader(given, "train")
    reason = resumable_reason(adopt(given, "train"))
    assert reason is None, f"A run over {kind} cannot resume exactly: {reason}"
    straight = _pass(make, task)
    for cut in sorted({1, straight.batches // 2, len(straight.epochs) - 1} - {0}):
        state = _pass(make, task, cut).state
        rest = _pass(make, task, begun=cut, state=state, epoch=straight.epochs[cut - 1]).record
        found = first_difference(rest, straight.record.where(lambda mark: (mark.update or 0) > cut))  # noqa: B023
        assert found is None, (
            f"{kind}, cut after {cut} batches and begun again, gives another batch {found.update} than in one pass "
            f"(in {found.path or 'its value'}: {found.distance.text or 'another value'}). Its position or state must "
            "say where the next batch comes from, and nothing else may."
        )
    if is_live(given):
        return "LiveLoader"
    if isinstance(given, Indexed):
        _check_places(given, kind, straight.batches)
        return "Indexed"
    return "Seekable" if is_seekable(given) or not is_stateful(given) else "Stateful"


@dataclass(slots=True)
class _Read:
    """What a feed gave."""

    record: Record
    epochs: list[int]
    "Of each batch: the epoch in which the run is after it."
    state: State
    "Of the feed and of the generators, after the last batch."
    batches: int
    "In the first epoch."


def _pass(
    make: Callable[[], Any],
    task: nn.Module | None,
    stop: int | None = None,
    begun: int = 0,
    state: State = None,
    epoch: int = 0,
) -> _Read:
    """Read up to the batch `stop` as a fit does, or go on from a state that was taken after `begun` batches."""
    with restored_generators():
        seed_generators(SEED)
        loader = adopt(make(), "train")
        set_seed = getattr(loader, "set_default_seed", None)
        if set_seed is not None:
            set_seed(SEED)
        if is_live(loader):
            if task is None:
                raise DataError(
                    f"check_loader: {type(loader).__name__} collects with a task: check_loader(make, task)."
                )
            loader.attach(task)
        feed = Feed(loader)
        if state is not None:
            position, generators = state
            feed.load_state_dict(position)
            generators.restore(CPU)
        return _read(feed, stop, begun, epoch)


def _read(feed: Feed, stop: int | None, begun: int, epoch: int) -> _Read:
    found = _Read(Record(), [], None, 0)
    for number in range(epoch, EPOCHS):
        for window, last in feed.epoch(number, lambda: 1):
            feed.samples += batch_size(window[0]) or 1
            found.epochs.append(number + last)
            found.record.mark("", window[0], update=begun + len(found.epochs))
            if number == 0:
                found.batches += 1
            if len(found.epochs) == stop:
                found.state = feed.state_dict(), RNGState.capture(CPU)
                return found
    return found


def _check_places(loader: Indexed, kind: str, batches: int) -> None:
    """Check what an indexed loader says of its samples: how many, which, and what they are."""
    samples = loader.position(0, batches)
    indices = loader.sample_indices(0, 0, samples)
    assert len(indices) == samples, (
        f"{kind}.position counts {samples} samples in {batches} batches, and sample_indices names {len(indices)}. Both "
        "count samples before any transform."
    )
    asked = [0, samples - 1, 0]
    with restored_generators():
        seed_generators(SEED)
        peeked = [digest(batch) for batch in loader.peek(asked)]
    assert len(peeked) == len(asked), (
        f"{kind}.peek gave {len(peeked)} batches for {len(asked)} places. Give one for each."
    )
