"""The runs of this process: one inside another leaves it its random numbers, and those of several threads are told."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from forge.errors import TaskError
from forge.rng import RNGState

if TYPE_CHECKING:
    from forge.contract.run import Run

logger = logging.getLogger("forge")


@dataclass(eq=False, slots=True)
class _Running:
    trainer: Run
    verb: str
    thread: threading.Thread = field(default_factory=threading.current_thread)
    process: int = field(default_factory=os.getpid)
    numbers: tuple[RNGState, object] | None = None
    "The generators as they were before something inside this run seeded them, and where the run was then."
    shared: bool = False
    "Whether a run of another thread has drawn from the same generators."


_runs: list[_Running] = []
"""Outermost first; a forked process does not have those of its parent."""


def keep_numbers() -> None:
    """Remember the generators of the run that this thread is in, before a run inside it seeds them."""
    outer = _innermost()
    if outer is None:
        return
    run, device = outer.trainer, _device(outer)
    moment = run.progress.update, run.step is not None and run.step.micro, run.evaluated
    if outer.numbers is None or outer.numbers[1] != moment:
        outer.numbers = RNGState.capture(device), moment


def shares_numbers(trainer: Run) -> bool:
    """Whether a run of another thread has drawn from the global generators during this one."""
    return any(run.shared for run in _runs if run.trainer is trainer)


@contextmanager
def running(trainer: Run, verb: str) -> Iterator[None]:
    """Be a run of this thread; afterwards a run around it has its random numbers back."""
    keep_numbers()
    own = _Running(trainer, verb)
    others = [run for run in _runs if run.thread is not own.thread and run.process == own.process]
    if others and "fit" in (verb, *(run.verb for run in others)):
        for run in (own, *others):
            run.shared = True
        logger.warning(
            f"This {verb} begins in {own.thread.name} while {others[0].verb} runs in {others[0].thread.name}: threads "
            "share the global generators of Python, numpy and torch and torch's settings, so neither run can be "
            "repeated. Run each in a process of its own (forge sweep does, multiprocessing can)."
        )
    inside = verb == "fit" and _innermost() is not None  # of an evaluation, perhaps
    _runs.append(own)
    try:
        with torch.inference_mode(False) if inside else nullcontext(), torch.enable_grad() if inside else nullcontext():
            if inside:
                _refuse_inference_tensors(trainer.task)
            yield
    finally:
        _runs.remove(own)
        outer = _innermost()
        if outer is not None and outer.numbers is not None:
            outer.numbers[0].restore(_device(outer))
            outer.numbers = None


def _refuse_inference_tensors(task: nn.Module) -> None:
    made = next((name for name, p in task.named_parameters() if p.is_inference()), None)
    if made is not None:
        raise TaskError(
            f"{type(task).__name__} was made inside an evaluation, whose inference mode makes tensors ({made}) that "
            "cannot be trained. Make the task and its data before, or set `evaluation = 'no_grad'` on the outer task."
        )


def _device(run: _Running) -> torch.device:
    return run.trainer.env.device if hasattr(run.trainer, "env") else torch.device("cpu")  # none before setup_env


def _innermost() -> _Running | None:
    here = threading.current_thread(), os.getpid()
    return next((run for run in reversed(_runs) if (run.thread, run.process) == here), None)
