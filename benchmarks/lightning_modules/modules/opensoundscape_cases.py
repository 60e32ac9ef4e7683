"""opensoundscape."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import Batches, numbers
from benchmarks.lightning_modules.places import Package

PACKAGE = Package(
    "opensoundscape==0.13.2",
    needs=("aru-metadata-parser", "librosa", "noisereduce", "pywavelets", "Deprecated", "soundfile", "torchaudio"),
    alone=True,
)


def opensoundscape_spectrograms() -> Any:
    """LightningSpectrogramModule: batches are lists of AudioSample."""
    import pandas as pd
    from opensoundscape.ml.lightning import LightningSpectrogramModule
    from opensoundscape.sample import AudioSample
    from torch import nn

    network = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.add_module("head", nn.Linear(4, 2))
    network.classifier_layer = "head"  # pyright: ignore[reportArgumentType]
    network.constructor_name = "small"  # pyright: ignore[reportArgumentType]
    module = LightningSpectrogramModule(architecture=network, classes=["a", "b"], sample_duration=1, sample_rate=8000)

    def batch(seed: int) -> list[Any]:
        samples = []
        for i, picture in enumerate(numbers(4, 1, 16, 16, seed=seed)):
            sample = AudioSample(source=f"{seed}-{i}", labels=pd.Series({"a": i % 2, "b": 1 - i % 2}))
            sample.data = picture
            samples.append(sample)
        return samples

    return module, Batches([batch(0), batch(1)]), None
