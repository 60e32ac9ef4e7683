"""Eight colours can be told apart, on light and dark pages, also by readers who see fewer colours."""

from __future__ import annotations

import itertools
import re

import pytest

from forge.report.svg import COLORS, STYLE

Triple = tuple[float, float, float]
SIGHT: dict[str, tuple[Triple, Triple, Triple]] = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""What linear RGB becomes in the eyes of a reader (Machado, Oliveira and Fernandes, 2009)."""
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
OKABE_ITO = 16.05
"""The least distance between two of Okabe and Ito's eight, by the same measure."""


def linear(color: str) -> Triple:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return red, green, blue


def times(matrix: tuple[Triple, Triple, Triple], vector: Triple) -> Triple:
    a, b, c = (sum(x * y for x, y in zip(row, vector, strict=True)) for row in matrix)
    return a, b, c


def lab(color: str, sight: str) -> Triple:
    """The colour as this reader sees it, in CIELAB, where distances are differences that are seen."""
    red, green, blue = (min(1.0, max(0.0, part)) for part in times(SIGHT[sight], linear(color)))
    x, y, z = times(XYZ, (red, green, blue))
    f, g, h = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x / 0.9505, y, z / 1.089))
    return 116 * g - 16, 500 * (f - g), 200 * (g - h)


def palettes() -> dict[str, list[str]]:
    light, dark = STYLE.split("@media", 1)
    return {name: re.findall(r"--c\d:(#[0-9a-f]{6})", text) for name, text in (("light", light), ("dark", dark))}


def contrast(one: str, other: str) -> float:
    low, high = sorted(times(XYZ, linear(color))[1] for color in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize(("page", "ground"), [("light", "#ffffff"), ("dark", "#171a1f")])
def test_every_two_of_them_differ(page: str, ground: str, sight: str) -> None:
    colors = palettes()[page]
    assert len(colors) == COLORS == 8
    seen = [lab(color, sight) for color in colors]
    distances = [
        sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
        for one, other in itertools.combinations(seen, 2)
    ]
    assert min(distances) > 1.25 * OKABE_ITO
    assert min(contrast(color, ground) for color in colors) > 2.3
