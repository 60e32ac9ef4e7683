"""Random data, to measure speed or try a recipe without its data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from forge.data import Splits, TensorLoader, TokenStream
from forge.errors import DataError


def images(
    batch_size: int = 128,
    size: int = 32,
    channels: int = 3,
    classes: int = 10,
    samples: int = 12800,
    flat: bool = False,
) -> Splits:
    """Make random images and labels, the same in every run; `flat` gives vectors."""
    make = torch.Generator().manual_seed(1998)
    shape = (samples, channels * size * size) if flat else (samples, channels, size, size)
    pixels, labels = torch.randn(shape, generator=make), torch.randint(classes, (samples,), generator=make)
    held_out = max(1, samples // 10)
    return Splits(
        train=TensorLoader(pixels[held_out:], labels[held_out:], batch_size=batch_size, shuffle=True, drop_last=True),
        val=TensorLoader(pixels[:held_out], labels[:held_out], batch_size=batch_size),
    )


def tokens(
    path: str | None = None,
    val_path: str | None = None,
    window: int = 1024,
    batch_size: int = 64,
    vocabulary: int = 50257,
    samples: int = 64_000,
) -> Splits:
    """Make windows of tokens, of a file of uint16 tokens if given, else random ones."""
    if path is not None:
        for file in filter(None, (path, val_path)):
            if not Path(file).exists():
                raise DataError(f"tokens: the file {file} does not exist. It holds raw little-endian uint16 tokens.")
        train = TokenStream(path, window=window, batch_size=batch_size, mode="random", drop_last=True)
        val = TokenStream(val_path, window=window, batch_size=batch_size, mode="sequential") if val_path else None
        return Splits(train=train, val=val)
    # few are common and most are rare, as in a language
    ranks = np.random.default_rng(1998).zipf(1.2, size=4_000_000) % vocabulary
    stream = ranks.astype(np.uint16 if vocabulary <= 2**16 else np.uint32)
    return Splits(
        train=TokenStream(stream[200_000:], window=window, batch_size=batch_size, samples=samples, drop_last=True),
        val=TokenStream(stream[:200_000], window=window, batch_size=batch_size, mode="sequential"),
    )
