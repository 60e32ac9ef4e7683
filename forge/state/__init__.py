"""State: what a run is made of, captured at one consistent point; verified checkpoints of it; and weights as a file."""

from __future__ import annotations

from forge.state.capture import capture
from forge.state.checkpoint import Checkpoint
from forge.state.folder import Checkpoints
from forge.state.lock import RunLock
from forge.state.placing import placed_like
from forge.state.publish import write_checkpoint
from forge.state.team import Team
from forge.state.together import write_together
from forge.state.tree import check_savable
from forge.state.weights import load_weights, save_weights
from forge.state.writer import BackgroundWriter, settle

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "Checkpoints",
    "RunLock",
    "Team",
    "capture",
    "check_savable",
    "load_weights",
    "placed_like",
    "save_weights",
    "settle",
    "write_checkpoint",
    "write_together",
]
