"""Compile a C++ or CUDA file against torch and load it at first use, by `torch.utils.cpp_extension`. A `.cpp` needs a
compiler and ninja; a `.cu` also nvcc and a GPU.

The library is kept in the user's folder of torch extensions, built once, and built again when the source or torch
changes. One process builds while others wait. The lock is one that the system releases: in torch before 2.15 a killed
build left a file for which every later one waited without end.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger("forge")

FLAGS = ["-O3", "-fvisibility=hidden"]
OPENMP = ["-fopenmp"] if torch.backends.openmp.is_available() else []  # at::parallel_for is serial without it


@cache
def missing(source: Path) -> str | None:
    """Build and load the operators of a C++ or CUDA file; return why they are not available, or None."""
    if source.suffix == ".cu" and not torch.cuda.is_available():
        return f"{source.name} needs a CUDA device, and torch finds none here"
    try:
        _load(source)
    except Exception as error:  # of a missing compiler, a source that does not compile, a folder that is not writable
        return f"{source.name} could not be built: {_reason(error)}"
    return None


def _load(source: Path) -> None:
    from torch.utils import cpp_extension  # imports setuptools: not at import

    # the folder is named for what ninja does not look at
    inputs = f"{source.read_bytes()!r} {torch.__version__} {os.environ.get('CXX')} {os.environ.get('CUDACXX')}"
    name = f"forge_{source.stem}_{hashlib.sha256(inputs.encode()).hexdigest()[:12]}"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / f"{name}.so").exists():
        logger.info("forge builds %s in %s; this happens once.", source.name, folder)
    with _alone(folder):
        cpp_extension.load(
            name,
            [str(source)],
            extra_cflags=[*FLAGS, *OPENMP],
            extra_ldflags=[*OPENMP],  # torch adds its own to this list
            build_directory=str(folder),
            is_python_module=False,
        )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock that the system releases when the process ends."""
    import fcntl  # not available on every platform

    with (folder / "forge.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # of a build that was killed: nobody builds here now
        yield


def _reason(error: Exception) -> str:
    """Return the first error of the compiler or the shell, or the first line of the message."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if re.search(r"\berror:|fatal|not found", line)), lines[0])
