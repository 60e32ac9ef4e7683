"""Pictures: images stand where they should, with the right pixels, and a matrix is as dark as its counts are large."""

from __future__ import annotations

import io

import numpy
import pytest
import torch

import forge
from forge.errors import TaskError
from forge.metrics import drawing


def squares(count: int) -> torch.Tensor:
    """Grey images, each of one brightness."""
    return (torch.arange(20, 20 + 40 * count, 40) / 255).view(count, 1, 1, 1).expand(-1, 1, 64, 64)


def test_each_image_of_a_grid_is_there_row_after_row() -> None:
    drawn = drawing.grid(squares(5), columns=3)
    assert isinstance(drawn, forge.Image)
    assert drawn.data.dtype == torch.uint8
    step = 64 + drawing.GAP
    assert drawn.data.shape == (1, 2 * step + drawing.GAP, 3 * step + drawing.GAP)
    for place in range(5):
        top, left = drawing.GAP + step * (place // 3), drawing.GAP + step * (place % 3)
        tile = drawn.data[:, top : top + 64, left : left + 64]
        assert (tile == 20 + 40 * place).all()
    assert (drawn.data[:, step + drawing.GAP :, 2 * step + drawing.GAP :] == 255).all()


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 5, 7), (5, 7)])
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32, torch.bfloat16, torch.bool])
def test_a_png_holds_the_pixels(shape: tuple[int, ...], kind: torch.dtype) -> None:
    from PIL import Image

    pixels = torch.randint(256, shape, dtype=torch.uint8)
    if kind == torch.bool:
        pixels = pixels.div(128, rounding_mode="floor") * 255
    given = pixels if kind == torch.uint8 else (pixels / 255).to(kind)
    file = Image.open(io.BytesIO(drawing.png(forge.Image(given))))
    assert file.size == (7, 5)
    found = torch.from_numpy(numpy.array(file))
    expected = pixels.permute(1, 2, 0) if shape[0] == 3 else pixels.reshape(5, 7)
    least = 1 if kind == torch.bfloat16 else 0  # it has eight bits only
    assert (found.int() - expected.int()).abs().max() <= least


def test_a_confusion_matrix_has_its_names_and_numbers() -> None:
    empty = drawing.confusion(torch.zeros(2, 2), ["a", "b"]).data
    counted = drawing.confusion(torch.tensor([[0, 0], [0, 7]]), ["a", "b"]).data
    corner = counted.size(1) - 2 * drawing.CELL - drawing.GAP
    assert (empty[:, corner:, :corner] < 128).any()  # the names of the rows
    assert (empty[:, :corner, corner:] < 128).any()  # and of the columns
    first = slice(corner, corner + drawing.CELL - 2)
    assert (counted[:, first, first] == 255).all()  # nothing is left empty
    cell = counted[:, corner + drawing.CELL : -drawing.GAP - 2, corner + drawing.CELL : -drawing.GAP - 2]
    assert len(cell.flatten(1).unique(dim=1).T) > 2  # a number on its colour


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (lambda: drawing.grid(torch.rand(2, 2, 4, 4)), r"shape \(2, 2, 4, 4\); it takes \(N, 1 or 3, H, W\)"),
        (lambda: drawing.grid(torch.rand(0, 1, 4, 4)), "shape"),
        (lambda: drawing.grid(torch.rand(2, 4, 4), ["one"]), "2 images and 1 captions"),
        (lambda: drawing.grid(torch.rand(2, 4, 4), columns=0), "columns is 0"),
        (lambda: drawing.confusion(torch.zeros(2, 3), ["a", "b"]), r"shape \(2, 3\) for 2 names"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: object, told: str) -> None:
    assert callable(draw)
    with pytest.raises(TaskError, match=told):
        draw()
