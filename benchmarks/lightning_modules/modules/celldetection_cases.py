"""CellDetection."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import loader, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("CellDetection==0.4.9", needs=("albumentations==1.4.24", "seaborn", "h5py", "timm"), alone=True)


def celldetection_base() -> Any:
    """LitBase, with the step that its documentation gives."""
    import torch
    from celldetection.models.lightning_base import LitBase
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hparams: dict[str, Any] = {}
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))

        def forward(self, inputs: Any, targets: Any) -> Any:
            loss = nn.functional.mse_loss(self.layers(inputs), targets["targets"])
            return {"loss": loss, "losses": {"loss": loss}}

    class Lit(LitBase):
        def _training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs = batch.pop(self.inputs_key)
            return self.model(inputs, targets=batch)

    train = loader(inputs=numbers(16, 3, 8, 8), targets=numbers(16, 1, 8, 8, seed=1), indices=torch.arange(16))
    return Lit(Network(), warmup_steps=0, scheduler={"StepLR": {"step_size": 2}}), train, None
