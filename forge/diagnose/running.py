"""The runs of this process: one inside another leaves it its random numbers, and those of several threads are told."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from forge.contract.run import Run
from forge.errors import TaskError
from forge.rng import RNGState

logger = logging.getLogger("forge")


class _Running:
    numbers: tuple[RNGState, Any] | None = None
    "The generators before something inside this run seeded them, and where the run was then."

    def __init__(self, trainer: Run):
        self.trainer, self.verb = trainer, str(trainer.verb)
        self.thread, self.process = threading.current_thread(), os.getpid()


_runs: list[_Running] = []
"""Outermost first; those of a parent process too."""


def keep_numbers() -> _Running | None:
    """Remember the generators of the run that this thread is in, before a run inside it seeds them; return that run."""
    here = threading.current_thread(), os.getpid()
    outer = next((run for run in reversed(_runs) if (run.thread, run.process) == here), None)
    if outer is not None and hasattr(outer.trainer, "env"):  # before it has one, it has drawn nothing
        run = outer.trainer
        moment = run.progress.update, run.step and run.step.micro, run.evaluated
        if outer.numbers is None or outer.numbers[1] != moment:
            outer.numbers = RNGState.capture(run.env.device), moment
    return outer


@contextmanager
def running(trainer: Run) -> Iterator[None]:
    """Be a run of this thread; afterwards a run around it has its random numbers back."""
    own, outer = _Running(trainer), keep_numbers()
    others = [run for run in _runs if run.thread is not own.thread and run.process == own.process]
    if others and "fit" in (own.verb, *(run.verb for run in others)):
        logger.warning(
            f"This {own.verb} begins in {own.thread.name} while {others[0].verb} runs in {others[0].thread.name}: "
            "threads share the global generators of Python, numpy and torch and torch's settings, so neither run can "
            "be repeated. Run each in a process of its own."
        )
    trains = outer is not None and own.verb == "fit"  # perhaps inside an evaluation, which takes no gradients
    _runs.append(own)
    try:
        with torch.inference_mode(False) if trains else nullcontext(), torch.enable_grad() if trains else nullcontext():
            if trains and any(p.is_inference() for p in trainer.task.parameters()):
                raise TaskError(
                    f"{type(trainer.task).__name__} was made inside an evaluation, whose tensors cannot be trained. "
                    "Make it and its data before, or set `evaluation = 'no_grad'` on the outer task."
                )
            yield
    finally:
        _runs.remove(own)
        if outer is not None and outer.numbers is not None:
            outer.numbers[0].restore(outer.trainer.env.device)
            outer.numbers = None
