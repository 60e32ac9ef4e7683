"""Run something in a process that is killed beyond some CPU time, and that cannot have 200 MB more memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from forge import cli, registry
from tests.support import forked

SECONDS = 10.0  # limit: CPU time, of what takes a tenth of it; other load is not counted
BYTES = 200 * 2**20


def call(
    work: Callable[[], object], env: Mapping[str, str] | None = None, seconds: float = SECONDS
) -> forked.Completed:
    """Call `work` so; the exit code is the integer that it returns, 1 after an error, -SIGPROF out of time."""
    return forked.call(partial(_call, work, seconds), env)


def forge(*words: str, paths: Sequence[Path] = ()) -> forked.Completed:
    """Run the command line so; `paths` come first on its import path, entry points included."""
    return call(partial(forked._forge, words, tuple(map(str, paths))))


def _call(work: Callable[[], object], seconds: float) -> object:
    forked.warm_up()
    for kind in registry.GROUPS:
        registry.installed(kind)
    cli.verbs()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # counts the time of the CPU alone, and kills
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)  # an interpreter that ends takes CPU time too
