"""Files at URLs: any place that fsspec knows (s3://, gs://, az://, file://, memory://), tried again when it fails."""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from forge.errors import CheckpointError, RecipeError

logger = logging.getLogger("forge")

T = TypeVar("T")

ATTEMPTS = 6
"""How often an operation is tried, with pauses of about 0.5, 1, 2, 4 and 8 seconds between."""
FIRST_PAUSE = 0.5
FINAL = (PermissionError, FileNotFoundError, NotImplementedError, ImportError, TypeError)
NAMES = {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS}
"""Errors that another try would only repeat; those of a file's name by their numbers."""

CREDENTIALS = (
    "Give credentials to the machine: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a role for s3://, "
    "GOOGLE_APPLICATION_CREDENTIALS for gs://, other options in ~/.config/fsspec/conf.json."
)

_SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|SAS\b|CONNECTION_STRING", re.IGNORECASE)
_IN_URLS = ((re.compile(r"(?<=//)[^/@\s'\"]+@"), "***@"), (re.compile(r"(?<=\S)\?[^\s'\"<>]*=[^\s'\"<>]*"), "?***"))


def redacted(text: str) -> str:
    """Return a text without user names, passwords and queries of URLs, and without the values of variables of the
    environment whose names are those of secrets."""
    for name, value in os.environ.items():
        if len(value) >= 6 and _SECRET_NAME.search(name) and not os.path.exists(value):
            text = text.replace(value, "***")
    for pattern, instead in _IN_URLS:
        text = pattern.sub(instead, text)
    return text


HERE = ("file", "local", "memory")
"""Schemes of this machine: their URLs name no bucket or host."""


def check_url(url: str, option: str) -> None:
    """Raise a RecipeError for an address that cannot be used, or that holds credentials: it is written to run cards."""
    scheme, found, rest = url.partition("://")
    is_nowhere = rest.startswith("/") and scheme not in HERE
    if not found or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) or not rest.strip("/") or is_nowhere:
        raise RecipeError(
            f"{option} is {redacted(url)[:200]!r}; it must be a URL with a place in it, such as s3://bucket/prefix, "
            "gs://bucket/prefix or file:///shared/folder."
        )
    place, *names = rest.split("/")
    odd = not url.isprintable() or "\\" in url or "::" in url or len(url.encode("utf-8", "replace")) > 1000
    if odd or not re.fullmatch(r"[\w.~:@?#=&%+\[\]-]*", place) or any(n in (".", "..") or len(n) > 255 for n in names):
        raise RecipeError(
            f"{option} is {redacted(url)[:200]!r}: a place is letters, digits and signs such as - and .; a URL has no "
            "part . or .., none of over 255 characters, no control character, and 1,000 bytes at most."
        )
    if "@" in rest.partition("/")[0] or "?" in rest or "#" in rest:
        raise RecipeError(
            f"{option} is {redacted(url)!r}: credentials and queries do not belong in a URL, which is written to the "
            f"run folder. {CREDENTIALS}"
        )


def connect(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it; raise a CheckpointError where it is not known."""
    import fsspec  # torch depends on it

    scheme = url.partition("://")[0]
    try:
        fs, root = fsspec.core.url_to_fs(url)
        return fs, root.rstrip("/")
    except ImportError as error:
        raise CheckpointError(f"{scheme}:// needs a package that is not installed: {error}") from error
    except Exception as error:  # a file system may connect when it is made, or take an address apart
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"{redacted(url)}: {redacted(said)}.") from error


class RemoteFailure(CheckpointError):
    """A remote place did not answer, or refused. What is there is intact."""


class RemoteMissing(RemoteFailure):
    """A remote file, or its bucket, does not exist."""


def attempt(act: Callable[[], T], what: str) -> T:
    """Call a function until it succeeds, with longer and longer pauses; raise its last error, without secrets."""
    pause = FIRST_PAUSE
    for left in reversed(range(ATTEMPTS)):
        try:
            return act()
        except Exception as error:
            said = redacted(f"{type(error).__name__}: {error}")
            if not left or isinstance(error, FINAL) or getattr(error, "errno", None) in NAMES:
                kind = RemoteMissing if isinstance(error, FileNotFoundError) else RemoteFailure
                raise kind(f"{what}: {said}.") from None  # its own text may hold secrets
            logger.debug("%s (%s; %d tries left)", what, said, left)
        time.sleep(pause * random.uniform(0.75, 1.25))
        pause *= 2
    raise AssertionError("unreachable")
