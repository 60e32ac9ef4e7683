"""Keep verdicts on disk, so that later runs with the same step use the same kernels without measuring."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forge_kernels import discovery
from forge_kernels.contract import Kernel

FILE = "kernels.json"
FORM = 2
"""Format version of the file; a file of another version is ignored."""


def default_folder() -> Path:
    """Return the user's cache: $XDG_CACHE_HOME/forge, or ~/.cache/forge."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "forge"


class Cache:
    """Verdicts by `step_key`; always empty without a folder."""

    def __init__(self, folder: Path | None):
        self.path = None if folder is None else folder / FILE

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Return what was decided for a step, if known."""
        entry = self._read().get(key)
        return entry if isinstance(entry, dict) and {"kept", "costs"} <= entry.keys() else None

    def put(self, key: str, data: Mapping[str, Any]) -> None:
        """Add a verdict to the file, which another run may have changed; ignore errors such as a full disk."""
        if self.path is None:
            return
        known = {**self._read(), key: dict(data)}
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, beside = tempfile.mkstemp(dir=self.path.parent, prefix=f".{FILE}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"form": FORM, "steps": known}, file, indent=1)
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
        steps = data.get("steps") if isinstance(data, dict) and data.get("form") == FORM else None
        return steps if isinstance(steps, dict) else {}


def step_key(
    kinds: Iterable[str],
    kernels: Iterable[Kernel],
    task: nn.Module,
    device: torch.device,
    compiled: bool,
    memory: float,
) -> str:
    """Return a hash over everything that the verdict on a step depends on: its calls, its weights, and the kernels that
    it may get."""
    parts: Mapping[str, Any] = {
        "calls": sorted(kinds),
        "weights": [[name, list(p.shape), str(p.dtype)] for name, p in task.named_parameters()],
        "task": repr(task),
        "kernels": {kernel.name: discovery.version(kernel) for kernel in kernels},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "compiled": compiled,
        "memory": memory,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
