"""A small share of `make faults`: runs that are killed anywhere end in the bits of a straight one.

The tools behind it are tested too: failing calls, recorded calls, and the crashes that are replayed from them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.fault_kinds.crash_states import CRASHES, flushed_checkpoints, rebuild
from benchmarks.fault_kinds.preload import KINDS, compiled
from benchmarks.fault_kinds.replay import read_log
from benchmarks.fault_kinds.victim import HANG, exit_code
from tests.conftest import REPO
from tests.support import forked
from tests.support.patience import PATIENCE

FEW = [f"--only={case}" for case in ("run:2", "signal:15")]
"""A run that is killed, and one that is told to stop; damage and logs have tests of their own beside this one."""

MANY = ["--runs=8", "--signals=4", "--damages=20", "--logs=12", "--io=0", "--crashes=0", "--jobs=2"]
CALLS = ["--runs=0", "--signals=0", "--damages=0", "--logs=0", "--io=14", "--crashes=15", "--jobs=2"]
needs_cc = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="calls are caught on Linux, with a C compiler"
)


def rows(*words: str) -> list[dict[str, Any]]:
    """The table of these cases."""
    done = forked.run([sys.executable, "-m", "benchmarks.faults", *words, "--json"], cwd=REPO, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()][1:]


@pytest.mark.parametrize(
    ("words", "cases", "deaths"),
    [
        ([*FEW, "--jobs=1"], 2, 2),
        pytest.param(MANY, 44, 24, marks=pytest.mark.slow),
    ],
    ids=["few", "many"],
)
def test_killed_and_damaged_runs_end_in_the_same_bits(words: list[str], cases: int, deaths: int) -> None:
    table = rows(*words)
    assert sum(row["cases"] for row in table) == cases
    assert {"amp fp16", "signals"} <= {row["row"] for row in table}
    assert all(row["exact"] == row["cases"] for row in table)
    assert sum(row["deaths"] for row in table) >= deaths


@needs_cc
@pytest.mark.slow
def test_failing_calls_and_crashes_end_in_the_same_bits() -> None:
    table = rows(*CALLS)
    assert {row["row"] for row in table} == {*(f"failing {kind}" for kind in KINDS), *(f"crash, {c}" for c in CRASHES)}
    assert sum(row["cases"] for row in table) == sum(row["exact"] for row in table) == 29


# -- the tools --------------------------------------------------------------------------------------------------------

PUBLISH = """
import os
def write(path, data, flush=True):
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        if flush:
            os.fsync(file.fileno())
def flush(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
os.makedirs("run/checkpoints/.new")
flush("."), flush("run")
write("run/checkpoints/.new/state", b"whole", flush=FLUSH)
flush("run/checkpoints/.new")
os.rename("run/checkpoints/.new", "run/checkpoints/update-00000001")
flush("run/checkpoints")
with open("run/log", "ab", 0) as log:
    log.write(b"first"), log.write(b"second")
os.symlink("update-00000001", "run/checkpoints/latest")
"""
"""Publishes a checkpoint, flushed or not, and makes a log and a link that are not flushed."""


@pytest.fixture(scope="module")
def run_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a folder with the library preloaded and one of its functions called."""
    library = compiled(tmp_path_factory.mktemp("library"))

    def run(folder: Path, call: str, code: str) -> subprocess.CompletedProcess[str]:
        start = f"import ctypes, os; os.chdir({str(folder)!r}); ctypes.CDLL(None).{call}\n"
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", start + code],
            env={**os.environ, "LD_PRELOAD": str(library)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    return run


@needs_cc
@pytest.mark.parametrize("kind", ["open", "read", "write", "rename", "fsync", "entry"])
@pytest.mark.parametrize("for_good", [0, 1])
def test_the_nth_call_fails_once_or_for_good(tmp_path: Path, run_with: Any, kind: str, for_good: int) -> None:
    folder, report = tmp_path / "run", tmp_path / "failed"
    folder.mkdir()
    calls = {
        "open": "os.close(os.open('run/file', os.O_WRONLY | os.O_CREAT))",
        "read": "os.read(file, 1)",
        "write": "os.write(file, b'x')",
        "rename": "os.rename('run/a', 'run/a')",
        "fsync": "os.fsync(file)",
        "entry": "os.mkdir(f'run/{number}')",
    }
    code = f"""
file = os.open("run/a", os.O_RDWR | os.O_CREAT)
ctypes.CDLL(None).faults_fail({os.fsencode(folder)}, {KINDS[kind]}, 2, {errno.EIO}, {for_good}, {os.fsencode(report)})
for number in range(4):
    try:
        {calls[kind]}
        print("done")
    except OSError as error:
        print(error.errno)
"""
    done = run_with(tmp_path, "faults_fail(b'/nowhere', 0, 0, 0, 0, b'/dev/null')", code)
    failed = str(errno.EIO)
    assert done.stdout.split() == ["done", failed, *([failed, failed] if for_good else ["done", "done"])], done.stderr
    assert len(report.read_text().splitlines()) == (3 if for_good else 1)


def test_an_attempt_that_does_not_end_is_a_hang() -> None:
    child = forked.fork()
    if child == 0:
        os.setsid()
        time.sleep(PATIENCE)  # limit: a child that hangs, and is killed
        os._exit(0)
    while os.getpgid(child) != child:  # it is stopped by the group that it leads
        time.sleep(0.001)
    assert exit_code(child, time.monotonic() + 0.1) == HANG  # limit: it expires: what is waited for never comes


def crashes(folder: Path, run_with: Any, flush: bool) -> dict[str, set[tuple[bytes, ...]]]:
    """The state files and logs that each kind of crash leaves, over all moments after the publication."""
    made = folder / "made"
    made.mkdir()
    log = folder / "changes.log"
    code = PUBLISH.replace("FLUSH", str(flush))
    done = run_with(made, f"faults_record({os.fsencode(made)}, {os.fsencode(log)})", code)
    assert done.returncode == 0, done.stderr
    changes = read_log(log)
    published = next(n for n in range(len(changes)) if flushed_checkpoints(changes[:n]))
    found: dict[str, set[tuple[bytes, ...]]] = {}
    for crash in CRASHES:
        for count in range(published, len(changes) + 1):
            again = folder / f"{crash} {count}"
            again.mkdir()
            rebuild(again, made, changes[:count], crash, Random(count))
            left = [again / "run" / name for name in ("checkpoints/update-00000001/state", "log")]
            found.setdefault(crash, set()).add(tuple(path.read_bytes() if path.exists() else b"-" for path in left))
    return found


@needs_cc
def test_what_was_flushed_survives_every_crash(tmp_path: Path, run_with: Any) -> None:
    found = crashes(tmp_path, run_with, flush=True)
    assert {state for crash in CRASHES for state, _ in found[crash]} == {b"whole"}
    assert {log for _, log in found["nothing lost"]} >= {b"-", b"first", b"firstsecond"}
    assert {log for _, log in found["writes lost"]} == {b"-", b""}
    assert {log for _, log in found["renames lost"]} == {b"-"}


@needs_cc
def test_what_was_not_flushed_is_lost_in_a_crash(tmp_path: Path, run_with: Any) -> None:
    found = crashes(tmp_path, run_with, flush=False)
    assert {state for state, _ in found["nothing lost"]} == {b"whole"}
    assert {state for state, _ in found["writes lost"]} == {b""}
