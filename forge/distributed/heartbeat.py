"""Heartbeats between ranks: detect a failed, lost or stalled rank, so that no rank waits for it forever.

Each rank writes a beat to the store every second and reads its neighbours'. A rank that finds a failure claims it in
the store, where only the first claim counts; that rank prints it, and all others exit with its code. No collective is
involved.

- A rank that raises claims its error before anything else is done about it (`judge`).
- A rank that was killed or exited silently is found by ranks of the same machine, or by the rank before it.
- A rank without progress for `watchdog` seconds makes all ranks dump their stacks; one prints the report.
- So do two ranks that wait in different collectives of the same number, after `DIFFERENT` seconds: neither ends.

A main thread stuck in a collective that never ends is ended from here, with its process.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError, Store

from forge.distributed import flight_recorder, stall_report
from forge.distributed.stderr import flush, is_echo, print_only_once, write
from forge.distributed.store_channel import Beat, FailureCause, StoreChannel, is_alive, machine, process_state
from forge.distributed.worker_exit import exit_code
from forge.errors import ForgeError, Interrupted, PeerFailed
from forge.runs.stall_clock import StallClock
from forge.util import stacks
from forge.util.text import short_path

if TYPE_CHECKING:
    from forge.contract.run import Run


EVERY = 1.0
"""Seconds between two beats."""
SILENCE = 8.0
"""Seconds without a beat after which a rank on another machine counts as dead."""
GRACE = 4.0
"""Seconds for the main thread to exit by itself once the run has failed."""
POLL = 0.05
"""Seconds between two looks for a printed cause."""
FIRST_UPDATE_LIMIT = 600.0
"""Seconds allowed for the first update, at least: compilers, caches and file systems warm up."""
DIFFERENT = 10.0
"""Seconds without progress after which ranks compare the collectives that they wait in."""
SAVE_LIMIT = 3600.0
"""Seconds allowed for a save or an export, at least."""
STATES = {
    "T": "is stopped (SIGSTOP, SIGTSTP or a job that was suspended)",
    "t": "is held by a debugger",
    "D": "waits in the kernel, as for a file system that does not answer",
}
"""What Linux says of a process that does not run, by its letter."""
STORE_GONE = (
    "the store of this run no longer answers: its host process (rank 0, or the launcher) is gone or out of reach."
)


class Heartbeat:
    """The heartbeat of one rank: `start()` when the rank has joined, `stop()` at the end of the run."""

    def __init__(self, store: Store, rank: int, world: int, trainer: Run | None = None, watchdog: float = 120.0):
        self.rank, self.world, self.watchdog = rank, world, watchdog
        self.agreed = False
        "Whether all ranks exit together, after a signal: no failure, although an exception ends the run."
        self._trainer = trainer
        self._channel = StoreChannel(store, rank)
        self._host, self._machine, self._pid = socket.gethostname(), machine(), os.getpid()
        self._number = 0
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._ended = threading.Event()
        self._leaving = threading.Event()
        "Set once the main thread is exiting by itself."
        self._failed = False
        self._reported_store = threading.Event()
        self._code: int | None = None
        "The exit code of this process, once any rank has failed."
        self._untimed = 0
        self._clock = StallClock()
        self._waits: dict[str, tuple[int, str]] = {}
        self._ticks = 0
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "forge-heartbeat"), (self._watch_store, "forge-heartbeat-store"))
        ]

    def start(self) -> Heartbeat:
        atexit.register(self._end_at_once)  # now, so that handlers registered later run before it
        self._beat()
        for thread in self._threads:
            thread.start()
        return self

    def stop(self, left: bool = False) -> None:
        """Stop beating; `left` marks this rank as finished in good order."""
        self._ended.set()
        self._threads[0].join(2 * EVERY)
        if self._code is None:
            atexit.unregister(self._end_at_once)
        if left and not self._threads[0].is_alive():
            with suppress(DistError):
                self._beat(left=True)

    @contextmanager
    def no_timeout(self) -> Iterator[None]:
        """Do not count a long duration inside as a stall."""
        self._untimed += 1
        try:
            yield
        finally:
            self._clock.restart()
            self._untimed -= 1

    # -- an error on this rank ----------------------------------------------------------------------------------------

    def judge(self, error: BaseException) -> BaseException:
        """Return the exception to exit with: this rank's error, printed, if it was the first; else a `PeerFailed`."""
        if getattr(error, "agreed", False):
            self.agreed = True
            return error
        self._leaving.set()
        self._clock.restart()
        own = self._cause_of(error)
        try:
            cause = (self._awaited_cause() if is_echo(error) else None) or self._channel.claim(own)
        except DistError:
            self._report_lost_store()
            cause = FailureCause("gone", 0, "", self.rank, STORE_GONE) if is_echo(error) else own
        self._code = cause.code
        if cause == own:
            self._print_error(error, own)
            with suppress(DistError):
                self._channel.printed(done=True)
            return SystemExit(own.code) if isinstance(error, SystemExit) and error.code != own.code else error
        return self._echo(cause)

    def _awaited_cause(self) -> FailureCause | None:
        """Wait for another rank's cause for `GRACE` seconds; else claim the loss of a rank silent for that long."""
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

    def _print_error(self, error: BaseException, cause: FailureCause) -> None:
        """Print the first cause at once, before another rank prints anything."""
        where = getattr(error, "__forge_where__", "") or self._moment()
        head = f"rank {self.rank} of {self.world} on {self._host} failed first, in {where}:"
        if isinstance(error, Interrupted):
            text = str(error)
        elif isinstance(error, ForgeError):
            text = "\n".join([head, f"error: {error}", *getattr(error, "__notes__", ())])
        elif cause.code > 128:
            text = f"rank {self.rank} of {self.world} on {self._host}: interrupted in {where}, which ends all ranks."
        elif isinstance(error, SystemExit):
            text = f"{head}\n{''.join(traceback.format_exception(error))}It exited while the other ranks go on."
        else:
            text = f"{head}\n{''.join(traceback.format_exception(error))}"
        write(text)
        error.__forge_printed__ = True  # pyright: ignore[reportAttributeAccessIssue]
        print_only_once()

    def _moment(self) -> str:
        trainer = self._trainer
        return f"update {trainer.progress.update}" if trainer is not None else "its run"

    def _echo(self, cause: FailureCause) -> PeerFailed:
        """Return the error for another rank's failure; rank 0 prints one line about it unless it printed the cause."""
        if self.rank == 0 != cause.by:
            self._wait_until_printed(GRACE / 2)
            write(f"rank 0: ended, because rank {cause.rank} on {cause.host} failed first: {cause.summary}")
        return PeerFailed(cause.rank, cause.summary, cause.code)

    def _wait_until_printed(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with suppress(DistError):
            while not self._channel.printed() and time.monotonic() < end:
                time.sleep(POLL)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended.is_set() and self._tick():
                self._ticks += 1
                self._ended.wait(EVERY)
        except DistError:
            if not self._ended.is_set():
                self._leave_without_store()

    def _tick(self) -> bool:
        """Beat once and look for failures; return False once the run has failed."""
        self._beat()
        cause = self._channel.cause()
        if cause is None and (gone := self._gone()) is not None:
            cause = self._claim_gone(gone)
        if cause is None and (summary := self._stall()) is not None:
            cause = self._channel.claim(FailureCause("stalled", self.rank, self._host, self.rank, summary))
        if cause is None:
            return True
        self._follow(cause)
        return False

    def _beat(self, left: bool = False) -> None:
        self._number += 1
        update = self._trainer.progress.update if self._trainer is not None else 0
        neighbours = [rank for rank, (beat, _) in self._seen.items() if self._runs_here(beat)]
        process = (self.rank, self._number, self._host, self._machine, self._pid)
        still = self._trainer is not None and self._clock.still_for(self._trainer) > DIFFERENT
        self._waits = flight_recorder.waits(flight_recorder.entries()) if still else {}
        self._channel.beat(Beat(*process, update, stacks.place(), left, neighbours, self._waits))

    def _follow(self, cause: FailureCause) -> None:
        """After a failure, give the main thread a moment, then end the process."""
        self._failed = True
        if cause.kind == "stalled":
            self._report_stall(cause)
            self._leave(cause)
        if cause.by == self.rank and cause.kind == "gone":
            self._channel.printed(done=True)
        self._leaving.wait(GRACE)
        if self._leaving.is_set():
            self._see_out()
        else:
            self._echo(cause)
        if not self._ended.is_set():
            self._leave(cause)

    def _see_out(self) -> None:
        """Let the main thread end the run, for `watchdog` seconds at most, or `GRACE` once a rank is gone: nothing that
        needs all ranks can finish then."""
        end = time.monotonic() + self.watchdog
        with suppress(DistError):
            while not self._ended.wait(EVERY / 2) and time.monotonic() < end:
                self._beat()
                if self._gone() is not None:
                    end = min(end, time.monotonic() + GRACE)

    def _leave(self, cause: FailureCause) -> None:
        """End the process from this thread: the main thread is in a call that never returns."""
        thread = threading.Thread(target=flush, daemon=True)  # a lock held by the main thread must not block this one
        thread.start()
        thread.join(1.0)
        os._exit(exit_code(cause.code, cause.summary))

    def _end_at_once(self) -> None:
        """After a failure, replace the interpreter's shutdown, in which process groups wait for lost ranks."""
        if self._code is not None and os.getpid() == self._pid:
            for child in multiprocessing.active_children():
                child.kill()
            logging.shutdown()
            flush()
            os._exit(exit_code(self._code))

    # -- lost ranks ---------------------------------------------------------------------------------------------------

    def _gone(self) -> int | None:
        """Return a lost rank of those on this machine and the next rank; so every rank is watched by another."""
        neighbours = [rank for rank, (beat, _) in self._seen.items() if beat.machine == self._machine]
        for rank, (beat, at) in self._look({*neighbours, (self.rank + 1) % self.world}):
            if beat.left:
                continue
            here = beat.machine == self._machine
            silent = time.monotonic() - at > SILENCE
            if (here and not is_alive(beat.pid)) or (not here and silent and not self._is_vouched_for(rank)):
                return rank
        return None

    def _look(self, ranks: Any) -> list[tuple[int, tuple[Beat, float]]]:
        """Return the latest beats of these ranks, each with the time it was first seen, by this rank's clock."""
        now = time.monotonic()
        for beat in self._channel.beats(set(ranks) - {self.rank}):
            known = self._seen.get(beat.rank)
            if known is None or known[0].number != beat.number:
                self._seen[beat.rank] = (beat, now)
        return [(rank, self._seen[rank]) for rank in sorted(ranks) if rank in self._seen]

    def _runs_here(self, beat: Beat) -> bool:
        return beat.machine == self._machine and is_alive(beat.pid)

    def _is_vouched_for(self, rank: int) -> bool:
        """Whether another rank of its machine still sees its process: then it is busy, or stalled at most."""
        place, now = self._seen[rank][0].machine, time.monotonic()
        return any(
            beat.machine == place and rank in beat.sees and now - at < SILENCE
            for other, (beat, at) in self._look(range(self.world))
            if other != rank
        )

    def _claim_gone(self, rank: int) -> FailureCause:
        beat, _ = self._seen[rank]
        how = "its process has ended" if beat.machine == self._machine else "it sends no heartbeat"
        if beat.left:
            summary = f"it ended its run at update {beat.update}, while rank {self.rank} goes on at {self._moment()}"
        else:
            mine = f", while rank {self.rank} was at {self._moment()}" if self._trainer is not None else ""
            summary = f"gone (killed?): {how}{mine}; its last heartbeat came from update {beat.update}, in {beat.where}"
        cause = self._channel.claim(FailureCause("gone", rank, beat.host, self.rank, summary))
        if cause.by == self.rank and cause.kind == "gone":
            write(f"rank {rank} of {self.world} on {beat.host} failed first: {summary}.")
        return cause

    # -- stalls -------------------------------------------------------------------------------------------------------

    def _stall(self) -> str | None:
        """Return why this run goes no further, or None while it may."""
        if self._clock.still_for(self._trainer) > self._limit():
            return f"no progress for {self._limit():g} s at {self._moment()}"
        for rank, (beat, _) in sorted(self._seen.items()):
            for group, (number, own) in self._waits.items():
                theirs = beat.waits.get(group)
                if theirs is not None and theirs[0] == number and theirs[1] != own:
                    return f"rank {rank} wait in {theirs[1]} while it waits in {own} itself, at {self._moment()}"
        return None

    def _limit(self) -> float:
        if self._untimed:
            return max(self.watchdog, SAVE_LIMIT)
        return self.watchdog if self._clock.begun else max(self.watchdog, FIRST_UPDATE_LIMIT)

    def _report_stall(self, cause: FailureCause) -> None:
        """Write this rank's stacks to the store; the rank that found the stall waits for all of them and prints."""
        with suppress(DistError):
            dump = stall_report.dump({thread.ident for thread in self._threads})
            folder = self._save(dump)
            self._channel.leave_dump(dump)
            if cause.by != self.rank:
                self._wait_until_printed(3 * GRACE)
                return
            dumps: dict[int, stall_report.Dump | None] = dict.fromkeys(range(self.world))
            end = time.monotonic() + GRACE
            while None in dumps.values() and time.monotonic() < end:
                dumps = {rank: known or self._channel.dump_of(rank) for rank, known in dumps.items()}
                time.sleep(0.1)
            head = f"The run has stalled: rank {cause.rank} on {cause.host} saw {cause.summary}."
            self._look(range(self.world))
            silent = {rank: self._silence(rank) for rank, each in dumps.items() if each is None}
            report = stall_report.stall_report(dumps, head, silent)
            if folder is not None:
                report = f"{report}\n\nThis report, and the latest collectives of each rank: {short_path(folder)}"
                with suppress(OSError):
                    (folder / "report.txt").write_text(f"{report}\n")
            write(report)
            self._channel.printed(done=True)
            time.sleep(4 * POLL)  # the store may end with this process: let the others read that

    def _silence(self, rank: int) -> str:
        """Return what is known of a rank that does not answer."""
        if rank not in self._seen:
            return "it has sent no heartbeat."
        beat, at = self._seen[rank]
        state = process_state(beat.pid) if beat.machine == self._machine else ""
        how = STATES.get(state, "does not come to its heartbeat")
        cure = f" `kill -CONT {beat.pid}` lets it go on." if state == "T" else ""
        last = f"its last heartbeat came {time.monotonic() - at:.0f} s ago from update {beat.update}, in {beat.where}"
        return f"its process {beat.pid} on {beat.host} {how}; {last}.{cure}"

    def _save(self, dump: stall_report.Dump) -> Path | None:
        """Write this rank's record to RUN/stall; return the folder, or None without one. A file system may be what the
        run waits for, so this takes `GRACE / 2` seconds at most."""
        run_dir = self._trainer.run_dir if self._trainer is not None else None
        if run_dir is None:
            return None
        folder = run_dir / "stall"
        saved = threading.Event()

        def save() -> None:
            with suppress(OSError):
                flight_recorder.save(folder, self.rank, dump)
                saved.set()

        thread = threading.Thread(target=save, daemon=True)
        thread.start()
        thread.join(GRACE / 2)
        return folder if saved.is_set() else None

    # -- the store ----------------------------------------------------------------------------------------------------

    def _watch_store(self) -> None:
        """Notice a store that does not answer: one whose host was cut off raises nothing."""
        waited, ticks = 0, self._ticks
        while not self._ended.wait(EVERY):
            waited, ticks = (waited + 1, ticks) if ticks == self._ticks else (0, self._ticks)
            if waited * EVERY > SILENCE and not self._failed:
                self._leave_without_store()

    def _leave_without_store(self) -> None:
        self._failed = True
        self._report_lost_store()
        self._leaving.wait(GRACE)
        if self._leaving.is_set():
            self._ended.wait(GRACE)
        if not self._ended.is_set():
            self._leave(FailureCause("gone", 0, "", self.rank, STORE_GONE))

    def _report_lost_store(self) -> None:
        """Print that the store is gone, on the lowest remaining rank that this one knows: no claim is possible."""
        below = [rank for rank, (beat, _) in self._seen.items() if 0 < rank < self.rank and not beat.left]
        if not below and not self._reported_store.is_set():
            self._reported_store.set()
            first = self._seen.get(0)
            stopped = first is not None and self._runs_here(first[0]) and process_state(first[0].pid) in STATES
            about = f"rank 0 does not answer: {self._silence(0)}\n" if stopped else ""
            write(f"{about}rank {self.rank} on {self._host}: {STORE_GONE}")
