"""neuralforecast: LSTM."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("neuralforecast")


def make() -> Any:
    from neuralforecast.models import LSTM

    from benchmarks.lightning_modules.panels import panel

    module = LSTM(h=4, input_size=8, encoder_hidden_size=8, decoder_hidden_size=8, max_steps=18, learning_rate=1e-2)
    return module, *panel(module)
