"""anomalib: Ganomaly, with the callbacks of its configure_callbacks."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("anomalib")


def make() -> Any:
    from anomalib.models import Ganomaly

    from benchmarks.lightning_modules.pictures import anomalies

    module = Ganomaly(
        batch_size=4,
        n_features=8,
        latent_vec_size=8,
        pre_processor=Ganomaly.configure_pre_processor(image_size=(64, 64)),
        visualizer=False,
    )
    return module, *anomalies()
