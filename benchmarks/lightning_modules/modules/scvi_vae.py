"""scvi-tools: the training plan of SCVI, a variational autoencoder that draws in validation too."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("scvi-tools")


def make() -> Any:
    from benchmarks.lightning_modules.cells import plan

    return plan("SCVI")
