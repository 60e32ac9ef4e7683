"""gluonts: SimpleFeedForwardLightningModule."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("gluonts", needs=("gluonts[torch]",))


def make() -> Any:
    from gluonts.torch.model.simple_feedforward.lightning_module import SimpleFeedForwardLightningModule

    module = SimpleFeedForwardLightningModule({"prediction_length": 4, "context_length": 12, "hidden_dimensions": [16]})

    def series(count: int, seed: int) -> Any:
        values = numbers(count, 16, seed=seed).cumsum(1)
        seen = values.new_ones(count, 16)
        return loader(
            past_target=values[:, :12],
            past_observed_values=seen[:, :12],
            future_target=values[:, 12:],
            future_observed_values=seen[:, 12:],
        )

    return module, series(48, 0), series(16, 1)
