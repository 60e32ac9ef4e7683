"""Commands without the seconds that a new interpreter takes to import torch.

    forked.Popen([sys.executable, "-m", "forge", "fit", "small.py"], env=..., cwd=...)
    forked.run(...)                     as subprocess.run
    forked.call(function)               a function of a module, or a partial of one
    forked.forge("fit", "quickstart")   the command line
    forked.fork()                       as os.fork

In the quick profile `python -m MODULE ...` and `python -c CODE ...` are forked from a process that was itself forked
from this one before the first test, so that nothing of a test is in it. The long profile runs them in interpreters of
their own. So it is where CUDA is, whose state cannot be forked, and away from Linux.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import io
import logging
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

import torch

from forge import cli, registry
from forge.cli import target
from forge.util.fork_garbage import collections_paused, leave_inherited
from tests.support.patience import PATIENCE

Completed = subprocess.CompletedProcess[str]

QUICK = (
    sys.platform == "linux" and not torch.cuda.is_available() and os.environ.get("FORGE_PROFILE", "quick") == "quick"
)
WARM = (
    "forge.cli.fit",
    "forge.distributed.launch",
    "forge_plugins.ddp",
    "omegaconf",
    "torch._dynamo",
    "torch.utils.tensorboard",
)
"""Imported before a fork, so that one process imports for all that come of it."""
SUBREAPER = 36
"""prctl's PR_SET_CHILD_SUBREAPER."""
LOAD = "import pickle, sys; sys.path[:] = {path!r}; sys.exit(pickle.loads({work!r})())"
"""A program that calls a pickled function; its exit code is the integer that the function returns."""

_server: socket.socket | None = None
_server_pid = 0
_asking = threading.Lock()


class Popen(subprocess.Popen):
    """A process with its own folder, environment, streams and signals, that did not have to import anything."""

    _ended: int | None = None
    """A descriptor that can be read once the process has ended, where it is the server's child."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
        words = [os.fspath(word) for word in args]
        script = words[2:] if words[1:2] == ["-u"] else words[1:]
        if not QUICK or words[0] != sys.executable or script[:1] not in (["-m"], ["-c"]):
            super()._execute_child(args, executable, preexec_fn, *others)  # pyright: ignore[reportAttributeAccessIssue]
            return
        _, _, cwd, env, _, _, _, *pipes, _, _, _, _, _, new_session, _ = others
        read, _, _, write, _, complain = pipes
        streams = [given if given != -1 else number for number, given in enumerate((read, write, complain))]
        request = (cwd or os.getcwd(), dict(os.environ if env is None else env), new_session, script)
        if _server is None:
            self.pid = _fork(streams, request)
        else:
            self.pid = _ask("fork", streams, request)
            self._ended = os.pidfd_open(self.pid)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # pyright: ignore[reportAttributeAccessIssue]

    def _internal_poll(self, _deadstate: Any = None, **kwargs: Any) -> int | None:
        if self._ended is None:
            return super()._internal_poll(_deadstate)  # pyright: ignore[reportAttributeAccessIssue]
        lock = self._waitpid_lock  # pyright: ignore[reportAttributeAccessIssue]
        if lock.acquire(blocking=False):  # otherwise another thread waits for it
            try:
                if self.returncode is None:
                    ended, status = self._try_wait(os.WNOHANG)
                    if ended:
                        self._handle_exitstatus(status)  # pyright: ignore[reportAttributeAccessIssue]
            finally:
                lock.release()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As waitpid, for a child of the server too."""
        if self._ended is None:
            return super()._try_wait(wait_flags)  # pyright: ignore[reportAttributeAccessIssue]
        end = select.poll()
        end.register(self._ended, select.POLLIN)
        if not end.poll(0 if wait_flags == os.WNOHANG else None):
            return 0, 0
        os.close(self._ended)
        self._ended = None
        if _server is None:  # it has ended: its children are those of this process
            return super()._try_wait(wait_flags)  # pyright: ignore[reportAttributeAccessIssue]
        return self.pid, _ask("wait", [], self.pid)


def run(args: Sequence[Any], *, timeout: float, **options: Any) -> Completed:
    """`subprocess.run` with its output as text."""
    with Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return Completed(args, process.returncode, out, err)


def call(work: Callable[[], object], env: Mapping[str, str] | None = None, timeout: float = PATIENCE) -> Completed:
    """Call `work` in a process of its own; the exit code is the integer that it returns, or 1 after an error."""
    code = LOAD.format(path=sys.path, work=pickle.dumps(work))
    return run([sys.executable, "-c", code], env={**os.environ, **(env or {})}, timeout=timeout)


def forge(*words: str, paths: Sequence[Path] = (), env: Mapping[str, str] | None = None) -> Completed:
    """Run the command line in a process of its own; `paths` come first on its import path, entry points included."""
    return call(partial(_forge, words, tuple(map(str, paths))), env)


def _forge(words: Sequence[str], paths: Sequence[str]) -> int:
    sys.path[:0] = paths
    registry.installed.cache_clear()
    return cli.main(words)


def fork() -> int:
    """`os.fork`, whose child collects nothing that it inherited: that would copy all memory, and free objects whose
    threads it does not have."""
    with collections_paused():
        child = os.fork()
        if child == 0:
            leave_inherited()
    return child


# -- the process that forks -------------------------------------------------------------------------------------------


def prepare() -> None:
    """Fork the process that others are forked from; before the first test, after all modules are imported."""
    global _server, _server_pid
    if not QUICK or _server is not None:
        return
    ours, theirs = socket.socketpair()
    _server_pid = fork()
    if _server_pid == 0:
        try:
            ours.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    _server = ours
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)  # what outlives its parent becomes a child of this process


def release() -> None:
    """End that process."""
    global _server
    if _server is not None:
        _server.shutdown(socket.SHUT_RDWR)  # workers that tests have forked hold it open too
        _server.close()
        _server = None
        os.waitpid(_server_pid, 0)


def _ask(kind: str, streams: list[int], request: Any) -> int:
    message = pickle.dumps((kind, request))
    assert _server is not None
    with _asking:
        socket.send_fds(_server, [len(message).to_bytes(8, "little")], streams)
        _server.sendall(message)
        return int.from_bytes(_server.recv(8, socket.MSG_WAITALL), "little")


def _serve(client: socket.socket) -> None:
    while True:
        head, streams, _, _ = socket.recv_fds(client, 8, 3)
        if not head:
            return
        kind, request = pickle.loads(client.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL))
        if kind == "wait":
            answer = os.waitpid(request, 0)[1]
        else:
            warm_up()
            answer = _fork(streams, request)
        client.sendall(answer.to_bytes(8, "little"))
        for number in streams:
            os.close(number)


def warm_up() -> None:
    for name in WARM:
        import_module(name)


# -- the process that was asked for -----------------------------------------------------------------------------------


def _fork(streams: list[int], request: tuple[Any, Any, bool, list[str]]) -> int:
    child = fork()
    if child:
        return child
    code = 1
    try:
        cwd, env, new_session, script = request
        _start_anew(streams, cwd, env, new_session)
        code = _run_script(*script)
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        util._exit_function()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = 120  # as Python exits where its last flush fails
        os._exit(code)


def _run_script(kind: str, what: str, *arguments: str) -> int:
    sys.argv = [what if kind == "-m" else "-c", *arguments]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _start_anew(streams: list[int], cwd: Any, env: Any, new_session: bool) -> None:
    """Leave behind what belongs to the tests."""
    global _server
    _server = None
    torch.set_num_threads(torch.get_num_threads())  # makes a new pool; two threads that find the old one race for it
    atexit._clear()
    if new_session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # or a store of that process would seem to live on in this one
    resource_tracker._resource_tracker._fd = None  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(number, mode, closefd=False), line_buffering=number > 0)  # noqa: SIM115
        for number, mode in enumerate(("rb", "wb", "wb"))
    )
    faulthandler.enable(sys.stderr)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
    for name in (None, "forge"):
        logging.getLogger(name).handlers.clear()
    warnings.showwarning = warnings._showwarning_orig  # pyright: ignore[reportAttributeAccessIssue]
    for module in target._imported.values():  # a task's file looks at its environment when it is imported
        sys.modules.pop(module.__name__, None)
    target._imported.clear()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    subprocess_handler.Popen = Popen  # workers of a launcher are forked from it
    dynamic_rendezvous.get_method_name = str  # for events that nobody reads, it looks through all modules each time
