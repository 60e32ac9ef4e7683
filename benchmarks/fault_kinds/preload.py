"""The library that fails or records calls below a folder: compile it, and restart this program with it preloaded."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("preload.c")
LOADED, BEFORE = "FORGE_FAULTS_LIBRARY", "FORGE_FAULTS_PRELOAD"
"""In the environment of the restarted program: the library, and the former LD_PRELOAD."""
KINDS = {"open": 1, "read": 2, "write": 4, "rename": 8, "fsync": 16, "entry": 32, "disk": 63}
"""The calls that can fail; an entry is made or removed (mkdir, symlink, unlink, rmdir), "disk" is all of them."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The n-th call of a kind below a run folder fails, once or from then on for good."""

    kind: str
    nth: int
    error: int
    for_good: bool

    def arm(self, folder: Path, report: Path) -> None:
        """Fail calls of this process from now on; each failed path becomes a line of the report."""
        arguments = (os.fsencode(folder), KINDS[self.kind], ctypes.c_long(self.nth), self.error, int(self.for_good))
        ctypes.CDLL(None).faults_fail(*arguments, os.fsencode(report))


def record(folder: Path, log: Path) -> None:
    """Append every change below a folder to a log, from now on: see benchmarks.fault_kinds.replay."""
    ctypes.CDLL(None).faults_record(os.fsencode(folder), os.fsencode(log))


def restart(module: str, words: Sequence[str]) -> None:
    """Restart this program with the library preloaded; return at once in the restarted program."""
    library = os.environ.pop(LOADED, None)
    if library is not None:
        os.environ.pop("LD_PRELOAD")
        if before := os.environ.pop(BEFORE, ""):
            os.environ["LD_PRELOAD"] = before
        shutil.rmtree(Path(library).parent)  # it stays mapped
        return
    library, before = compiled(Path(tempfile.mkdtemp(prefix="forge-faults-"))), os.environ.get("LD_PRELOAD", "")
    os.environ |= {LOADED: str(library), BEFORE: before, "LD_PRELOAD": f"{library} {before}".strip()}
    os.execv(sys.executable, [sys.executable, "-m", module, *words])


def compiled(folder: Path) -> Path:
    """Compile the library into a folder."""
    compiler, library = shutil.which("cc"), folder / "faults.so"
    if compiler is None or sys.platform != "linux":
        sys.exit("Failing and recorded calls (--io, --crashes) need Linux and a C compiler named cc.")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl", "-pthread"], check=True
    )
    return library
