"""Built-in plugins, found through entry points like those of third parties.

`from forge_plugins import Clip` imports only the module of that plugin.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forge import registry
from forge.contract.plugin import snake_case

if TYPE_CHECKING:
    from forge_plugins.accumulate import Accumulate
    from forge_plugins.amp import AMP
    from forge_plugins.anomaly import Anomaly
    from forge_plugins.backends import Backends
    from forge_plugins.channels_last import ChannelsLast
    from forge_plugins.checkpoint import Checkpoint
    from forge_plugins.clip import Clip
    from forge_plugins.compile import Compile
    from forge_plugins.csv import CSV
    from forge_plugins.cuda_graph import CudaGraph
    from forge_plugins.ddp import DDP
    from forge_plugins.duration import Duration
    from forge_plugins.early_stop import EarlyStop
    from forge_plugins.ema import EMA
    from forge_plugins.freeze import Freeze
    from forge_plugins.fsdp import FSDP
    from forge_plugins.fused_optimizer import FusedOptimizer
    from forge_plugins.guard import Guard
    from forge_plugins.jsonl import JSONL
    from forge_plugins.ledger import Ledger
    from forge_plugins.limit import Limit
    from forge_plugins.mlflow import Mlflow
    from forge_plugins.monitor import Monitor
    from forge_plugins.prefetch import Prefetch
    from forge_plugins.profiler import Profiler
    from forge_plugins.progress import Progress
    from forge_plugins.remat import Remat
    from forge_plugins.sam import SAM
    from forge_plugins.schedule import Schedule
    from forge_plugins.swa import SWA
    from forge_plugins.tensor_parallel import TensorParallel
    from forge_plugins.tensorboard import Tensorboard
    from forge_plugins.throughput import Throughput
    from forge_plugins.validate_first import ValidateFirst
    from forge_plugins.wandb import Wandb

__all__ = [
    "AMP",
    "CSV",
    "DDP",
    "EMA",
    "FSDP",
    "JSONL",
    "SAM",
    "SWA",
    "Accumulate",
    "Anomaly",
    "Backends",
    "ChannelsLast",
    "Checkpoint",
    "Clip",
    "Compile",
    "CudaGraph",
    "Duration",
    "EarlyStop",
    "Freeze",
    "FusedOptimizer",
    "Guard",
    "Ledger",
    "Limit",
    "Mlflow",
    "Monitor",
    "Prefetch",
    "Profiler",
    "Progress",
    "Remat",
    "Schedule",
    "TensorParallel",
    "Tensorboard",
    "Throughput",
    "ValidateFirst",
    "Wandb",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"forge_plugins.{snake_case(name)}"), name)
    if name.startswith("_") or snake_case(name) not in registry.installed("plugin"):
        raise AttributeError(registry.to_install("plugin", snake_case(name)) or f"forge_plugins has no {name!r}")
    plugin = registry.load("plugin", snake_case(name))
    warnings.warn(f"{name} moved: from {plugin.__module__} import {name}", DeprecationWarning, stacklevel=2)
    return plugin
