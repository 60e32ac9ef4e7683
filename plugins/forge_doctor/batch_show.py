"""What people are shown of a batch: a row for each tensor, counts of labels, a grid of pictures, texts."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from forge.data.adapt import adopt, by_name
from forge.errors import DataError, ForgeError
from forge_doctor.batch_look import Leaf, as_pictures, captions, pictures, token_leaves

HEADS = ("name", "type", "shape", "min", "max", "mean", "NaN")
SHOWN = 24
"""Pictures in the grid, labels in the table of counts."""
ROWS, WIDTH = 3, 400
"""Texts that are shown, and the characters of each."""
DECODERS = ("decode", "decoded")
Decode = Callable[[list[int]], str]


def loaders(given: Any, split: str) -> list[tuple[str, Any]]:
    """Return the loaders of a split by label, adopted as a fit does."""
    given = by_name(given, split)
    if not isinstance(given, Mapping):
        return [(split, adopt(given, split))]
    return [(f"{split}/{name}", adopt(loader, split)) for name, loader in given.items()]


def first_batches(loader: Any, count: int, label: str, seed: int) -> list[Any]:
    if hasattr(loader, "set_default_seed"):
        loader.set_default_seed(seed)
    try:
        batches = list(itertools.islice(iter(loader), count))
    except TypeError as error:
        if hasattr(loader, "__iter__"):
            raise
        raise DataError(
            f"The {label} split is a {type(loader).__name__}, which gives no batches: return a DataLoader, a "
            "forge.data.Loader or a list of batches."
        ) from error
    if not batches:
        raise DataError(f"The {label} split gives no batch. Is its dataset empty, or drop_last on with few samples?")
    return batches


def cells(leaf: Leaf) -> list[str]:
    """Return the cells of a leaf under HEADS."""
    place = "" if leaf.device in ("", "cpu") else f" on {leaf.device}"
    numbers = [_number(value) for value in (leaf.lowest, leaf.highest, leaf.mean)]
    return [leaf.name, f"{leaf.dtype or leaf.kind}{place}", leaf.shape, *numbers, _share(leaf)]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{int(value)}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def _share(leaf: Leaf) -> str:
    if not leaf.dtype.startswith(("float", "bfloat", "complex")):
        return ""
    return f"{100 * leaf.nan / leaf.entries:.2g} %" if leaf.nan else "0"


def counts(leaf: Leaf) -> tuple[str, str]:
    """Say what is counted of the labels of a leaf, and the counts."""
    found = sorted(leaf.labels.items())
    if not leaf.by_column and len(found) > SHOWN:
        values = [count for _, count in found]
        text = f"{len(found)} values from {found[0][0]} to {found[-1][0]}, {min(values)} to {max(values)} times each"
    else:
        text = "  ".join(f"{value}: {count}" for value, count in found[:SHOWN])
        text += f"  … of {len(found)} columns" if len(found) > SHOWN else ""
    return "ones by column" if leaf.by_column else "counts", text


# -- texts ------------------------------------------------------------------------------------------------------------


def texts(found: Iterable[Leaf], decode: Decode | None) -> list[tuple[str, str]]:
    """Return the first texts with their places, `words[0]`: texts of the batch, then rows of tokens."""
    leaves = list(found)
    shown = [(leaf.name, leaf.texts[:ROWS]) for leaf in leaves if leaf.texts]
    for leaf in token_leaves(leaves):
        shown.append((leaf.name, [as_text(row, decode) for row in leaf.first[:ROWS].tolist()]))
    return [
        (f"{name}[{row}]", text if len(text) <= WIDTH else f"{text[:WIDTH]} …")
        for name, rows in shown
        for row, text in enumerate(rows)
    ]


def as_text(row: list[int], decode: Decode | None) -> str:
    if decode is None:
        return " ".join(map(str, row))
    kept = [token for token in row if token >= 0]  # -100 is a label that losses leave out
    try:
        return repr(decode(kept))
    except Exception as error:  # the user's own function: numbers say enough
        return f"{' '.join(map(str, row))}  (decode raised {type(error).__name__}: {error})"


def decoder(task: Any) -> Decode | None:
    """Return what turns tokens into text: the task's tokenizer or `decode`, or a function beside the task."""
    module = sys.modules.get(type(task).__module__)
    for owner in (task, getattr(task, "tokenizer", None), getattr(task, "processor", None), module):
        for name in DECODERS:
            found: Any = getattr(owner, name, None)
            if callable(found):
                return cast("Decode", found)
    return None


# -- pictures ---------------------------------------------------------------------------------------------------------


def picture(found: list[Leaf], loader: Any) -> tuple[bytes, str] | None:
    """Return the pictures of a batch as one PNG with their labels, and what it shows; None if there are none."""
    leaf = pictures(found)
    if leaf is None:
        return None
    from forge.metrics import drawing

    tiles = as_pictures(leaf.first)
    assert tiles is not None
    tiles = tiles[:SHOWN].cpu()
    words = captions(found, len(tiles), _classes(loader))
    try:
        content = drawing.png(drawing.grid(tiles, words if len(words) == len(tiles) else (), columns=8))
    except ImportError as error:
        raise ForgeError(f"Pictures need torchvision and pillow: pip install torchvision pillow ({error}).") from error
    scaled = leaf.first.is_floating_point() and ((leaf.lowest or 0) < 0 or (leaf.highest or 0) > 1)
    return content, leaf.name + (", scaled from the batch's lowest value to its highest" if scaled else "")


def _classes(loader: Any) -> list[str] | None:
    """Return the class names of the loader's dataset, as torchvision's have them."""
    dataset = getattr(loader, "dataset", None)
    while dataset is not None:
        names = getattr(dataset, "classes", None)
        if isinstance(names, (list, tuple)):
            return list(map(str, names))
        dataset = getattr(dataset, "dataset", None)
    return None
