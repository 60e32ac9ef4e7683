"""The samples with the largest losses, as a person can look at them."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge_doctor.experiments.intervene import with_rows_changed
from forge_doctor.patient import Patient, loss_of, tensors

SHADES = " .:-=+*#%@"
FAR = 6
"""How many times the median a loss must be to stand out."""
SAMPLES, SHOWN, COLUMNS = 64, 3, 32
"""How many samples are ranked, how many are shown, and how wide a picture is in characters."""


def worst_samples(patient: Patient) -> list[dict[str, Any]]:
    """Rank the samples of the first batch by their losses, each alone, in evaluation mode; the largest first."""
    batch = patient.batches[0]
    size = batch_size(batch)
    if size is None or size < 8 or not patient.is_supervised:
        return []
    task = patient.clone().eval()
    losses: list[float] = []
    with torch.no_grad():
        for i in range(min(size, SAMPLES)):
            one = with_rows_changed(batch, size, lambda x, i=i: x[i : i + 1])
            losses.append(float(loss_of(patient.run(task, one))))
    typical = median(losses)
    order = sorted(range(len(losses)), key=lambda i: -losses[i])[:SHOWN]
    far = {i: with_rows_changed(batch, size, lambda x, i=i: x[i]) for i in order if losses[i] > FAR * typical}
    return [{"sample": i, "loss": losses[i], "median": typical, "shown": shown(one)} for i, one in far.items()]


def shown(sample: Any) -> str:
    """A sample as text: pictures in shades, short vectors and numbers as they are, the rest by its shape."""
    return "\n".join(_as_text(x.detach().cpu()) for x in tensors(sample))


def _as_text(x: Tensor) -> str:
    if x.numel() == 1:
        return f"{x.item():g}"
    if x.ndim == 3 and x.shape[0] in (1, 3, 4) and min(x.shape[1:]) >= 8:
        return picture(x)
    if x.ndim == 1 and x.numel() <= 64:
        return " ".join(f"{value:.3g}" for value in x.tolist())
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def picture(x: Tensor) -> str:
    """A picture of channels, rows and columns in shades of characters, twice as wide as high."""
    grey = x.float().mean(0)
    low, high = float(grey.min()), float(grey.max())
    width = min(COLUMNS, 2 * x.shape[2])
    height = max(1, round(width * x.shape[1] / x.shape[2] / 2))
    small = torch.nn.functional.adaptive_avg_pool2d(grey[None], (height, width))[0]
    index = ((small - low) / max(high - low, 1e-12) * (len(SHADES) - 1)).round().long()
    return "\n".join("".join(SHADES[i] for i in row) for row in index.tolist())
