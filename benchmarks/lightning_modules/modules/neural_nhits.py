"""neuralforecast: NHITS."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("neuralforecast")


def make() -> Any:
    from neuralforecast.models import NHITS

    from benchmarks.lightning_modules.panels import panel

    module = NHITS(
        h=4, input_size=8, mlp_units=[[16, 16]] * 3, max_steps=18, learning_rate=1e-2, scaler_type="identity"
    )
    return module, *panel(module)
