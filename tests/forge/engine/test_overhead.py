"""What forge adds to a bare loop, counted, so that it cannot rot. (Time is measured in benchmarks/overhead.py.)"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F

import forge
import forge_kernels
import forge_plugins
from tests.support.tasks import Classifier, make_batches

KERNEL = str(Path(forge.__file__).parent)
OURS = (KERNEL, str(Path(forge_plugins.__file__).parent), str(Path(forge_kernels.__file__).parent), "<forge dispatch")


class Plain(Classifier):
    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])


def calls_during(work: Callable[[], Any], inside: tuple[str, ...] = ("",)) -> int:
    """Python functions called while `work` runs, from files whose paths begin with one of `inside`."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(inside)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def calls_per_update(run: Callable[[int], Any], inside: tuple[str, ...] = ("",)) -> float:
    """The slope: what a run of any length pays once cancels out."""
    short, long = 50, 150  # both end on a log, so that a log is counted in its share
    run(100)  # what a process pays once: imports, and names that are looked up at a first update or a first log
    return (calls_during(lambda: run(long), inside) - calls_during(lambda: run(short), inside)) / (long - short)


def with_forge(updates: int) -> None:
    forge.Trainer(max_updates=updates, plugins=[], run_dir=False).fit(Plain(), make_batches(1) * 200)


def with_the_default_recipe(updates: int) -> None:
    forge.Trainer(max_updates=updates, run_dir=f"run-{updates}").fit(Plain(), make_batches(1) * 200)


def test_at_most_22_calls_of_forge_per_update_34_by_default() -> None:
    assert 10 < calls_per_update(with_forge, OURS) <= 22
    assert calls_per_update(with_the_default_recipe, OURS) <= 34


def with_spans_of_everything(updates: int) -> None:
    plugins = [forge_plugins.Spans(hooks=True, rates=True)]
    forge.Trainer(max_updates=updates, plugins=plugins, run_dir=False).fit(Plain(), make_batches(1) * 200)


def test_spans_of_all_hooks_with_all_rates_are_at_most_12_calls_more() -> None:
    assert calls_per_update(with_spans_of_everything, OURS) <= calls_per_update(with_forge, OURS) + 12


def test_no_update_after_the_first_makes_more_than_60_calls() -> None:
    """Nothing runs that nobody asked for, in early updates either."""
    total, seen = 0, []

    class Counting(Plain):
        def training_step(self, batch: Any) -> Any:
            seen.append(total)
            return super().training_step(batch)

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal total
        total += event == "call" and frame.f_code.co_filename.startswith(OURS)

    trainer = forge.Trainer(max_updates=20, plugins=[], run_dir=False)
    sys.setprofile(profile)
    try:
        trainer.fit(Counting(), make_batches(1) * 40)
    finally:
        sys.setprofile(None)
    each = [after - before for before, after in itertools.pairwise(seen)]
    assert len(each) == 19
    assert max(each) <= 60, each


def test_at_most_10_forge_frames_from_fit_to_training_step() -> None:
    depths: list[int] = []

    class Deep(Plain):
        def training_step(self, batch: Any) -> Any:
            frame, depth = sys._getframe(1), 0
            while frame is not None:
                inside_forge = (
                    frame.f_code.co_filename.startswith(KERNEL) or "forge dispatch" in frame.f_code.co_filename
                )
                depth += inside_forge
                frame = frame.f_back
            depths.append(depth)
            return super().training_step(batch)

    forge.Trainer(max_updates=2, plugins=[], run_dir=False).fit(Deep(), make_batches(2))
    assert len(depths) == 2
    assert 0 < max(depths) <= 10


def test_without_plugins_actions_are_cores_own_methods() -> None:
    trainer = forge.Trainer(max_updates=1, plugins=[], run_dir=False)
    trainer.fit(Plain(), make_batches(1))
    from forge.contract.stack import ACTIONS, EVENTS

    for name in ACTIONS:
        assert getattr(trainer.hooks, name) == getattr(trainer.core, name)
    for name in EVENTS:
        assert getattr(trainer.hooks, name) is None
