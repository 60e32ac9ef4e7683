"""Worker processes: torch's DataLoader, with handling of signals, dead workers and hanging ones.

Workers ignore SIGINT, SIGTERM and SIGUSR1 (a scheduler sends them to the whole group; the main process decides), exit
when the main process is gone, and never keep it from exiting. A worker that dies or hangs becomes a `DataError` that
names it, raised only where the next batch is read.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from forge.data.sample_seeding import Failure, what
from forge.errors import DataError
from forge.torch_internals import check_worker_pids, forget_worker_pids, watch_worker_pids
from forge.util.fork_garbage import collections_paused, leave_inherited

DATA_TIMEOUT = 600.0
"""Seconds without a batch from any worker after which one counts as hanging."""

_LOOK_EVERY = 5.0
_LOST = (RuntimeError, OSError, EOFError)
"""Raised by torch for a lost worker, or for the shared tensors that were lost with it."""
_LEFT_TO_MAIN = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
_HELD_AT_START = [*_LEFT_TO_MAIN, *([signal.SIGCHLD] if hasattr(signal, "SIGCHLD") else [])]
MAIN_GUARD = (
    "A worker started by spawn or forkserver imports the script again: if it has no "
    "`if __name__ == '__main__':`, put what it does under one."
)
_CAUSES = (
    "Usual causes: SIGKILL: out of memory (see the log of the kernel or the scheduler; use fewer workers, a smaller "
    "prefetch_factor or smaller batches); SIGBUS: out of shared memory (enlarge /dev/shm); SIGSEGV and SIGABRT: native "
    "code in the dataset (run it with num_workers=0 to see where)."
)
_SHOW_STACK = getattr(signal, "SIGUSR2", None) if hasattr(faulthandler, "register") else None


class Pool:
    """A DataLoader over draws: `pool.run(draws)` yields one batch for each, in order.

    `dataset.__getitems__(draw)` makes a whole batch. Seed and epoch travel with the draw, so persistent workers serve
    every epoch.
    """

    def __init__(self, dataset: Dataset[Any], name: str, num_workers: int, data_timeout: float, **options: Any):
        if data_timeout <= 0:
            raise DataError(f"data_timeout={data_timeout}: it must be a number of seconds above 0.")
        self.name, self.num_workers, self.data_timeout = name, num_workers, data_timeout
        self._feed = _Draws()
        # a private generator: iter(DataLoader) would draw its workers' base seed from the global RNG
        self._generator = torch.Generator()
        self._pass = 0
        self._end: weakref.finalize[..., Any] | None = None
        if num_workers:
            options.setdefault("persistent_workers", True)
            self._stacks, writer = multiprocessing.Pipe(duplex=False)
            os.set_blocking(self._stacks.fileno(), False)
            os.set_blocking(writer.fileno(), False)
            options["worker_init_fn"] = WorkerStart(options.get("worker_init_fn"), writer)
            options["timeout"] = data_timeout
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._feed,  # pyright: ignore[reportArgumentType]
            num_workers=num_workers,
            collate_fn=unchanged,
            generator=self._generator,
            **options,
        )

    def run(self, draws: Iterator[Any], seed: int) -> Iterator[Any]:
        """Yield the batches of these draws. With persistent workers a new run ends the one before it."""
        self._feed.draws = draws
        self._generator.manual_seed(seed % 2**63)
        if not self.num_workers:
            return iter(self.loader)
        self._pass += 1
        return self._watched(self._start(), self._pass)

    def _start(self) -> Any:
        """Begin a pass. A new worker has signals blocked until it ignores them."""
        running = getattr(self.loader, "_iterator", None)
        try:
            with _blocked(_HELD_AT_START), collections_paused() if running is None else nullcontext():
                if running is not None:
                    running._timeout = self.data_timeout  # batches prefetched for the last pass are finished first
                    _report_deaths(running, True)
                batches: Any = iter(self.loader)
                _report_deaths(batches, False)  # a death is reported when its batch is read
        except _LOST as error:
            if running is not None:
                self._explain(running, error)
            if str(error).startswith("DataLoader worker"):  # another thread received the signal that is blocked here
                raise DataError(
                    f"A worker of the loader over {self.name} died as it began. {error} {_CAUSES}"
                ) from error
            raise
        batches._timeout = min(self.data_timeout, _LOOK_EVERY)
        if batches is running:
            return batches
        batches._workers_done_event = _Done(batches._workers_done_event, batches._workers)
        if self.loader.persistent_workers:
            # torch ends workers in __del__: too late for a loader in a cycle, whose queues are freed first
            self._end = weakref.finalize(self, batches._shutdown_workers)
            self._end.atexit = False
        for worker in batches._workers:
            # they ignore SIGTERM, which torch and multiprocessing send to stuck workers
            worker.terminate, worker._popen.terminate = worker.kill, worker._popen.kill
        return batches

    def _watched(self, batches: Any, number: int) -> Iterator[Any]:
        shared = self.loader.persistent_workers
        while True:
            if shared and number != self._pass:
                raise DataError(
                    f"The loader over {self.name} was iterated again during this pass, but persistent workers "
                    "serve one pass at a time. Set persistent_workers=False, or use two loaders."
                )
            try:
                _report_deaths(batches, True)
                batch = self._next(batches)
            except StopIteration:
                return
            except _LOST as error:
                self._explain(batches, error)
                raise
            finally:
                _report_deaths(batches, False)
            if type(batch) is Failure:
                batch.reraise()
            yield batch

    def _next(self, batches: Any) -> Any:
        """Return the next batch; look for dead workers every few seconds, as only the main thread gets a signal."""
        until = time.monotonic() + self.data_timeout
        while True:
            try:
                return next(batches)
            except RuntimeError as error:  # the next call continues to wait
                if not _timed_out(error) or any(worker.exitcode for worker in batches._workers):
                    raise
                if time.monotonic() >= until:
                    raise

    def _explain(self, batches: Any, error: Exception) -> None:
        """Raise DataError for a dead or hanging worker; return for any other error."""
        _report_deaths(batches, False)  # to ask a worker that has not begun for its stack kills it
        if not isinstance(error, RuntimeError):  # the batch of a dying worker could not be fetched
            ending = wait([worker.sentinel for worker in batches._workers], timeout=_LOOK_EVERY)
            for worker in batches._workers:
                if worker.sentinel in ending:  # the sentinel is ready a moment before the exit code
                    worker.join(_LOOK_EVERY)
        dead = [(number, worker) for number, worker in enumerate(batches._workers) if worker.exitcode]
        if dead:
            message = self._death_message(*dead[0])
        elif _timed_out(error):
            message = self._hang_message(batches)
        else:
            return
        self._discard(batches)
        raise DataError(message) from error

    def _death_message(self, number: int, worker: Any) -> str:
        code = worker.exitcode
        if code == 1 and getattr(worker, "_start_method", "fork") in ("spawn", "forkserver"):
            return (
                f"Worker {number} (pid {worker.pid}) of the loader over {self.name} ended with an error, printed "
                f"above. {MAIN_GUARD}"
            )
        if code > 0:
            return (
                f"Worker {number} (pid {worker.pid}) of the loader over {self.name} exited with code {code} in the "
                "middle of an epoch. Look for os._exit, sys.exit or a native library's abort in the dataset."
            )
        return (
            f"Worker {number} (pid {worker.pid}) of the loader over {self.name} was killed by {_signal_name(-code)}. "
            f"{_CAUSES}"
        )

    def _hang_message(self, batches: Any) -> str:
        number = batches._task_info[batches._rcvd_idx][0]
        worker = batches._workers[number]
        stack = self._stack_of(worker.pid)
        return (
            f"Worker {number} (pid {worker.pid}) of the loader over {self.name} has given no batch for "
            f"{self.data_timeout:g} seconds (data_timeout). "
            + (f"Its stack:\n{stack}" if stack else "It does not answer, so its stack is not known.")
            + "\nIf the data are just slow, raise data_timeout; for a lock or a library that does not survive a fork, "
            "set multiprocessing_context='spawn'."
        )

    def _stack_of(self, pid: int) -> str:
        """Read a worker's Python stack from its faulthandler, which answers even if Python code does not."""
        if _SHOW_STACK is None:
            return ""
        self._read_stacks(0)  # drop the output of other signals
        os.kill(pid, _SHOW_STACK)
        text = self._read_stacks(5)
        # the working thread comes last; below the worker's loop is only its start
        return text[text.find("Current thread") :].partition('worker.py"')[0].rpartition("\n")[0]

    def _read_stacks(self, timeout: float) -> str:
        text = b""
        while self._stacks.poll(timeout):
            try:
                text += os.read(self._stacks.fileno(), 65536)
            except BlockingIOError:
                break
            timeout = 0.2
        return text.decode(errors="replace")

    def _discard(self, batches: Any) -> None:
        """Kill all workers; the next pass starts new ones. torch's own shutdown would wait for dead ones."""
        _report_deaths(batches, False)
        if self._end is not None:
            self._end.detach()
        for worker in batches._workers:
            worker.kill()
        for worker in batches._workers:
            worker.join(_LOOK_EVERY)
        batches._shutdown = True
        if (done := getattr(batches, "_pin_memory_thread_done_event", None)) is not None:
            done.set()
        self.loader._iterator = None


class _Done:
    """The event by which torch ends its workers, as the main process uses it.

    Its lock is lost with a worker that is killed while holding it, and torch would wait for it forever: to mark the
    worker as dead, and to end the others. Only the main process sets the event, so it knows its value without the lock;
    if the lock is lost, the workers that wait for it too are killed.
    """

    def __init__(self, event: Any, workers: list[Any]):
        self._event, self._workers = event, workers
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        lock = self._event._cond
        if lock.acquire(timeout=_LOOK_EVERY):
            self._event._flag.release()  # as its own `set` does, which takes the lock without a timeout
            lock.release()
            return
        for worker in self._workers:
            worker.kill()


class WorkerStart:
    """Initialise a worker: ignore signals, watch the main process, register its stack; then the user's function."""

    def __init__(self, then: Callable[[int], None] | None, stacks: Connection):
        self.then, self.stacks = then, stacks

    def __call__(self, worker: int) -> None:
        leave_inherited()
        for number in _LEFT_TO_MAIN:
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_AT_START)
        if _SHOW_STACK is not None:
            faulthandler.register(_SHOW_STACK, file=self.stacks.fileno(), all_threads=True)
        threading.Thread(target=_end_with_main, daemon=True, name="forge-end-with-main").start()
        _show_own_dataset()
        if self.then is None:
            return
        try:
            self.then(worker)
        except Exception as error:
            name = getattr(self.then, "__qualname__", type(self.then).__name__)
            raise DataError(f"worker_init_fn {name} raised {what(error)} in worker {worker}.") from error


def end_workers(loader: Any) -> None:
    """End persistent workers; the next pass starts new ones."""
    while not isinstance(loader, DataLoader) and hasattr(loader, "loader"):
        loader = loader.loader
    running: Any = getattr(loader, "_iterator", None)
    if hasattr(running, "_shutdown_workers"):
        loader._iterator = None
        running._shutdown_workers()


def _show_own_dataset() -> None:
    """Let `get_worker_info().dataset` be the user's dataset, which a worker_init_fn may give its share of a stream."""
    info = get_worker_info()
    own = getattr(info and info.dataset, "dataset", None)
    if info is not None and own is not None:
        object.__setattr__(info, "dataset", own)  # a WorkerInfo refuses to be changed


class _Draws:
    """The current pass's draws as a batch sampler for torch."""

    draws: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.draws


def unchanged(batch: Any) -> Any:
    """The collate function for whole batches."""
    return batch


def _end_with_main() -> None:
    """Wait until the main process is gone, then kill this one, even inside the dataset's code."""
    main = multiprocessing.parent_process()
    assert main is not None
    assert main.pid is not None
    try:
        handle = os.pidfd_open(main.pid)
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):  # not Linux, or an old kernel
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(1)
    else:
        wait([handle])  # not select.select, which takes no descriptor above 1023
    os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


def _report_deaths(batches: Any, on: bool) -> None:
    """Let torch raise when a worker dies, or not: it would raise anywhere in the main thread, even in a save."""
    if on == batches._worker_pids_set or (on and batches._shutdown):
        return
    if on:
        watch_worker_pids(id(batches), tuple(worker.pid for worker in batches._workers))
        batches._worker_pids_set = True
        check_worker_pids()  # for those that died meanwhile
    else:
        forget_worker_pids(id(batches))
        batches._worker_pids_set = False


@contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block signals, here and in processes started meanwhile."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _timed_out(error: Exception) -> bool:
    return str(error).startswith("DataLoader timed out after")


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def refuse_in_starting_worker() -> None:
    """Raise DataError if this process is a worker that imports the script, which would train a second time in it."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise DataError(f"A data worker runs this fit as it starts. {MAIN_GUARD}")
