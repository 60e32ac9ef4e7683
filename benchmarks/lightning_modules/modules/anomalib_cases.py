"""anomalib."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.lightning_modules.draw import numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("anomalib")


def anomalib_ganomaly() -> Any:
    """Ganomaly, with the callbacks of its configure_callbacks."""
    from anomalib.models import Ganomaly

    size = Ganomaly.configure_pre_processor(image_size=(64, 64))
    module = Ganomaly(batch_size=4, n_features=8, latent_vec_size=8, pre_processor=size, visualizer=False)
    return module, *_anomalies()


def anomalib_reverse_distillation() -> Any:
    """ReverseDistillation, with the callbacks of its configure_callbacks."""
    from anomalib.models import ReverseDistillation

    size = ReverseDistillation.configure_pre_processor(image_size=(64, 64))
    module = ReverseDistillation(backbone="resnet18", pre_trained=False, pre_processor=size, visualizer=False)
    return module, *_anomalies()


class _Pictures(Dataset[Any]):
    """Pictures as anomalib's items; every fourth of a test set is an anomaly."""

    def __init__(self, count: int, normal: bool):
        self.pixels, self.normal = numbers(count, 3, 64, 64, seed=count).sigmoid(), normal

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Any:
        from anomalib.data import ImageItem

        odd = not self.normal and index % 4 == 0
        mask = torch.zeros(64, 64, dtype=torch.bool)
        mask[:16, :16] = odd
        return ImageItem(image=self.pixels[index], gt_label=torch.tensor(int(odd)), gt_mask=mask, image_path=str(index))


def _anomalies() -> list[Any]:
    """Return a train and a val loader."""
    from anomalib.data import ImageBatch

    def loader(count: int, normal: bool) -> Any:
        return DataLoader(_Pictures(count, normal), batch_size=4, collate_fn=ImageBatch.collate)

    return [loader(12, True), loader(8, False)]
