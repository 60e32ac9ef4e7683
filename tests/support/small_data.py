"""A small folder in the layout of FORGE_DATA, so that recipes, docs and their tests run without a download.

python tests/support/small_data.py FOLDER
"""

from __future__ import annotations

import gzip
import random
import sys
from pathlib import Path

import numpy as np

TRAIN, TEST = 640, 200
SONNET = """\
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st;
Nor shall death brag thou wander'st in his shade,
When in eternal lines to time thou grow'st:
So long as men can breathe or eyes can see,
So long lives this, and this gives life to thee.
"""


def write_small_data(folder: Path) -> Path:
    """FashionMNIST/raw with a few hundred images that can be learnt, and tinyshakespeare/input.txt of 20 KB."""
    write_images(folder / "FashionMNIST" / "raw")
    text = folder / "tinyshakespeare" / "input.txt"
    text.parent.mkdir(parents=True)
    lines, draw = SONNET.splitlines(), random.Random(1609)
    text.write_text("".join(f"{draw.choice(lines)}\n" for _ in range(480)))
    return folder


def write_images(raw: Path) -> None:
    """The four files: each class is a rectangle of its own size and brightness, on a background of noise."""
    raw.mkdir(parents=True)
    draw = np.random.default_rng(2017)
    sizes = [(20, 6), (6, 20), (14, 14), (22, 22), (6, 6)]
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        labels = draw.permutation(np.arange(count) % 10).astype(np.uint8)
        images = draw.integers(0, 40, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            height, width = sizes[label % 5]
            image[14 - height // 2 :, 14 - width // 2 :][:height, :width] += np.uint8(70 if label < 5 else 200)
        write_idx(raw / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte.gz", labels)


def write_idx(path: Path, array: np.ndarray) -> None:
    """An array of bytes as an idx file, packed where the name ends so."""
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    with (gzip.open if path.suffix == ".gz" else open)(path, "wb") as file:
        file.write(head + array.tobytes())


if __name__ == "__main__":
    write_small_data(Path(sys.argv[1]))
