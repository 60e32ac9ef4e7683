"""Built-in plugins, found through entry points like those of third parties.

`from forge_plugins import Clip` imports only the module of that plugin.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forge.contract.plugin import snake_case

if TYPE_CHECKING:
    from forge_cluster.context_parallel import ContextParallel
    from forge_cluster.pipeline import Pipeline
    from forge_cluster.torchft import Torchft
    from forge_cluster.zero import Zero
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
    from forge_ship.qat import QAT
    from forge_speed.fp8 import FP8
    from forge_speed.kernels import Kernels

__all__ = [
    "AMP",
    "CSV",
    "DDP",
    "EMA",
    "FP8",
    "FSDP",
    "JSONL",
    "QAT",
    "SAM",
    "SWA",
    "Accumulate",
    "Anomaly",
    "Backends",
    "ChannelsLast",
    "Checkpoint",
    "Clip",
    "Compile",
    "ContextParallel",
    "CudaGraph",
    "Duration",
    "EarlyStop",
    "Freeze",
    "FusedOptimizer",
    "Guard",
    "Kernels",
    "Ledger",
    "Limit",
    "Mlflow",
    "Monitor",
    "Pipeline",
    "Prefetch",
    "Profiler",
    "Progress",
    "Remat",
    "Schedule",
    "TensorParallel",
    "Tensorboard",
    "Throughput",
    "Torchft",
    "ValidateFirst",
    "Wandb",
    "Zero",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'forge_plugins' has no attribute {name!r}")
    return getattr(import_module(f"forge_plugins.{snake_case(name)}"), name)
