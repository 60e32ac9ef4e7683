"""Compile a C++ or CUDA file against torch and load it at first use. A `.cpp` needs a compiler, but neither ninja nor
nvcc; a `.cu` needs nvcc, and a GPU or TORCH_CUDA_ARCH_LIST, which names those to build for.

The library is kept in the user's folder of torch extensions under a name that hashes all its inputs, so that it is
built once, and again when the source, torch or the compiler changes. It is moved there atomically. The building process
holds a lock, which the system releases even if the process is killed; others wait for it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from forge.errors import KernelError

logger = logging.getLogger("forge")

FLAGS = ["-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"]
if sys.platform == "linux" and torch.backends.openmp.is_available():
    FLAGS.append("-fopenmp")  # at::parallel_for is serial without it
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch")
CUDA = ".cu"
CUDA_FLAGS = ["-std=c++20", "-O3", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr"]
CUDA_LIBRARIES = ("-lc10_cuda", "-ltorch_cuda", *LIBRARIES)
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"


@cache
def missing(source: Path) -> str | None:
    """Build and load the operators of a C++ or CUDA file; return why they are not available, or None."""
    try:
        if source.suffix == CUDA and not torch.cuda.is_available():
            raise KernelError(f"{source.name} needs a CUDA device, and torch finds none here")
        library = build(source)
        with _or_say(f"{source.name} was built but cannot be loaded"):
            torch.ops.load_library(str(library))
    except KernelError as error:
        return str(error)
    return None


def build(source: Path, flags: Sequence[str] = ()) -> Path:
    """Return the library built from a C++ or CUDA file, cached if possible; raise KernelError if it cannot be built."""
    command = [*_compiler(source), *_flags(source), *flags]
    library = _folder(source) / f"{source.stem}-{_key(source, command)}.so"
    if not library.exists():
        folder = library.parent
        with _or_say(f"{source.name} cannot be built in {folder} (TORCH_EXTENSIONS_DIR names another folder)"):
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(library.with_suffix(".lock")):
                if not library.exists():
                    logger.info("forge builds %s; this happens once.", library)
                    _run(command, source, library)
    return library


def _run(command: list[str], source: Path, library: Path) -> None:
    # a folder, since a temporary file would be readable by its owner only, and others may share the cache
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        line = [*command, str(source), "-o", str(made), *_linked(source)]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            log = library.with_suffix(".log")
            log.write_text(f"{shlex.join(line)}\n\n{done.stdout}{done.stderr}")
            lines = [text for text in done.stderr.splitlines() if "error:" in text or "fatal" in text]
            first = lines[0] if lines else "no error message"
            raise KernelError(f"{source.name} could not be compiled: {first.strip()} (full output in {log})")
        os.replace(made, library)


def _compiler(source: Path) -> list[str]:
    """Return the compiler that torch would use: CXX, or c++; for CUDA CUDACXX, or nvcc of CUDA_HOME or of the path."""
    if source.suffix == CUDA:
        return _nvcc()
    words = shlex.split(os.environ.get("CXX", "c++"))
    if sys.platform == "win32" or not words or shutil.which(words[0]) is None:
        raise KernelError(f"the C++ compiler {' '.join(words) or 'c++'} was not found (set CXX to name another)")
    return words


def _nvcc() -> list[str]:
    if torch.version.cuda is None:
        raise KernelError("this torch was built without CUDA (install one with it, from pytorch.org)")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    words = shlex.split(os.environ.get("CUDACXX") or (str(Path(home) / "bin" / "nvcc") if home else "nvcc"))
    if not words or shutil.which(words[0]) is None:
        raise KernelError(
            f"the CUDA compiler {' '.join(words) or 'nvcc'} was not found (install the CUDA toolkit "
            f"{torch.version.cuda}, and set CUDA_HOME to its folder, or CUDACXX to nvcc)"
        )
    return words


def _flags(source: Path) -> list[str]:
    from torch.utils import cpp_extension  # imports setuptools: not at import

    folders = [f"-isystem{folder}" for folder in cpp_extension.include_paths("cpu")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    if source.suffix == CUDA:
        host = shlex.split(os.environ.get("CXX", ""))
        folders = [folder.replace("-isystem", "-isystem=", 1) for folder in folders]  # as nvcc reads it
        return [*CUDA_FLAGS, *([f"-ccbin={host[0]}"] if host else []), *_architectures(), abi, *folders]
    return [*FLAGS, abi, *folders]


def _architectures() -> list[str]:
    """Return the flags for the GPUs of TORCH_CUDA_ARCH_LIST ("8.0 9.0+PTX"), or for the current one."""
    names = os.environ.get(ARCHITECTURES, "").replace(";", " ").split()
    if not names and not torch.cuda.is_available():
        raise KernelError(f"torch finds no CUDA device to build for (set {ARCHITECTURES}, as in {ARCHITECTURES}=9.0)")
    if not names:
        names = ["{}.{}".format(*torch.cuda.get_device_capability())]
    flags: list[str] = []
    for name in names:
        number = name.removesuffix("+PTX").replace(".", "")
        if not re.fullmatch(r"\d{2,3}[af]?", number):
            raise KernelError(f"{ARCHITECTURES} has {name!r}; write capabilities as numbers, as in {ARCHITECTURES}=9.0")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if name.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def _linked(source: Path) -> list[str]:
    from torch.utils import cpp_extension

    libraries = CUDA_LIBRARIES if source.suffix == CUDA else LIBRARIES
    return [*(f"-L{folder}" for folder in cpp_extension.library_paths("cpu")), *libraries]


def _folder(source: Path) -> Path:
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root) / f"forge_{source.stem}"


def _key(source: Path, command: list[str]) -> str:
    compiler, kind = _compiler(source), "CUDA" if source.suffix == CUDA else "C++"
    with _or_say(f"the {kind} compiler {shlex.join(compiler)} cannot be run"):
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    with _or_say(f"the {kind} file cannot be read"):
        text = source.read_text()
    parts = [text, torch.__version__, shlex.join(command), version]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextmanager
def _or_say(what: str) -> Iterator[None]:
    """Raise an OSError as a KernelError with this message."""
    try:
        yield
    except OSError as error:
        raise KernelError(f"{what}: {error}") from error


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock that the system releases when the process ends."""
    import fcntl  # not available on every platform

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
