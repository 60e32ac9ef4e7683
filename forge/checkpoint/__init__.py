from __future__ import annotations

from forge.checkpoint.checkpoint import StoredCheckpoint
from forge.checkpoint.folder import Checkpoints
from forge.checkpoint.placing import placed_like
from forge.checkpoint.publish import write_checkpoint
from forge.checkpoint.publish_sharded import write_sharded
from forge.checkpoint.tree import check_savable
from forge.checkpoint.weights import load_weights, save_weights
from forge.checkpoint.writer import BackgroundWriter, DirectWriter, wait_until_written
from forge.checkpoint.writers import Writers

__all__ = [
    "BackgroundWriter",
    "Checkpoints",
    "DirectWriter",
    "StoredCheckpoint",
    "Writers",
    "check_savable",
    "load_weights",
    "placed_like",
    "save_weights",
    "wait_until_written",
    "write_checkpoint",
    "write_sharded",
]
