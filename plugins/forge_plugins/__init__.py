"""forge's own plugins, one file each, discovered through entry points like a third party's.

`from forge_plugins import Clip` imports only that plugin's file.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_plugins.accumulate import Accumulate
    from forge_plugins.anomaly import Anomaly
    from forge_plugins.checkpoint import Checkpoint
    from forge_plugins.clip import Clip
    from forge_plugins.guard import Guard
    from forge_plugins.jsonl import JSONL
    from forge_plugins.prefetch import Prefetch
    from forge_plugins.progress import Progress
    from forge_plugins.schedule import Schedule
    from forge_plugins.tensorboard import Tensorboard

__all__ = [
    "JSONL",
    "Accumulate",
    "Anomaly",
    "Checkpoint",
    "Clip",
    "Guard",
    "Prefetch",
    "Progress",
    "Schedule",
    "Tensorboard",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'forge_plugins' has no attribute {name!r}")
    return getattr(import_module(f"forge_plugins.{name.lower()}"), name)
