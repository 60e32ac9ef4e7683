"""`flaky://`: object storage in memory that fails on demand, for the tests of remote checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class FlakyFileSystem(MemoryFileSystem):
    """Counts its calls. `plan(number, operation, path)` is asked before each, and may raise."""

    protocol = "flaky"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    calls: list[tuple[str, str]] = []
    plan: Callable[[int, str, str], None] | None = None
    tears = False
    "Whether a write that fails leaves half of its bytes, as a file system without atomic writes does."
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("flaky:/") if isinstance(path, str) else path)

    @classmethod
    def reset(cls) -> None:
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.calls.clear()
        cls.plan, cls.tears = None, False

    def _ask(self, operation: str, path: str, data: bytes | None = None) -> None:
        kind = type(self)
        kind.calls.append((operation, path))
        if kind.plan is not None:
            try:
                kind.plan(len(kind.calls) - 1, operation, path)
            except BaseException:
                if kind.tears and data is not None:
                    super().pipe_file(path, data[: len(data) // 2])
                raise

    def put_file(self, lpath: str, rpath: str, *more: Any, **options: Any) -> None:
        with open(lpath, "rb") as file:
            data = file.read()
        self._ask("put_file", rpath, data)
        super().pipe_file(rpath, data)

    def pipe_file(self, path: str, value: bytes, *more: Any, **options: Any) -> None:
        self._ask("pipe_file", path, value)
        super().pipe_file(path, value)

    def get_file(self, rpath: str, lpath: str, *more: Any, **options: Any) -> None:
        self._ask("get_file", rpath)
        with open(lpath, "wb") as file:
            file.write(super().cat_file(rpath))

    def cat_file(self, path: str, *more: Any, **options: Any) -> bytes:
        self._ask("cat_file", path)
        return super().cat_file(path, *more, **options)

    def rm_file(self, path: str) -> None:
        self._ask("rm_file", path)
        super().rm_file(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        self._ask("ls", path)
        return super().ls(path, detail=detail, **options)


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
