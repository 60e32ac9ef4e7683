"""Directions of metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from forge_doctor.probes import measures
from tests.support.patients import Healthy, found


class Plateau(Healthy):
    monitor = "val/loss"

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return optimizer, ReduceLROnPlateau(optimizer, mode=self.mode), self.monitor


class ByAccuracy(Plateau):
    monitor = "val/accuracy"


def test_a_plateau_of_the_wrong_direction() -> None:
    assert "wrong_mode" in found(Plateau("max"), measures.modes)
    assert "wrong_mode" in found(ByAccuracy("min"), measures.modes)
    assert found(Plateau("min"), measures.modes) == found(ByAccuracy("max"), measures.modes) == {}


@pytest.mark.parametrize(("mode", "wrong"), [("max", 1), ("min", 0), (None, 0)])
def test_a_plugin_of_the_wrong_direction(mode: Any, wrong: int) -> None:
    best = {"monitor": "val/loss", "mode": mode}
    plugin = SimpleNamespace(name="checkpoint", config={"best": best, "keep": 2})
    patient: Any = SimpleNamespace(plugins=[plugin], trainer=SimpleNamespace(optimizers=SimpleNamespace(entries={})))
    assert [finding.where for finding in measures.modes(patient)] == ["checkpoint.best"] * wrong
