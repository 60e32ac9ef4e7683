"""Files replaced atomically, folders for their owner, and files opened only if they are regular."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from forge import registry
from forge.errors import ForgeError


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `file` at the end; after an error `file` is unchanged.

    A reader sees the old file or the new one. A link named `file` is replaced, not followed. An error of the file
    system names a file: of its own a failed write names none.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")  # a name that no link can wait at
    try:
        yield temporary
        os.replace(temporary, file)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = str(file)
        raise


# -- folders ----------------------------------------------------------------------------------------------------------

_shared: set[str] = set()
"""Run folders of this process that their group may enter."""


def share(folder: Path, with_group: bool) -> None:
    """Say whether the group of a folder may read and write what is made in it: by default only the owner may."""
    key = os.path.realpath(folder)
    (_shared.add if with_group else _shared.discard)(key)


def access(path: Path, bits: int) -> int:
    """Return `bits` (7 for a folder, 6 for a file) as a mode: for the owner, in a shared folder for its group too."""
    real = Path(os.path.realpath(path))
    is_shared = any(str(folder) in _shared for folder in (real, *real.parents))
    return bits * 0o110 if is_shared else bits * 0o100


def check_name(path: str | Path) -> None:
    """Raise a ForgeError for a path that no file system can hold."""
    if "://" in str(path):
        remote = registry.advice("remote", " To keep checkpoints there: {}.", url=path)
        raise ForgeError(f"{str(path)[:200]!r} is a URL, where a file system is needed: name a folder.{remote}")
    parts = [os.fsencode(part) for part in Path(path).parts]
    if any(len(part) > 255 or b"\0" in part for part in parts) or sum(map(len, parts)) > 4000:
        raise ForgeError(f"{str(path)[:80]!r}… is no name of a file: it has over 255 bytes, or a NUL. Choose another.")


def absolute(path: str | Path) -> Path:
    """Return an absolute path; raise a ForgeError for a name that no file system can hold, and for a relative one where
    the working directory was deleted."""
    check_name(path)
    try:
        return Path(path).absolute()
    except FileNotFoundError as error:
        raise ForgeError(
            "The working directory no longer exists: it was deleted or moved. Change to one that does (cd), or name an "
            "absolute folder."
        ) from error


def make_folder(folder: Path) -> None:
    """Create a folder with the mode that `access` gives it, unless it exists; its parents get the usual mode.

    Each new folder is flushed into its parent, so that a crash does not lose the way to what is flushed in it.
    """
    missing = list(takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    for path in reversed(missing):
        with suppress(FileExistsError):  # another process was faster
            path.mkdir(access(folder, 7) if path == folder else 0o777)
            if path == folder:
                make_accessible(path)
            with suppress(PermissionError):  # a parent that cannot be listed cannot be opened either
                sync_directory(path.parent)
    if not folder.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))


def make_accessible(folder: Path) -> None:
    """Set the mode of a new folder despite the umask; what a group makes in it stays the group's."""
    mode = access(folder, 7)
    os.chmod(folder, mode | (stat.S_ISGID if mode & 0o070 else 0))


def sync_directory(folder: Path) -> None:
    """Make new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not, sync
            error.filename = str(folder)
            raise
    finally:
        os.close(descriptor)


# -- regular files ----------------------------------------------------------------------------------------------------


def regular_only(file: str, flags: int, mode: int = 0o666) -> int:
    """Open a regular file: `open(path, opener=regular_only)` follows no link and waits for no pipe."""
    try:
        descriptor = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "It is a link, which is not followed", file) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "It is not a regular file", file)
    return descriptor


def is_regular(file: Path) -> bool:
    """Whether a file is there and neither a link nor something special."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except OSError:
        return False


def read_regular(file: Path, most: int) -> bytes:
    """Return the content of a regular file; raise OSError for anything else, and for more than `most` bytes."""
    with open(file, "rb", opener=regular_only) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"It has more than {most:,} bytes", str(file))
    return content
