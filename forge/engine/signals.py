"""Signals: SIGTERM, SIGINT and SIGUSR1 ask a fit to save and stop; a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from forge.contract.requests import SIGNAL, Request
from forge.errors import Interrupted
from forge.util import past_display
from forge.util.signal_waits import ECHO, NAMES

if TYPE_CHECKING:
    from forge.contract.run import Run


class Signals:
    """`with Signals(trainer): ...`: the first signal sets a flag that the loop sees at the end of its update.

    Handlers belong to the main thread; a fit in another thread leaves them alone. Earlier handlers are restored.
    """

    def __init__(self, trainer: Run):
        self._trainer = trainer
        self._before: dict[int, Any] = {}
        self._owner, self._agreed = os.getpid(), False
        self.received: signal.Signals | None = None
        self._at: float | None = None

    @property
    def interrupts(self) -> bool:
        """Whether a signal ends this fit; on several ranks only once all of them have agreed on it."""
        return self.received is not None and (self._agreed or self._trainer.env.world == 1)

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for name in NAMES:
                number = getattr(signal, name, None)  # Windows has no SIGUSR1
                # a process that ignores a signal (nohup, a shell's background job) goes on ignoring it
                if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        heard = self.received is not None and self._trainer.step is not None
        return heard and isinstance(error, SystemExit) and hasattr(sys, "ps1")  # a prompt or notebook outlives its fit

    def interruption(self, saved: bool) -> SystemExit:
        """What ends the fit, on all ranks: `Interrupted` (exit code 85) where it can be resumed, else what the shell
        expects."""
        assert self.received is not None
        trainer = self._trainer
        if not saved or trainer.run_dir is None:
            leaving = SystemExit(128 + self.received)
        else:
            leaving = Interrupted(
                f"{self.received.name}: the state after update {trainer.progress.update} is saved in "
                f'{trainer.run_dir}; continue with --resume, or Trainer(resume="auto").'
            )
        leaving.agreed = True  # pyright: ignore[reportAttributeAccessIssue]
        return leaving

    def heard(self, request: Request | None) -> None:
        """A stop was agreed on: where another rank got the signal, this one leaves in the same way."""
        if request is not None and request.asker == SIGNAL:
            self.received, self._agreed = self.received or signal.Signals[request.reason], True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked helper process: the main one decides
            return
        several = self._trainer.env.world > 1 if self._trainer.step is not None else False
        if self._at is not None and not (several and time.monotonic() - self._at < ECHO):
            self._leave(number, frame)
        self._at = self._at or time.monotonic()
        self.received = self.received or signal.Signals(number)
        if self._trainer.step is None:
            self._leave_early(number)
        update = self._trainer.progress.update
        self._trainer.requests.open.setdefault("stop", Request("stop", self.received.name, SIGNAL, update))
        if several:  # all of them got it, or the launcher sends it because one has failed: nothing to say yet
            return
        # no logging in a handler: it may have interrupted the logger
        past_display.write_line(f"{self.received.name}: stopping after this update; once more to stop at once.")

    def _leave_early(self, number: int) -> None:
        """No update has begun, so there is nothing to save; what was to be resumed still can be."""
        if self._trainer.resume:
            raise Interrupted(f"{signal.Signals(number).name} before the first update: the same command goes on.")
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        """At once: nothing is torn, because nothing under a final name is ever half written."""
        if number == signal.SIGINT and hasattr(sys, "ps1"):
            signal.default_int_handler(number, frame)
        past_display.leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
