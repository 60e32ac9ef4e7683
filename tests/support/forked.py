"""Commands without the seconds that a new interpreter takes to import torch: forked from this process.

    forked.Popen([sys.executable, "-m", "forge", "fit", "small.py"], env=..., cwd=...)
    forked.run(...)                     as subprocess.run

Only `python -m MODULE ...` and `python -c CODE ...` are forked, and only in the quick profile: the long one runs them
in interpreters of their own. So it is where CUDA is, whose state cannot be forked, and away from Linux.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import resource_tracker, util
from typing import Any

import torch

from forge.cli import target

FORKS = sys.platform == "linux" and not torch.cuda.is_available()
"""Whether a process with torch in it can be forked here."""
QUICK = FORKS and os.environ.get("FORGE_PROFILE", "quick") == "quick"

WARM = ("forge.cli.fit", "forge.distributed.launch", "forge_plugins.ddp", "omegaconf", "torch._dynamo")
"""Imported before a fork, so that one process imports for all that come of it."""


def warm_up() -> None:
    for name in WARM:
        import_module(name)


class Popen(subprocess.Popen):
    """A process that is a copy of this one, with its own folder, environment, streams and signals."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
        words = [os.fspath(word) for word in args]
        script = words[2:] if words[1:2] == ["-u"] else words[1:]
        if not QUICK or words[0] != sys.executable or script[:1] not in (["-m"], ["-c"]):
            super()._execute_child(args, executable, preexec_fn, *others)  # pyright: ignore[reportAttributeAccessIssue]
            return
        _, _, cwd, env, _, _, _, *pipes, _, _, _, _, _, new_session, _ = others
        warm_up()
        self.pid = os.fork()
        if self.pid == 0:
            read, _, _, write, _, complain = pipes
            _become([read, write, complain], cwd, env, new_session, script)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # pyright: ignore[reportAttributeAccessIssue]


def run(args: Sequence[Any], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with its output as text."""
    with Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def _become(streams: list[int], cwd: Any, env: Any, new_session: bool, script: list[str]) -> None:
    """Be the process that was asked for, and end as the interpreter ends."""
    code = 1
    try:
        _start_anew(streams, cwd, env, new_session)
        code = _run_script(*script)
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        util._exit_function()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
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
    gc.freeze()  # or a collection would copy all memory
    atexit._clear()
    if new_session:
        os.setsid()
    for number, stream in enumerate(streams):
        if stream != -1:
            os.dup2(stream, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # or a store of this process would seem to live on in that one
    resource_tracker._resource_tracker._fd = None  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(number, mode, closefd=False), line_buffering=number > 0)  # noqa: SIM115
        for number, mode in enumerate(("rb", "wb", "wb"))
    )
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
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = Popen  # workers of a launcher are forked from it
