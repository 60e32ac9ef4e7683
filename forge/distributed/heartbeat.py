"""Heartbeat: looks after one of several ranks, so that none waits for another that will not come.

Each rank gives a sign of life every second and looks at its neighbours'. Whoever finds a failure names it in the store,
where only one can be first; that rank prints it, and all others leave with its exit code. No collective takes part.

- A rank that raises names its error before anything else is done about it (`judge`).
- A rank that was killed, or left without a word, is found by those on its machine, or by the rank before it.
- A rank without progress for `watchdog` seconds makes all ranks show their stacks; one prints the stall_report.

Where the main thread does not come back, from a collective that will never end, its process is ended from here.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError, Store

from forge.distributed import stall_report
from forge.distributed.clock import StallClock
from forge.distributed.exit_codes import exit_code
from forge.distributed.stderr import flush, is_echo, print_only_once, write
from forge.distributed.store_channel import Beat, FailureCause, StoreChannel, is_alive, machine
from forge.errors import ForgeError, Interrupted, PeerFailed

if TYPE_CHECKING:
    from forge.contract.run import Run


EVERY = 1.0
"""Seconds between two looks."""
SILENCE = 8.0
"""Seconds without a sign of life after which a rank on another machine is taken for dead."""
GRACE = 4.0
"""Seconds that the main thread has to leave by itself, once it is known that the run has failed."""
BEFORE_FIRST = 600.0
"""The least number of seconds that the first update may take: compilers, caches and file systems warm up."""
PATIENCE = 3600.0
"""The least number of seconds that a save or an export may take."""
STORE_GONE = (
    "the store of this run no longer answers: who kept it, rank 0 or the program that started the ranks, is gone or "
    "out of reach."
)


class Heartbeat:
    """`Heartbeat(store, rank, world, trainer, watchdog).start()`, and `stop()` at the end of the run."""

    def __init__(self, store: Store, rank: int, world: int, trainer: Run | None = None, watchdog: float = 120.0):
        self.rank, self.world, self.watchdog = rank, world, watchdog
        self.agreed = False
        "Whether all ranks leave together, after a signal: no failure, although an exception ends the run."
        self._trainer = trainer
        self._channel = StoreChannel(store, rank)
        self._host, self._machine, self._pid = socket.gethostname(), machine(), os.getpid()
        self._number = 0
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._ended = threading.Event()
        self._leaving = threading.Event()
        "Set once the main thread is on its way out by itself."
        self._failed = False
        self._told_of_store = threading.Event()
        self._code: int | None = None
        "What this process ends with, once this rank or another has failed."
        self._patient = 0
        self._clock = StallClock()
        self._ticks = 0
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "forge-heartbeat"), (self._mind_the_store, "forge-heartbeat-store"))
        ]

    def start(self) -> Heartbeat:
        atexit.register(self._end_at_once)  # now, so that what others register later comes before it
        self._say_alive()
        for thread in self._threads:
            thread.start()
        return self

    def stop(self, left: bool = False) -> None:
        """End the watch; `left` tells the others that this rank has ended in good order."""
        self._ended.set()
        self._threads[0].join(2 * EVERY)
        if self._code is None:
            atexit.unregister(self._end_at_once)
        if left and not self._threads[0].is_alive():
            with suppress(DistError):
                self._say_alive(left=True)

    @contextmanager
    def no_timeout(self) -> Iterator[None]:
        """What takes long in here is no stall."""
        self._patient += 1
        try:
            yield
        finally:
            self._clock.restart()
            self._patient -= 1

    # -- an error on this rank ----------------------------------------------------------------------------------------

    def judge(self, error: BaseException) -> BaseException:
        """What this rank leaves with: its error, printed here, where it came first; else the echo of another's."""
        if getattr(error, "agreed", False):
            self.agreed = True
            return error
        self._leaving.set()
        self._clock.restart()
        own = self._cause_of(error)
        try:
            cause = (self._awaited_cause() if is_echo(error) else None) or self._channel.claim(own)
        except DistError:
            self._say_that_the_store_is_gone()
            cause = FailureCause("gone", 0, "", self.rank, STORE_GONE) if is_echo(error) else own
        self._code = cause.code
        if cause == own:
            self._tell(error, own)
            with suppress(DistError):
                self._channel.told(done=True)
            return SystemExit(own.code) if isinstance(error, SystemExit) and error.code != own.code else error
        return self._echo(cause)

    def _awaited_cause(self) -> FailureCause | None:
        """Somebody else's cause, which may take a moment to be named; else whoever is silent for that long."""
        end = time.monotonic() + GRACE
        self._look(range(self.world))
        while time.monotonic() < end:
            cause = self._channel.cause()
            if cause is not None:
                return cause
            time.sleep(0.1)
        silent = [rank for rank, (_, at) in self._look(range(self.world)) if time.monotonic() - at >= GRACE]
        return self._claim_gone(silent[0]) if silent else None

    def _cause_of(self, error: BaseException) -> FailureCause:
        code = 2 if isinstance(error, ForgeError) else 1
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code or 1
        elif isinstance(error, KeyboardInterrupt):
            code = 130
        first = str(error).strip().partition("\n")[0]
        summary = f"{type(error).__name__}: {first}" if first else type(error).__name__
        return FailureCause("raised", self.rank, self._host, self.rank, summary, code)

    def _tell(self, error: BaseException, cause: FailureCause) -> None:
        """Print the first cause: now, before another rank can say a word."""
        where = getattr(error, "__forge_where__", "") or self._moment()
        head = f"rank {self.rank} of {self.world} on {self._host} failed first, in {where}:"
        if isinstance(error, Interrupted):
            text = str(error)
        elif isinstance(error, ForgeError):
            text = "\n".join([head, f"error: {error}", *getattr(error, "__notes__", ())])
        elif cause.code > 128:
            text = f"rank {self.rank} of {self.world} on {self._host}: interrupted in {where}, which ends all ranks."
        elif isinstance(error, SystemExit):
            text = f"{head}\n{''.join(traceback.format_exception(error))}It left while the other ranks go on."
        else:
            text = f"{head}\n{''.join(traceback.format_exception(error))}"
        write(text)
        error.__forge_told__ = True  # pyright: ignore[reportAttributeAccessIssue]
        print_only_once()

    def _moment(self) -> str:
        trainer = self._trainer
        return f"update {trainer.progress.update}" if trainer is not None else "its run"

    def _echo(self, cause: FailureCause) -> PeerFailed:
        """Leave because of another rank; rank 0 says so in a line, where it has not printed the cause itself."""
        if self.rank == 0 != cause.by:
            self._wait_until_told()
            write(f"rank 0: ended, because rank {cause.rank} on {cause.host} failed first: {cause.summary}")
        return PeerFailed(cause.rank, cause.summary, cause.code)

    def _wait_until_told(self) -> None:
        end = time.monotonic() + GRACE / 2
        with suppress(DistError):
            while not self._channel.told() and time.monotonic() < end:
                time.sleep(0.05)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended.is_set() and self._tick():
                self._ticks += 1
                self._ended.wait(EVERY)
        except DistError:
            if not self._ended.is_set():
                self._store_is_gone()

    def _tick(self) -> bool:
        """One look around; False once the run is known to have failed."""
        self._say_alive()
        cause = self._channel.cause() or self._found_gone()
        if cause is None and self._is_stalled():
            limit = f"{self._limit():g}"
            cause = self._channel.claim(
                FailureCause(
                    "stalled", self.rank, self._host, self.rank, f"no progress for {limit} s at {self._moment()}"
                )
            )
        if cause is None:
            return True
        self._follow(cause)
        return False

    def _say_alive(self, left: bool = False) -> None:
        self._number += 1
        update = self._trainer.progress.update if self._trainer is not None else 0
        mates = [rank for rank, (beat, _) in self._seen.items() if self._lives_here(beat)]
        self._channel.beat(
            Beat(
                self.rank, self._number, self._host, self._machine, self._pid, update, stall_report.place(), left, mates
            )
        )

    def _follow(self, cause: FailureCause) -> None:
        """The run has failed: give the main thread a moment, then end the process."""
        self._failed = True
        if cause.kind == "stalled":
            self._report_stall(cause)
            self._leave(cause)
        if cause.by == self.rank and cause.kind == "gone":
            self._channel.told(done=True)
        self._leaving.wait(GRACE)
        if self._leaving.is_set():
            self._see_out()
        else:
            self._echo(cause)
        if not self._ended.is_set():
            self._leave(cause)

    def _see_out(self) -> None:
        """Let the main thread end the run: not longer than a stall may take, and not long once a rank is gone, since
        nothing that takes all of them can be finished any more."""
        end = time.monotonic() + self.watchdog
        with suppress(DistError):
            while not self._ended.wait(EVERY / 2) and time.monotonic() < end:
                self._say_alive()
                if self._gone() is not None:
                    end = min(end, time.monotonic() + GRACE)

    def _leave(self, cause: FailureCause) -> None:
        """End the process from this thread: the main one is in a call that will never return."""
        thread = threading.Thread(target=flush, daemon=True)  # what the main thread has locked must not keep us
        thread.start()
        thread.join(1.0)
        os._exit(exit_code(cause.code, cause.summary))

    def _end_at_once(self) -> None:
        """After a failure, in place of the interpreter's own end, in which groups wait for ranks that are gone."""
        if self._code is not None and os.getpid() == self._pid:
            for child in multiprocessing.active_children():
                child.kill()
            logging.shutdown()
            flush()
            os._exit(exit_code(self._code))

    # -- who is gone --------------------------------------------------------------------------------------------------

    def _found_gone(self) -> FailureCause | None:
        rank = self._gone()
        return self._claim_gone(rank) if rank is not None else None

    def _gone(self) -> int | None:
        """Look at those on this machine and at the next rank: each is looked at by somebody."""
        mates = [rank for rank, (beat, _) in self._seen.items() if beat.machine == self._machine]
        for rank, (beat, at) in self._look({*mates, (self.rank + 1) % self.world}):
            if beat.left:
                continue
            here = beat.machine == self._machine
            silent = time.monotonic() - at > SILENCE
            if (here and not is_alive(beat.pid)) or (not here and silent and not self._is_vouched_for(rank)):
                return rank
        return None

    def _look(self, ranks: Any) -> list[tuple[int, tuple[Beat, float]]]:
        """The latest beats of these ranks, with the moment at which each was first seen, by our own clock."""
        now = time.monotonic()
        for beat in self._channel.beats(set(ranks) - {self.rank}):
            known = self._seen.get(beat.rank)
            if known is None or known[0].number != beat.number:
                self._seen[beat.rank] = (beat, now)
        return [(rank, self._seen[rank]) for rank in sorted(ranks) if rank in self._seen]

    def _lives_here(self, beat: Beat) -> bool:
        return beat.machine == self._machine and is_alive(beat.pid)

    def _is_vouched_for(self, rank: int) -> bool:
        """Whether another rank of its machine still sees its process: then it is only busy, and a stall at most."""
        place = self._seen[rank][0].machine
        now = time.monotonic()
        mates = [entry for other, entry in self._look(range(self.world)) if other != rank and entry[0].machine == place]
        return any(rank in beat.sees and now - at < SILENCE for beat, at in mates)

    def _claim_gone(self, rank: int) -> FailureCause:
        beat, _ = self._seen[rank]
        how = "its process has ended" if beat.machine == self._machine else "it gives no sign of life"
        if beat.left:
            summary = f"it ended its run at update {beat.update}, while rank {self.rank} goes on at {self._moment()}"
        else:
            summary = f"gone (killed?): {how}; it was last seen at update {beat.update}, in {beat.where}"
        cause = self._channel.claim(FailureCause("gone", rank, beat.host, self.rank, summary))
        if cause.by == self.rank and cause.kind == "gone":
            write(f"rank {rank} of {self.world} on {beat.host} failed first: {summary}.")
        return cause

    # -- stalls -------------------------------------------------------------------------------------------------------

    def _is_stalled(self) -> bool:
        return self._clock.still_for(self._trainer) > self._limit()

    def _limit(self) -> float:
        if self._patient:
            return max(self.watchdog, PATIENCE)
        return self.watchdog if self._clock.begun else max(self.watchdog, BEFORE_FIRST)

    def _report_stall(self, cause: FailureCause) -> None:
        """Show where this rank is; the one that found the stall waits for all, and prints."""
        with suppress(DistError):
            self._channel.leave_dump(stall_report.dump({thread.ident for thread in self._threads}))
            if cause.by != self.rank:
                end = time.monotonic() + 3 * GRACE
                while not self._channel.told() and time.monotonic() < end:
                    time.sleep(0.1)
                return
            dumps: dict[int, stall_report.Dump | None] = dict.fromkeys(range(self.world))
            end = time.monotonic() + GRACE
            while None in dumps.values() and time.monotonic() < end:
                dumps = {rank: known or self._channel.dump_of(rank) for rank, known in dumps.items()}
                time.sleep(0.1)
            head = f"The run has stalled: rank {cause.rank} on {cause.host} saw {cause.summary}."
            write(stall_report.stall_report(dumps, head))
            self._channel.told(done=True)

    # -- the store ----------------------------------------------------------------------------------------------------

    def _mind_the_store(self) -> None:
        """A store whose host was cut off does not answer, and does not say so either."""
        waited, ticks = 0, self._ticks
        while not self._ended.wait(EVERY):
            waited, ticks = (waited + 1, ticks) if ticks == self._ticks else (0, self._ticks)
            if waited * EVERY > SILENCE and not self._failed:
                self._store_is_gone()

    def _store_is_gone(self) -> None:
        """Whoever kept the store is dead or out of reach: rank 0, or the process that started all."""
        self._failed = True
        self._say_that_the_store_is_gone()
        self._leaving.wait(GRACE)
        if self._leaving.is_set():
            self._ended.wait(GRACE)
        if not self._ended.is_set():
            self._leave(FailureCause("gone", 0, "", self.rank, STORE_GONE))

    def _say_that_the_store_is_gone(self) -> None:
        """Nobody can be first any more: the lowest rank that is left speaks, as far as this one knows."""
        below = [rank for rank, (beat, _) in self._seen.items() if 0 < rank < self.rank and not beat.left]
        if not below and not self._told_of_store.is_set():
            self._told_of_store.set()
            write(f"rank {self.rank} on {self._host}: {STORE_GONE}")
