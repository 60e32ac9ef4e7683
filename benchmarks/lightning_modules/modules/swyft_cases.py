"""swyft."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("swyft==0.4.5", needs=("scipy<1.14", "zarr", "torchist", "fasteners", "toolz"), alone=True)


def swyft_ratios() -> Any:
    """SwyftModule with a ratio estimator, as in its tutorials."""
    import swyft

    class Network(swyft.SwyftModule):
        def __init__(self) -> None:
            super().__init__()
            self.ratios = swyft.LogRatioEstimator_1dim(num_features=3, num_params=2, varnames="z")

        def forward(self, A: Any, B: Any) -> Any:
            return self.ratios(A["x"], B["z"])

    return Network(), loader(x=numbers(16, 3), z=numbers(16, 2, seed=1)), loader(x=numbers(8, 3), z=numbers(8, 2))
