"""A process of its own that need not import torch again, which takes three seconds of a core: a fork of this one.

In the full profile, and where there is a GPU (CUDA does not survive a fork), the same work runs in a new interpreter.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import torch

from forge import cli, registry

Completed = subprocess.CompletedProcess[str]

LOAD = "import pickle, sys; sys.path[:] = {path!r}; sys.exit(pickle.loads({work!r})())"


def forked(work: Callable[[], object], env: Mapping[str, str] | None = None, timeout: float = 300) -> Completed:
    """Run `work`, a function of a module or a partial of one, in a process of its own; as `subprocess.run` returns it.

    The exit code is the integer that `work` returns, that of its SystemExit, or 1 after any other exception, whose
    traceback goes to stderr.
    """
    if torch.cuda.is_available() or os.environ.get("FORGE_PROFILE") == "full":
        code = LOAD.format(path=sys.path, work=pickle.dumps(work))
        given = {**os.environ, **(env or {})}
        return subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=timeout)
    for module in ("torch._dynamo", "torch.utils.tensorboard", "forge.engine.trainer"):
        import_module(module)  # a fit imports them: once here, not in every fork
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _live(work, env or {}, out.fileno(), err.fileno())
        code = _wait(pid, time.monotonic() + timeout)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return Completed([], code, *said)


def forge_in_fork(*words: str, paths: Sequence[Path] = (), env: Mapping[str, str] | None = None) -> Completed:
    """Run the command line in a process of its own; `paths` come first on its import path, entry points included."""
    return forked(partial(_forge, words, tuple(map(str, paths))), env)


def _forge(words: Sequence[str], paths: Sequence[str]) -> int:
    sys.path[:0] = paths
    registry.installed.cache_clear()
    return cli.main(words)


def _live(work: Callable[[], object], env: Mapping[str, str], out: int, err: int) -> NoReturn:
    """The life of a fork, which must never return to pytest."""
    code = 1
    try:
        gc.freeze()  # what the parent had is not garbage here
        os.environ.update(env)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        result = work()
        code = result if isinstance(result, int) else 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        with suppress(OSError):
            traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = 120  # as Python exits where its last flush fails
        os._exit(code)


def _wait(pid: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"The fork {pid} was still running after its time-out and was killed.")
