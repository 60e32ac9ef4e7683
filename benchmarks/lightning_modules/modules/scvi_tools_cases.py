"""scvi-tools."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("scvi-tools")


def scvi_adversarial() -> Any:
    """The adversarial plan, with two optimizers and manual optimization."""
    return _plan("SCVI", adversarial=True)


def scvi_vae() -> Any:
    """The training plan of SCVI, a variational autoencoder that draws in validation too."""
    return _plan("SCVI")


def _plan(model: str, adversarial: bool = False) -> Any:
    """Return (a training plan of scvi-tools, train loader, val loader)."""
    import anndata
    import scvi
    from scvi.dataloaders import AnnDataLoader
    from scvi.train import AdversarialTrainingPlan, TrainingPlan

    draw = np.random.default_rng(0)
    counts = draw.poisson(2.0, size=(80, 30)).astype(np.float32)
    data = anndata.AnnData(counts)
    data.obs["batch"] = [str(i % 2) for i in range(80)]
    kind = getattr(scvi.model, model)
    kind.setup_anndata(data, batch_key="batch")
    made = kind(data, n_latent=4, n_hidden=16)
    if adversarial:
        module: Any = AdversarialTrainingPlan(made.module, adversarial_classifier=True)
    else:
        module = TrainingPlan(made.module, n_epochs_kl_warmup=2)
    loaders = [
        AnnDataLoader(made.adata_manager, indices=list(part), batch_size=16, shuffle=False)
        for part in (range(64), range(64, 80))
    ]
    return module, *loaders
