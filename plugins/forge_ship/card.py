"""The card of an export, `FILE.export.json`: what a file is, where it comes from, and what its verification found."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from forge.errors import ForgeError
from forge.util.files import read_regular
from forge.util.text import format_bytes
from forge.version import __version__, newer
from forge_ship.engine import ExportError, Port, row_bytes
from forge_ship.export_formats import formats

VERSION = 1
"""The version of the card's format."""
NAME = "export.json"
"""How the names of cards end."""
MOST = 1 << 20
"""Bytes that a card may have."""
MOST_ROW = 1 << 30
"""Bytes that one row of all tensors of a card may have."""
VERSIONS = ("torch", "torchao", "onnx", "onnxscript", "onnxruntime", "executorch")
DTYPES = frozenset(
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128".split()  # noqa: SIM905
)


def versions(libraries: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions of what an export depends on."""
    found = {"forge": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in (*VERSIONS, *libraries):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hashed(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def port_as_dict(port: Port) -> dict[str, Any]:
    seen = {axis: list(sizes) for axis, sizes in (port.seen or {}).items()}
    return {**asdict(port), "shape": list(port.shape), "seen": seen}


def place_of(file: Path) -> Path:
    """Return where the card of a file belongs: beside it, under its name."""
    return file.with_name(f"{file.name}.{NAME}")


def is_card(path: Path) -> bool:
    return path.name.endswith(f".{NAME}")


def write(card: Mapping[str, Any], file: Path) -> None:
    place_of(file).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


class CheckedCard:
    """The card of a file, read from a place that is not trusted: types and names are checked, and the file's hash."""

    def __init__(self, file: Path):
        self.file, self.place = file, place_of(file)
        self.values = _read(self.place)
        if line := newer(self.values.get("version"), VERSION, str(self.place)):
            raise ExportError(line)
        self.format = self._word("format")
        if self.format not in formats():
            raise self._refused(f"the format {self.format!r} is unknown")
        self.libraries = self.values.get("libraries", [])
        if not isinstance(self.libraries, list) or not all(isinstance(name, str) for name in self.libraries):
            raise self._refused("libraries is no list of names")
        self.inputs, self.outputs = self._ports("inputs"), self._ports("outputs")
        if row_bytes([*self.inputs, *self.outputs]) > MOST_ROW:
            raise self._refused(f"one row of its tensors would take more than {format_bytes(MOST_ROW)}")
        files = self.values.get("files")
        self._noted = files.get(file.name) if isinstance(files, dict) else None
        if not isinstance(self._noted, dict):
            raise self._refused(f"it does not describe {file.name}")

    def check_hash(self) -> None:
        """Refuse a file that is not the one which was verified."""
        assert isinstance(self._noted, dict)
        if not self.file.is_file() or hashed(self.file)["sha256"] != self._noted.get("sha256"):
            raise ExportError(
                f"{self.file} is not the file that {self.place.name} describes: its hash differs. Export again."
            )

    def _word(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or len(value) > 100:
            raise self._refused(f"{key} is no word")
        return value

    def _ports(self, key: str) -> Sequence[Port]:
        listed = self.values.get(key)
        if not isinstance(listed, list) or not 0 < len(listed) <= 1000:
            raise self._refused(f"{key} is no list of tensors")
        return [self._port(item, key) for item in listed]

    def _port(self, item: Any, key: str) -> Port:
        item = item if isinstance(item, dict) else {}
        name, dtype, shape = item.get("name"), item.get("dtype"), item.get("shape")
        if not isinstance(name, str) or not name.isidentifier() or dtype not in DTYPES or not isinstance(shape, list):
            raise self._refused(f"{key} has an entry without a name, a dtype and a shape")
        if not all(isinstance(size, str) or _is_size(size) for size in shape) or len(shape) > 32:
            raise self._refused(f"the shape of {name} is no list of sizes")
        return Port(name, dtype, tuple(shape), self._seen(item.get("seen"), shape))

    def _seen(self, values: Any, shape: list[Any]) -> dict[str, tuple[int, int]]:
        """Return the sizes that the data had, of axes that the shape names."""
        pairs = values.items() if isinstance(values, dict) else ()
        return {
            axis: (pair[0], pair[1])
            for axis, pair in pairs
            if axis in shape and isinstance(pair, list) and len(pair) == 2 and all(map(_is_size, pair))
        }

    def _refused(self, why: str) -> ExportError:
        return ExportError(f"{self.place} is no card of an export: {why}.")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_regular(file, MOST))
    except (OSError, ValueError, RecursionError, ForgeError) as error:
        if not file.exists():
            raise ExportError(
                f"There is no {file}: forge runs files that `forge export` wrote, with their card beside them."
            ) from error
        raise ExportError(f"{file} cannot be read as a card: {error}") from error
    if not isinstance(values, dict):
        raise ExportError(f"{file} cannot be read as a card: it is no JSON object.")
    return values
