"""Fits in processes of their own, several at a time, each with a device; they end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge.util.signal_waits import NAMES

OUTPUT = "output.txt"
"""What a child prints, in its run folder."""
PARENT = "FORGE_PARENT"
"""The environment variable with the process that a child ends with."""


class Children:
    """Processes that are started, waited for, and asked to save and end."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[Any]] = set()
        self.stopped = False

    @contextmanager
    def start(
        self, words: Sequence[str], device: str | None, environment: Mapping[str, str] | None = None, **options: Any
    ) -> Iterator[subprocess.Popen[Any]]:
        """Run `python WORDS` while the block lasts, at its end wait for it; `device` is what it sees of CUDA."""
        seen = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        child = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {}), **seen, PARENT: str(os.getpid())},
            start_new_session=True,  # Ctrl-C in a terminal reaches the parent alone, which passes it on
            **options,
        )
        self._running.add(child)
        try:
            if self.stopped:  # the signal came while it was started
                child.send_signal(signal.SIGTERM)
            yield child
        finally:
            child.wait()
            self._running.discard(child)

    def stop(self, *_: Any) -> None:
        """Ask every child to save and end; called from another thread, or as a signal handler."""
        if not self.stopped:
            self.stopped = True
            for child in list(self._running):
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM)


def die_with_parent() -> None:
    """In a child: end this process when its parent is killed, on Linux."""
    parent = os.environ.pop(PARENT, None)  # not for processes that this one starts
    if parent is not None and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGKILL)


def cause_of_death(code: int, output: Path) -> str:
    """Describe a process that ended without a word, with the last line that it printed."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    try:
        lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last}" if last else how


def in_jobs(work: Callable[[str | None], None], jobs: int) -> None:
    """Call `work` with its device in `jobs` threads, or, of one, in this thread; wait for all."""
    devices = devices_for(jobs)
    if jobs == 1:
        work(devices[0])
        return
    threads = [threading.Thread(target=work, args=[device], daemon=True) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # signals are handled between two waits
            thread.join(0.2)


def devices_for(jobs: int) -> Sequence[str | None]:
    """Return a value of CUDA_VISIBLE_DEVICES for each job: one GPU each, in turn; None where there is nothing to share
    out."""
    if jobs == 1:
        return [None]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        import torch

        shown = ",".join(map(str, range(torch.cuda.device_count())))
    names = [name for name in shown.split(",") if name]
    return [names[job % len(names)] if len(names) > 1 else None for job in range(jobs)]


@contextmanager
def signals_to(stop: Callable[..., None]) -> Iterator[None]:
    """Call `stop` at the signals that end a run; outside of the main thread, and where they are ignored, do nothing."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in NAMES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
