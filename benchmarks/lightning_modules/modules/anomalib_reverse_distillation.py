"""anomalib: ReverseDistillation, with the callbacks of its configure_callbacks."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("anomalib")


def make() -> Any:
    from anomalib.models import ReverseDistillation

    from benchmarks.lightning_modules.pictures import anomalies

    module = ReverseDistillation(
        backbone="resnet18",
        pre_trained=False,
        pre_processor=ReverseDistillation.configure_pre_processor(image_size=(64, 64)),
        visualizer=False,
    )
    return module, *anomalies()
