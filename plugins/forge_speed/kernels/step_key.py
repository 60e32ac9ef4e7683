"""The key of a verdict on disk: later runs with the same step use the same kernels without measuring."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from forge_kernels import discovery
from forge_kernels.contract import Kernel


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
        "triton": discovery.package_version("triton"),
        "compiled": compiled,
        "memory": memory,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
