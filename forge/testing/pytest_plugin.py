"""Fixtures for the tests of plugins; pytest finds them through an entry point wherever forge is installed.

`forge_run` trains a tiny task with some plugins, `tiny_task` makes one, `event_trace` records hook calls. Nothing
here loads torch before a test uses a fixture, so that other projects' tests start fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from forge.contract.plugin import Plugin
    from forge.testing import EventTrace, TinyGAN, TinyRun, TinyTask

RunTiny = Callable[..., "TinyRun"]


@pytest.fixture
def forge_run(tmp_path_factory: pytest.TempPathFactory) -> RunTiny:
    """Run a tiny fit in a temporary run folder: `forge_run([MyPlugin()], max_updates=4)`.

    Returns a `forge.testing.TinyRun`: `task`, `result`, `metrics` by update, `series(metric)`, `trace`, `run_dir`.
    Takes `task`, `train`, `val` and every option of the Trainer; `run_dir=run.run_dir, resume="auto"` continues a run.
    """
    from forge.testing.runs import run_tiny

    def run(plugins: Iterable[Plugin | type[Plugin] | str] = (), **options: Any) -> TinyRun:
        folder = options.pop("run_dir", None) or tmp_path_factory.mktemp("forge-run") / "run"
        return run_tiny(plugins, run_dir=folder, **options)

    return run


@pytest.fixture
def tiny_task() -> Callable[..., TinyTask | TinyGAN]:
    """`tiny_task()`: a classifier that trains in milliseconds; `tiny_task(optimizers=2)`: one with two optimizers.

    Further arguments are the task's own: `seed`, `lr`, and `dropout` of the classifier.
    """
    from forge.testing.tiny import TinyGAN, TinyTask

    def make(optimizers: int = 1, **options: Any) -> TinyTask | TinyGAN:
        if optimizers not in (1, 2):
            raise ValueError(f"tiny_task(optimizers={optimizers}): optimizers must be 1 or 2.")
        return TinyTask(**options) if optimizers == 1 else TinyGAN(**options)

    return make


@pytest.fixture
def event_trace() -> EventTrace:
    """Return a plugin that records every hook call; put it last: `forge_run([MyPlugin(), event_trace])`.

    Then `event_trace.hooks`, `.count(hook)`, `.updates(hook)`, `.assert_order(...)`.
    """
    from forge.testing.events import EventTrace

    return EventTrace()
