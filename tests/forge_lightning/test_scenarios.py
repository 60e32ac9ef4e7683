"""What Lightning's own Trainer does, forge does with the same module: weights, hooks, rates, metrics, stops, files."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch")
pytest.importorskip("torchmetrics")

from tests.forge_lightning.both import assert_alike
from tests.forge_lightning.scenarios import all_scenarios

SCENARIOS = all_scenarios()
QUICK = {
    *("schedule-step-epoch-2", "update-adam-3-norm", "validate-every-2-of-4-batches", "checkpoint-top-2-min", "hooks"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow,)) for name in SCENARIOS]
)
def test_the_outcome_is_lightnings(name: str, tmp_path: Path) -> None:
    assert_alike(SCENARIOS[name], tmp_path)
