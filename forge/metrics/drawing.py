"""Pictures for the log: a grid of images with captions, and a confusion matrix, without a plotting library.

::

    def evaluation_end(self, stage):
        return {"samples": drawing.grid(self.samples, captions), "confusion": drawing.confusion(self.counts, names)}

Pillow and torchvision are imported by the functions that need them: a run that draws nothing needs neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from forge.errors import TaskError
from forge.metrics.media import Image

if TYPE_CHECKING:
    from PIL.Image import Image as Pillow
    from PIL.ImageDraw import ImageDraw

__all__ = ["confusion", "grid", "png"]

GAP = 5
"""Pixels between images, words and cells."""
LEAST = 64
"""Smaller images are enlarged by a whole number, to at least this many pixels."""
CELL = 28
"""Pixels of a cell of a matrix; counts of three digits and more widen it."""
CARD = 350
"""Width in pixels to which TensorBoard scales a picture, by dropping or repeating columns, which damages letters."""
INK, PAPER = (32, 32, 32), (255, 255, 255)
FULL = (22, 82, 150)
"""The colour of a cell that holds its whole row."""


def grid(images: Tensor, captions: Sequence[str] = (), columns: int | None = None) -> Image:
    """Arrange images in rows, each above its caption, which may have several lines.

    `images` is (N, 1 or 3, H, W) or (N, H, W): floats in [0, 1], or uint8. Small ones are enlarged. The result has as
    many channels. Without `columns` there are 8; with captions as many as TensorBoard shows at their size, and at
    least 2.
    """
    from torchvision.utils import make_grid

    tiles = _pixels(images)
    count, channels, height, width = tiles.shape
    if captions and len(captions) != count:
        raise TaskError(f"drawing.grid got {count} images and {len(captions)} captions; pass one for each, or none.")
    if columns is not None and columns < 1:
        raise TaskError(f"drawing.grid: columns is {columns}; it must be at least 1.")
    words = [_written(caption) for caption in captions]
    if words:
        room = max(0, *(word.width - width for word in words)), max(word.height for word in words)
        tiles = pad(tiles, (0, room[0], 0, room[1]), value=PAPER[0])
    for tile, word in zip(tiles, words, strict=False):
        ink = _array(word) * ((PAPER[0] - INK[0]) / 255)
        tile[:, height : height + word.height, : word.width] = (PAPER[0] - ink).round()
    columns = columns or (max(2, (CARD - GAP) // (tiles.size(3) + GAP)) if words else 8)
    sheet = make_grid(tiles, columns, GAP, pad_value=PAPER[0])[:channels]  # it gives grey images three channels
    sheet = sheet if count > 1 else pad(sheet, [GAP] * 4, value=PAPER[0])  # and a single one no border
    return Image(pad(sheet, (0, max(0, CARD - sheet.size(2)) if words else 0), value=PAPER[0]))


def confusion(counts: Tensor, names: Sequence[str]) -> Image:
    """Draw a confusion matrix: `counts[i, j]` samples of class `names[i]` were classified as `names[j]`.

    The darkness of a cell is its share of its row; a count of 0 is left empty.
    """
    classes = len(names)
    if tuple(counts.shape) != (classes, classes):
        raise TaskError(f"drawing.confusion got counts of shape {tuple(counts.shape)} for {classes} names.")
    counts = counts.detach().cpu()
    shares = (counts / counts.sum(1, keepdim=True).clamp(min=1)).tolist()
    margin = max(_written(name).width for name in names) + 2 * GAP
    heading = _written("y").height + GAP
    cell = max(CELL, GAP + max(_written(f"{count:g}").width for count in counts.flatten().tolist()))
    side = heading + margin + classes * cell + GAP
    canvas = _canvas("RGB", max(side, CARD), side, PAPER)
    pen = _pen(canvas)
    left = top = heading + margin
    _write(canvas, _written("predicted"), (left, GAP))
    _write(canvas, _upwards("true"), (GAP, top))
    for i, name in enumerate(names):
        word, turned = _written(name), _upwards(name)
        _write(canvas, word, (left - GAP - word.width, top + i * cell + (cell - word.height) // 2))
        _write(canvas, turned, (left + i * cell + (cell - turned.width) // 2, top - GAP - turned.height))
        for j, count in enumerate(counts[i].tolist()):
            corner = left + j * cell, top + i * cell
            share = shares[i][j]
            colour = tuple(round(a + (b - a) * share) for a, b in zip(PAPER, FULL, strict=True))
            pen.rectangle((*corner, corner[0] + cell - 2, corner[1] + cell - 2), fill=colour)
            if count:
                word = _written(f"{count:g}")
                place = corner[0] + (cell - 1 - word.width) // 2, corner[1] + (cell - 1 - word.height) // 2
                _write(canvas, word, place, PAPER if share > 0.5 else INK)
    return Image(_array(canvas).permute(2, 0, 1))


def png(image: Image) -> bytes:
    """Encode a picture as a PNG file."""
    from PIL import Image as pillow

    pixels = image.data.detach().cpu()
    if pixels.dtype != torch.uint8:
        pixels = _bytes(pixels)
    if pixels.ndim == 3:
        pixels = pixels[0] if pixels.size(0) == 1 else pixels.permute(1, 2, 0)
    file = BytesIO()
    # level 6 takes 1.5 times as long, for a tenth less
    pillow.fromarray(pixels.contiguous().numpy()).save(file, "PNG", compress_level=3)
    return file.getvalue()


def _pixels(images: Tensor) -> Tensor:
    """Return images as uint8 (N, C, H, W); small ones enlarged."""
    given = tuple(images.shape)
    if images.ndim == 3:
        images = images.unsqueeze(1)
    if images.ndim != 4 or images.size(1) not in (1, 3) or not images.numel():
        raise TaskError(f"drawing.grid got images of shape {given}; it takes (N, 1 or 3, H, W) or (N, H, W).")
    images = images.detach().cpu()
    if images.dtype != torch.uint8:
        images = _bytes(images)
    scale = max(1, -(-LEAST // max(images.shape[2:])))
    return images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)


def _bytes(numbers: Tensor) -> Tensor:
    return (numbers.float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)


def _array(picture: Pillow) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(picture))


def _canvas(mode: str, width: int, height: int, colour: Any = 0) -> Pillow:
    from PIL import Image as pillow

    return pillow.new(mode, (width, height), colour)


def _pen(canvas: Pillow) -> ImageDraw:
    from PIL import ImageDraw

    return ImageDraw.Draw(canvas)


@cache  # loading a font takes longer than drawing with it
def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(16)


@lru_cache(4096)  # successive evaluations draw mostly the same words
def _written(text: str) -> Pillow:
    """Draw a text as a mask for ink, with lines of constant height."""
    pen = _pen(_canvas("L", 1, 1))
    right = pen.textbbox((0, 0), text, font=_font(), spacing=1)[2]
    line = pen.textbbox((0, 0), "Ay", font=_font())[3] + 2
    mask = _canvas("L", round(right) + 1, round(line) * (text.count("\n") + 1))
    _pen(mask).text((0, 0), text, fill=255, font=_font(), spacing=1)
    return mask


@lru_cache(4096)
def _upwards(text: str) -> Pillow:
    """Draw a text upwards."""
    return _written(text).rotate(90, expand=True)


def _write(canvas: Pillow, word: Pillow, place: tuple[int, int], ink: tuple[int, int, int] = INK) -> None:
    canvas.paste(ink, (*place, place[0] + word.width, place[1] + word.height), word)
