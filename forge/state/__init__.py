"""State: what a run is made of, captured at one consistent point; and weights as a file."""

from __future__ import annotations

from forge.state.capture import capture
from forge.state.weights import load_weights, save_weights

__all__ = ["capture", "load_weights", "save_weights"]
