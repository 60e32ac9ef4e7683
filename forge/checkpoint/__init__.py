from __future__ import annotations

from forge.checkpoint.checkpoint import Checkpoint
from forge.checkpoint.folder import Checkpoints
from forge.checkpoint.placing import placed_like
from forge.checkpoint.publish import write_checkpoint
from forge.checkpoint.tree import check_savable
from forge.checkpoint.weights import load_weights, save_weights
from forge.checkpoint.write_sharded import write_together
from forge.checkpoint.writer import BackgroundWriter, settle
from forge.checkpoint.writers import Team

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "Checkpoints",
    "Team",
    "check_savable",
    "load_weights",
    "placed_like",
    "save_weights",
    "settle",
    "write_checkpoint",
    "write_together",
]
