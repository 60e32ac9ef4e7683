"""Many processes: the environment that strategies share, where it comes from, and what watches over it."""

from __future__ import annotations

from forge.distributed.env import DistributedEnv
from forge.distributed.setting import Setting

__all__ = ["DistributedEnv", "Setting"]
