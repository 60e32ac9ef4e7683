"""A module that asks for the version of its saved state gets it, from a file and on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import forge
from forge.testing import TinyTask, fit_tiny
from forge_plugins import Checkpoint


class Versioned(TinyTask):
    """Refuses a state without a version, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        assert metadata.get("version") == 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_a_module_with_a_version_is_resumed_and_loaded(tmp_path: Path) -> None:
    def live(**options: Any) -> Any:
        return fit_tiny([Checkpoint("4 updates")], task=Versioned(), run_dir=tmp_path, max_updates=8, **options)[0]

    whole = live()
    (tmp_path / "checkpoints" / "update-00000008").rename(tmp_path / "gone")
    again = live(resume="auto")
    assert all(map(torch.equal, whole.parameters(), again.parameters()))
    fresh = Versioned()
    forge.load_weights(fresh, tmp_path / "weights.safetensors")
    assert all(map(torch.equal, whole.parameters(), fresh.parameters()))
