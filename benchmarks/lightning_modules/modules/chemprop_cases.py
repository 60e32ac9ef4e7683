"""chemprop."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("chemprop")


def chemprop_mpnn() -> Any:
    """MPNN on a few molecules."""
    import numpy as np
    from chemprop import data, models, nn

    smiles = ["C" * n + tail for n in range(1, 9) for tail in ("", "O", "N", "=O")]
    points = [data.MoleculeDatapoint.from_smi(text, np.array([float(len(text))])) for text in smiles]
    train, val = data.MoleculeDataset(points[:24]), data.MoleculeDataset(points[24:])
    module = models.MPNN(
        nn.BondMessagePassing(d_h=16, dropout=0.1), nn.MeanAggregation(), nn.RegressionFFN(input_dim=16)
    )
    loaders = [data.build_dataloader(each, batch_size=8, shuffle=False, num_workers=0) for each in (train, val)]
    return module, *loaders
