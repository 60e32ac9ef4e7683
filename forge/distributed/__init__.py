"""Distributed training: the environment of strategies, joining and launching ranks, and detecting failed ones.

Names load on first use, so that the command line reads exit codes without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.distributed.rank_env import DistributedEnv
    from forge.distributed.rank_info import RankInfo

__all__ = ["DistributedEnv", "RankInfo"]

_HOME = {"DistributedEnv": "forge.distributed.rank_env", "RankInfo": "forge.distributed.rank_info"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forge.distributed' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
