"""A limit of time for a trial: a compiler, or a step of a large model, may take longer than the whole budget."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN = 5.0
"""Seconds after which a trial that has swallowed the error gets it again."""


class TrialTooLong(Exception):
    """Raised inside a trial that takes longer than the budget permits."""

    WORDS = "takes more than half of the budget's time"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TrialTooLong in what runs longer. Without a free alarm, or outside of the main thread, nothing is limited.

    The error can come only between two steps of the interpreter: a long call into C++ ends first.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not hasattr(signal, "SIGALRM") or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return

    compiler = logging.getLogger("torch._dynamo.metrics_context")
    spoken = compiler.disabled

    def stop(number: int, frame: object) -> None:
        compiler.disabled = True  # it would print the whole traceback of a compilation that was cut short
        raise TrialTooLong(TrialTooLong.WORDS)

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        compiler.disabled = spoken
