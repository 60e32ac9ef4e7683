"""Built-in plugins, found through entry points like those of third parties.

`from forge_plugins import Clip` imports only the module of that plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge import registry
from forge.contract.plugin import snake_case

if TYPE_CHECKING:
    from forge_plugins.accumulate import Accumulate as Accumulate
    from forge_plugins.amp import AMP as AMP
    from forge_plugins.anomaly import Anomaly as Anomaly
    from forge_plugins.averaging.ema import EMA as EMA
    from forge_plugins.averaging.swa import SWA as SWA
    from forge_plugins.backends import Backends as Backends
    from forge_plugins.channels_last import ChannelsLast as ChannelsLast
    from forge_plugins.checkpoint import Checkpoint as Checkpoint
    from forge_plugins.clip import Clip as Clip
    from forge_plugins.compile import Compile as Compile
    from forge_plugins.csv import CSV as CSV
    from forge_plugins.cuda_graph import CudaGraph as CudaGraph
    from forge_plugins.ddp import DDP as DDP
    from forge_plugins.duration import Duration as Duration
    from forge_plugins.early_stop import EarlyStop as EarlyStop
    from forge_plugins.freeze import Freeze as Freeze
    from forge_plugins.fsdp import FSDP as FSDP
    from forge_plugins.fused_optimizer import FusedOptimizer as FusedOptimizer
    from forge_plugins.guard import Guard as Guard
    from forge_plugins.jsonl import JSONL as JSONL
    from forge_plugins.limit import Limit as Limit
    from forge_plugins.mlflow import Mlflow as Mlflow
    from forge_plugins.monitor import Monitor as Monitor
    from forge_plugins.prefetch import Prefetch as Prefetch
    from forge_plugins.profiler import Profiler as Profiler
    from forge_plugins.progress import Progress as Progress
    from forge_plugins.rehearse import Rehearse as Rehearse
    from forge_plugins.remat import Remat as Remat
    from forge_plugins.sam import SAM as SAM
    from forge_plugins.schedule import Schedule as Schedule
    from forge_plugins.spans import Spans as Spans
    from forge_plugins.system import System as System
    from forge_plugins.tensor_parallel import TensorParallel as TensorParallel
    from forge_plugins.tensorboard import Tensorboard as Tensorboard
    from forge_plugins.validate_first import ValidateFirst as ValidateFirst
    from forge_plugins.wandb import Wandb as Wandb


def __getattr__(name: str) -> Any:
    plugins = registry.installed("plugin")
    if name == "__all__":
        return sorted(entry.attr for entry in plugins.values() if entry.module.startswith("forge_plugins."))
    entry = plugins.get(snake_case(name))
    if entry is None or entry.attr != name or not entry.module.startswith("forge_plugins."):
        raise AttributeError(registry.to_install("plugin", snake_case(name)) or f"forge_plugins has no {name!r}")
    return registry.load("plugin", snake_case(name))
