"""`forge data`: look at a batch of a recipe's or task's data."""

from __future__ import annotations

import itertools
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.text import Text

from forge.cli import target
from forge.errors import DataError, ForgeError
from forge.util import show
from forge.util.files import atomic_write

if TYPE_CHECKING:
    from forge.config import Recipe
    from forge_doctor.batch_look import Leaf

SPLITS = ("train", "val", "test", "predict")
GROUP = "look"
EXAMPLES = """\
Nothing is trained, and no run is written.

examples:
  forge data quickstart
  forge data my_task.py:MyTask --split all --batches 20
  forge data fashion_mlp --split test --out test.png
"""
SHOWN = 24
"""Pictures in the grid, labels in the table of counts."""
ROWS, WIDTH = 3, 400
"""Texts that are printed, and the characters of each."""
DECODERS = ("decode", "decoded")


def parser() -> ArgumentParser:
    parser = show.new_parser("data", "Look at a batch: shapes, types, ranges, labels, and pictures or text.", EXAMPLES)
    target.add_arguments(parser)
    parser.add_argument(
        "--split", choices=(*SPLITS, "all"), default="train", help="which loader to look at (default: %(default)s)"
    )
    parser.add_argument(
        "--batches", type=int, metavar="N", default=1, help="look at the first N batches together (default: 1)"
    )
    parser.add_argument("--out", metavar="FILE", help="the file of the pictures (default: RECIPE-SPLIT.png)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, and draw nothing")
    return parser


def run(args: Namespace) -> int:
    from forge.rng import seed_all
    from forge_doctor.batch_look import look_at

    if args.batches < 1:
        raise ForgeError(f"--batches {args.batches}: look at 1 batch or more.")
    if args.out and Path(args.out).suffix != ".png":
        raise ForgeError(f"--out {args.out}: pictures are written as PNG. Name the file {Path(args.out).stem}.png.")
    recipe = target.load(args)
    seed = recipe.trainer.get("seed") or 0
    seed_all(seed)
    data = recipe.make_data()
    name = recipe.local["task"].__name__ if "task" in recipe.local else recipe.name
    facts: dict[str, Any] = {}
    for split in _splits(args, data):
        for label, loader in _loaders(getattr(data, split), split):
            found = look_at(_first_batches(loader, args.batches, label, seed))
            facts[label] = {"batches": _length(loader), "leaves": [leaf.as_data() for leaf in found]}
            if not args.json:
                _print(label, loader, found, args.batches)
                _print_texts(found, recipe)
                _draw(found, loader, _file(args, name, label))
    if args.json:
        print(json.dumps(facts, default=str))
    return 0


# -- batches ----------------------------------------------------------------------------------------------------------


def _splits(args: Namespace, data: Any) -> list[str]:
    there = [split for split in SPLITS if getattr(data, split) is not None]
    if args.split == "all":
        if not there:
            raise DataError(f"The data of {args.target!r} have no split: return forge.data.Splits(train=...).")
        return there
    if args.split not in there:
        has = f"they have {', '.join(there)}" if there else "they have none"
        raise DataError(
            f"The data of {args.target!r} have no {args.split} split ({has}): return "
            f"forge.data.Splits({args.split}=...), or pass --split {there[0] if there else 'train'}."
        )
    return [args.split]


def _loaders(given: Any, split: str) -> list[tuple[str, Any]]:
    """Return the loaders of a split, adopted as a fit does."""
    from forge.data.adapt import adopt, by_name

    given = by_name(given, split)
    several = given.items() if isinstance(given, Mapping) else None
    if several is None:
        return [(split, adopt(given, split))]
    return [(f"{split}/{name}", adopt(loader, split)) for name, loader in several]


def _first_batches(loader: Any, count: int, label: str, seed: int) -> list[Any]:
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


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


# -- what is printed --------------------------------------------------------------------------------------------------


def _print(label: str, loader: Any, found: list[Leaf], batches: int) -> None:
    console = show.console()
    length = _length(loader)
    of = "" if length is None else f" of {length:,}"
    looked = "first batch" if batches == 1 else f"first {batches} batches"
    console.print(Text.assemble((label, "bold"), f"  {looked}{of}"), soft_wrap=True)
    grid = show.table("name", "type", "shape", "min", "max", "mean", "NaN", wrap=["name"])
    for column in grid.columns[3:]:
        column.justify = "right"
    for leaf in found:
        kind = leaf.dtype or leaf.kind
        place = "" if leaf.device in ("", "cpu") else f" on {leaf.device}"
        numbers = [_number(value) for value in (leaf.lowest, leaf.highest, leaf.mean)]
        grid.add_row(leaf.name, f"{kind}{place}", leaf.shape, *numbers, _share(leaf))
    console.print(grid)
    for leaf in found:
        if leaf.infinite:
            show.warning(f"{leaf.name} has {leaf.infinite:,} infinite entries.")
        if leaf.labels:
            _print_labels(leaf)
    console.print()


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{int(value)}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def _share(leaf: Leaf) -> str:
    if not leaf.dtype.startswith(("float", "bfloat", "complex")):
        return ""
    return f"{100 * leaf.nan / leaf.entries:.2g} %" if leaf.nan else "0"


def _print_labels(leaf: Leaf) -> None:
    counts = sorted(leaf.labels.items())
    what = "ones by column" if leaf.by_column else "counts"
    if not leaf.by_column and len(counts) > SHOWN:
        values = [count for _, count in counts]
        text = f"{len(counts)} values from {counts[0][0]} to {counts[-1][0]}, {min(values)} to {max(values)} times each"
    else:
        text = "  ".join(f"{value}: {count}" for value, count in counts[:SHOWN])
        text += f"  … of {len(counts)} columns" if len(counts) > SHOWN else ""
    show.console().print(Text.assemble((f"{leaf.name} {what}  ", "dim"), text), soft_wrap=True)


def _print_texts(found: list[Leaf], recipe: Recipe) -> None:
    from forge_doctor.batch_look import token_leaves

    shown = [(leaf.name, leaf.texts[:ROWS]) for leaf in found if leaf.texts]
    tokens = token_leaves(found)
    if tokens:
        decode, source = _decoder(recipe)
        for leaf in tokens:
            rows = leaf.first[:ROWS].tolist()
            shown.append((leaf.name, [_as_text(row, decode) for row in rows]))
        if decode is None:
            show.message(f"Tokens are printed as numbers: {source}.", "dim")
    console = show.console()
    for name, texts in shown:
        for row, text in enumerate(texts):
            cut = text if len(text) <= WIDTH else f"{text[:WIDTH]} …"
            console.print(Text.assemble((f"{name}[{row}]  ", "dim"), cut), soft_wrap=True)
        console.print()


def _as_text(row: list[int], decode: Callable[[list[int]], str] | None) -> str:
    if decode is None:
        return " ".join(map(str, row))
    kept = [token for token in row if token >= 0]  # -100 is a label that losses leave out
    try:
        return repr(decode(kept))
    except Exception as error:  # the user's own function: numbers say enough
        return f"{' '.join(map(str, row))}  (decode raised {type(error).__name__}: {error})"


def _decoder(recipe: Recipe) -> tuple[Callable[[list[int]], str] | None, str]:
    """Return what turns tokens into text: the task's tokenizer or `decode`, or a function beside the task."""
    otherwise = "give the task a `tokenizer`, a method `decode(tokens)`, or write a function decode beside it"
    try:
        task = recipe.make_task()
    except ForgeError as error:
        return None, f"{otherwise} ({error})"
    module = sys.modules.get(type(task).__module__)
    for owner in (task, getattr(task, "tokenizer", None), getattr(task, "processor", None), module):
        for name in DECODERS:
            found: Any = getattr(owner, name, None)
            if callable(found):
                return cast("Callable[[list[int]], str]", found), ""
    return None, otherwise


# -- pictures ---------------------------------------------------------------------------------------------------------


def _file(args: Namespace, name: str, label: str) -> Path:
    word = label.replace("/", "-")
    if not args.out:
        return Path(f"{name}-{word}.png")
    out = Path(args.out)
    return out if args.split != "all" and "/" not in label else out.with_stem(f"{out.stem}-{word}")


def _draw(found: list[Leaf], loader: Any, out: Path) -> None:
    from forge_doctor.batch_look import as_pictures, captions, pictures

    leaf = pictures(found)
    if leaf is None:
        return
    from forge.metrics import drawing

    tiles = as_pictures(leaf.first)
    assert tiles is not None
    tiles = tiles[:SHOWN].cpu()
    words = captions(found, len(tiles), _classes(loader))
    try:
        content = drawing.png(drawing.grid(tiles, words if len(words) == len(tiles) else (), columns=8))
    except ImportError as error:
        raise ForgeError(f"Pictures need torchvision and pillow: pip install torchvision pillow ({error}).") from error
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as beside:
        beside.write_bytes(content)
    console = show.console()
    scaled = leaf.first.is_floating_point() and ((leaf.lowest or 0) < 0 or (leaf.highest or 0) > 1)
    note = ", scaled from the batch's lowest value to its highest" if scaled else ""
    console.print(Text.assemble(("picture  ", "dim"), f"{out}  ({leaf.name}{note})"), soft_wrap=True)


def _classes(loader: Any) -> list[str] | None:
    """Return the class names of the loader's dataset, as torchvision's have them."""
    dataset = getattr(loader, "dataset", None)
    while dataset is not None:
        names = getattr(dataset, "classes", None)
        if isinstance(names, (list, tuple)):
            return list(map(str, names))
        dataset = getattr(dataset, "dataset", None)
    return None
