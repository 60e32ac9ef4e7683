"""Cache kernel choices on disk, so that later runs choose the same without measuring."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forge_kernels import discovery
from forge_kernels.call_pattern import RecordedCall
from forge_kernels.contract import Kernel
from forge_kernels.selection import Candidate, KernelChoice

FILE = "kernels.json"
FORM = 1
"""Format version of the file; a file of another version is ignored."""


def default_folder() -> Path:
    """Return the user's cache: $XDG_CACHE_HOME/forge, or ~/.cache/forge."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "forge"


class Cache:
    """Choices by `key_of`; always empty without a folder."""

    def __init__(self, folder: Path | None):
        self.path = None if folder is None else folder / FILE
        self._known = self._read()
        self._new: dict[str, Any] = {}

    def get(self, key: str, call: RecordedCall) -> KernelChoice | None:
        """Return the choice for a call, if known."""
        entry = self._known.get(key)
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            if entry is not None:
                return KernelChoice(call, entry["kernel"], dict(entry["ms"]), str(entry["why"]))
        return None

    def put(self, key: str, choice: KernelChoice) -> None:
        self._new[key] = choice.as_data()

    def verdict(self, key: str) -> Mapping[str, Any] | None:
        """Return what was decided for a whole step, if known."""
        entry = self._known.get(key)
        return entry if isinstance(entry, dict) and {"kept", "costs"} <= entry.keys() else None

    def put_verdict(self, key: str, data: Mapping[str, Any]) -> None:
        self._new[key] = dict(data)

    def write(self) -> None:
        """Add new choices to the file, which another run may have changed; ignore errors such as a full disk."""
        if self.path is None or not self._new:
            return
        self._known = {**self._read(), **self._new}
        self._new = {}
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, beside = tempfile.mkstemp(dir=self.path.parent, prefix=f".{FILE}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"form": FORM, "choices": self._known}, file, indent=1)
                os.replace(beside, self.path)
            except BaseException:
                os.unlink(beside)
                raise

    def _read(self) -> dict[str, Any]:
        """Read the file; a missing, damaged or incompatible one counts as empty."""
        if self.path is None:
            return {}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        choices = data.get("choices") if isinstance(data, dict) and data.get("form") == FORM else None
        return choices if isinstance(choices, dict) else {}


def key_of(call: RecordedCall, candidates: list[Candidate], device: torch.device, compiled: bool) -> str:
    """Return a hash over everything that a choice depends on."""
    parts: Mapping[str, Any] = {
        "call": call.kind.as_data(),
        "candidates": {c.kernel.name: discovery.version(c.kernel) for c in candidates},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "compiled": compiled,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def step_key(calls: list[str], patterns: Sequence[Kernel], task: nn.Module, device: torch.device, memory: float) -> str:
    """Return a hash over everything that the verdict on a whole step depends on: its calls, its weights, and the
    kernels that are looked for in its graphs."""
    parts: Mapping[str, Any] = {
        "step": sorted(calls),
        "weights": [[name, list(p.shape), str(p.dtype)] for name, p in task.named_parameters()],
        "task": repr(task),
        "patterns": {kernel.name: discovery.version(kernel) for kernel in patterns},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "memory": memory,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
