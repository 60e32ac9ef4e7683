"""Pictures for the log: a grid of images with captions, and a confusion matrix; drawn with Pillow, no plotting library.

::

    def evaluation_end(self, stage):
        return {"samples": pictures.grid(self.samples, captions), "confusion": pictures.confusion(self.counts, names)}
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge.errors import TaskError
from forge.metrics.media import Image

if TYPE_CHECKING:
    from PIL.Image import Image as Pillow
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

    `images` is (N, 1 or 3, H, W) or (N, H, W): floats in [0, 1], or uint8. Small ones are enlarged. The result has as
    many channels.
    """
    pixels = _pixels(images)
    count, height, width = pixels.shape[:3]
    if captions and len(captions) != count:
        raise TaskError(f"pictures.grid got {count} images and {len(captions)} captions; give one for each, or none.")
    if columns < 1:
        raise TaskError(f"pictures.grid: columns is {columns}; it must be at least 1.")
    colours = 1 if pixels.ndim == 3 else 3
    words = {caption: _written(caption) for caption in captions}
    sizes = [word.size for word in words.values()] or [(0, 0)]
    tile = max(width, *(size[0] for size in sizes)) + GAP, height + max(size[1] for size in sizes) + GAP
    columns = min(columns, count)
    canvas = _canvas(tile[0] * columns + GAP, tile[1] * -(-count // columns) + GAP, colours)
    for place in range(count):
        left, top = GAP + tile[0] * (place % columns), GAP + tile[1] * (place // columns)
        canvas.paste(_from_array(pixels[place]), (left, top))
        if captions:
            _write(canvas, words[captions[place]], (left, top + height))
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
    margin = max(_written(name).width for name in names) + 2 * GAP
    heading = _written("y").height + GAP
    canvas = _canvas(heading + margin + classes * CELL + GAP, heading + margin + classes * CELL + GAP)
    pen = _pen(canvas)
    left = top = heading + margin
    _write(canvas, _written("predicted"), (left, GAP))
    _write(canvas, _upwards("true"), (GAP, top))
    for i, name in enumerate(names):
        word, turned = _written(name), _upwards(name)
        _write(canvas, word, (left - GAP - word.width, top + i * CELL + (CELL - word.height) // 2))
        _write(canvas, turned, (left + i * CELL + (CELL - turned.width) // 2, top - GAP - turned.height))
        for j, count in enumerate(counts[i].tolist()):
            corner = left + j * CELL, top + i * CELL
            share = shares[i][j]
            colour = tuple(round(a + (b - a) * share) for a, b in zip(PAPER, FULL, strict=True))
            pen.rectangle((*corner, corner[0] + CELL - 2, corner[1] + CELL - 2), fill=colour)
            if count:
                word = _written(f"{count:g}")
                place = corner[0] + (CELL - 1 - word.width) // 2, corner[1] + (CELL - 1 - word.height) // 2
                _write(canvas, word, place, PAPER if share > 0.5 else INK)
    return _image(canvas)


def png(image: Image) -> bytes:
    """The picture as a PNG file."""
    pixels = image.data.detach().cpu()
    if pixels.dtype != torch.uint8:
        pixels = _bytes(pixels)
    if pixels.ndim == 3:
        pixels = pixels[0] if pixels.size(0) == 1 else pixels.permute(1, 2, 0)
    file = BytesIO()
    _from_array(pixels.contiguous()).save(file, "PNG", compress_level=3)  # 6 takes half as long again, for a tenth less
    return file.getvalue()


# ---------------------------------------------------------------------------------------------------------------------
# Pillow is imported where it is used: whoever draws nothing needs none.


def _pixels(images: Tensor) -> Tensor:
    """Images as uint8 (N, H, W), or (N, H, W, 3) if they have colours; enlarged where they are small."""
    given = tuple(images.shape)
    if images.ndim == 3:
        images = images.unsqueeze(1)
    if images.ndim != 4 or images.size(1) not in (1, 3) or not images.numel():
        raise TaskError(f"pictures.grid got images of shape {given}; it takes (N, 1 or 3, H, W) or (N, H, W).")
    images = images.detach().cpu()
    if images.dtype != torch.uint8:
        images = _bytes(images)
    scale = max(1, -(-LEAST // max(images.shape[2:])))
    large = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    return large.squeeze(1).contiguous() if large.size(1) == 1 else large.permute(0, 2, 3, 1).contiguous()


def _bytes(numbers: Tensor) -> Tensor:
    return (numbers.float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)


def _canvas(width: int, height: int, colours: int = 3) -> Pillow:
    from PIL import Image as pillow

    return pillow.new("RGB", (width, height), PAPER) if colours == 3 else pillow.new("L", (width, height), PAPER[0])


def _from_array(pixels: Tensor) -> Pillow:
    from PIL import Image as pillow

    return pillow.fromarray(pixels.numpy())


def _pen(canvas: Pillow) -> ImageDraw:
    from PIL import ImageDraw

    return ImageDraw.Draw(canvas)


@cache  # reading a font takes longer than writing with it
def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(16)


@lru_cache(4096)  # an evaluation writes much the same as the last one
def _written(text: str) -> Pillow:
    """A text as a mask, by which ink is put on a canvas; its lines are as high whatever is in them."""
    from PIL import Image as pillow

    pen = _pen(pillow.new("L", (1, 1)))
    right = pen.textbbox((0, 0), text, font=_font(), spacing=1)[2]
    line = pen.textbbox((0, 0), "Ay", font=_font())[3] + 2
    mask = pillow.new("L", (round(right) + 1, round(line) * (text.count("\n") + 1)))
    _pen(mask).text((0, 0), text, fill=255, font=_font(), spacing=1)
    return mask


@lru_cache(4096)
def _upwards(text: str) -> Pillow:
    """The same, turned by a quarter."""
    return _written(text).rotate(90, expand=True)


def _write(canvas: Pillow, word: Pillow, place: tuple[int, int], ink: tuple[int, int, int] = INK) -> None:
    canvas.paste(ink if canvas.mode == "RGB" else ink[0], (*place, place[0] + word.width, place[1] + word.height), word)


def _image(canvas: Pillow) -> Image:
    import numpy as np

    pixels = torch.from_numpy(np.array(canvas))
    return Image(pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1))
