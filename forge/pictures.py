"""Pictures for the log: a grid of images with captions, and a confusion matrix; drawn with Pillow, no plotting library.

::

    def evaluation_end(self, stage):
        return {"samples": pictures.grid(self.samples, captions), "confusion": pictures.confusion(self.counts, names)}
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge.errors import TaskError
from forge.metrics import Image

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

GAP = 6
"""Pixels between things."""
LEAST = 64
"""Smaller images are enlarged, by a whole number, to at least so many pixels."""
CELL = 44
INK, PAPER = (32, 32, 32), (255, 255, 255)
FULL = (22, 82, 150)
"""The colour of a cell that holds all of its row."""


def grid(images: Tensor, captions: Sequence[str] = (), columns: int = 8) -> Image:
    """Images side by side, each above its caption, which may have several lines.

    `images` is (N, 1 or 3, H, W) or (N, H, W): floats in [0, 1], or uint8. Small ones are enlarged.
    """
    pixels = _pixels(images)
    count, height, width, _ = pixels.shape
    if captions and len(captions) != count:
        raise TaskError(f"pictures.grid got {count} images and {len(captions)} captions; give one for each, or none.")
    if columns < 1:
        raise TaskError(f"pictures.grid: columns is {columns}; it must be at least 1.")
    pen = _pen(_canvas(1, 1))
    sizes = [_size(pen, caption) for caption in set(captions)] or [(0, 0)]
    tile = max(width, *(size[0] for size in sizes)) + GAP, height + max(size[1] for size in sizes) + GAP
    columns = min(columns, count)
    canvas = _canvas(tile[0] * columns + GAP, tile[1] * -(-count // columns) + GAP)
    pen = _pen(canvas)
    for place in range(count):
        left, top = GAP + tile[0] * (place % columns), GAP + tile[1] * (place // columns)
        canvas.paste(_from_array(pixels[place]), (left, top))
        if captions:
            pen.text((left, top + height), captions[place], fill=INK, font=_font(), spacing=1)
    return _image(canvas)


def confusion(counts: Tensor, names: Sequence[str]) -> Image:
    """A confusion matrix: `counts[i, j]` samples are `names[i]` and were taken for `names[j]`.

    A cell is the darker the larger its share of its row; a cell of nothing is left empty.
    """
    classes = len(names)
    if tuple(counts.shape) != (classes, classes):
        raise TaskError(f"pictures.confusion got counts of shape {tuple(counts.shape)} for {classes} names.")
    counts = counts.detach().cpu()
    shares = (counts / counts.sum(1, keepdim=True).clamp(min=1)).tolist()
    pen = _pen(_canvas(1, 1))
    margin = max(_size(pen, name)[0] for name in names) + 2 * GAP
    heading = _size(pen, "y")[1] + GAP
    canvas = _canvas(heading + margin + classes * CELL + GAP, heading + margin + classes * CELL + GAP)
    pen = _pen(canvas)
    left = top = heading + margin
    pen.text((left, GAP), "predicted", fill=INK, font=_font())
    _write_upwards(canvas, "true", (GAP, top))
    for i, name in enumerate(names):
        pen.text((left - GAP, top + i * CELL + CELL // 2), name, fill=INK, font=_font(), anchor="rm")
        _write_upwards(canvas, name, (left + i * CELL + CELL // 2 - heading // 2, top - GAP), from_below=True)
        for j, count in enumerate(counts[i].tolist()):
            corner = left + j * CELL, top + i * CELL
            share = shares[i][j]
            colour = tuple(round(a + (b - a) * share) for a, b in zip(PAPER, FULL, strict=True))
            pen.rectangle((*corner, corner[0] + CELL - 2, corner[1] + CELL - 2), fill=colour)
            if count:
                middle = corner[0] + CELL // 2 - 1, corner[1] + CELL // 2 - 1
                pen.text(middle, f"{count:g}", fill=PAPER if share > 0.5 else INK, font=_font(), anchor="mm")
    return _image(canvas)


# ---------------------------------------------------------------------------------------------------------------------
# Pillow is imported where it is used: whoever draws nothing needs none.


def _pixels(images: Tensor) -> Tensor:
    """Images as uint8 (N, H, W, 3), enlarged where they are small."""
    given = tuple(images.shape)
    if images.ndim == 3:
        images = images.unsqueeze(1)
    if images.ndim != 4 or images.size(1) not in (1, 3) or not images.numel():
        raise TaskError(f"pictures.grid got images of shape {given}; it takes (N, 1 or 3, H, W) or (N, H, W).")
    images = images.detach().cpu()
    if images.dtype != torch.uint8:
        images = (images.float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    scale = max(1, -(-LEAST // max(images.shape[2:])))
    large = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    return large.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous()


def _canvas(width: int, height: int) -> Any:
    from PIL import Image as Pillow

    return Pillow.new("RGB", (width, height), PAPER)


def _from_array(pixels: Tensor) -> Any:
    from PIL import Image as Pillow

    return Pillow.fromarray(pixels.numpy())


def _pen(canvas: Any) -> ImageDraw:
    from PIL import ImageDraw

    return ImageDraw.Draw(canvas)


@cache  # reading a font takes longer than writing with it
def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(16)


def _size(pen: ImageDraw, text: str) -> tuple[int, int]:
    """Width and height of a text; lines are as high whatever is in them."""
    right = pen.textbbox((0, 0), text, font=_font(), spacing=1)[2]
    line = pen.textbbox((0, 0), "Ay", font=_font())[3] + 2
    return round(right) + 1, round(line) * (text.count("\n") + 1)


def _write_upwards(canvas: Any, text: str, place: tuple[int, int], from_below: bool = False) -> None:
    """A text turned by a quarter; `place` is its upper left corner, or the lower one."""
    width, height = _size(_pen(canvas), text)
    strip = _canvas(width, height)
    _pen(strip).text((0, 0), text, fill=INK, font=_font())
    canvas.paste(strip.rotate(90, expand=True), (place[0], place[1] - width if from_below else place[1]))


def _image(canvas: Any) -> Image:
    import numpy as np

    return Image(torch.from_numpy(np.array(canvas)).permute(2, 0, 1).contiguous())
