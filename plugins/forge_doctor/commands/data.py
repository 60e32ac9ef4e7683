"""`forge data`: look at a batch of a recipe's or task's data."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from forge.data.accumulation_windows import length_of
    from forge.rng import seed_all
    from forge_doctor.batch_look import look_at
    from forge_doctor.batch_show import first_batches, loaders

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
        for label, loader in loaders(getattr(data, split), split):
            found = look_at(first_batches(loader, args.batches, label, seed))
            facts[label] = {"batches": length_of(loader), "leaves": [leaf.as_data() for leaf in found]}
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


# -- what is printed --------------------------------------------------------------------------------------------------


def _print(label: str, loader: Any, found: list[Leaf], batches: int) -> None:
    from forge.data.accumulation_windows import length_of
    from forge_doctor.batch_show import HEADS, cells, counts

    console = show.console()
    length = length_of(loader)
    of = "" if length is None else f" of {length:,}"
    looked = "first batch" if batches == 1 else f"first {batches} batches"
    console.print(Text.assemble((label, "bold"), f"  {looked}{of}"), soft_wrap=True)
    grid = show.table(*HEADS, wrap=["name"])
    for column in grid.columns[3:]:
        column.justify = "right"
    for leaf in found:
        grid.add_row(*cells(leaf))
    console.print(grid)
    for leaf in found:
        if leaf.infinite:
            show.warning(f"{leaf.name} has {leaf.infinite:,} infinite entries.")
        if leaf.labels:
            what, text = counts(leaf)
            console.print(Text.assemble((f"{leaf.name} {what}  ", "dim"), text), soft_wrap=True)
    console.print()


def _print_texts(found: list[Leaf], recipe: Recipe) -> None:
    from forge_doctor.batch_look import token_leaves
    from forge_doctor.batch_show import decoder, texts

    decode = None
    if token_leaves(found):
        otherwise = "give the task a `tokenizer`, a method `decode(tokens)`, or write a function decode beside it"
        try:
            decode = decoder(recipe.make_task())
        except ForgeError as error:
            otherwise += f" ({error})"
        if decode is None:
            show.message(f"Tokens are printed as numbers: {otherwise}.", "dim")
    shown = texts(found, decode)
    for place, text in shown:
        show.console().print(Text.assemble((f"{place}  ", "dim"), text), soft_wrap=True)
    if shown:
        show.console().print()


# -- pictures ---------------------------------------------------------------------------------------------------------


def _file(args: Namespace, name: str, label: str) -> Path:
    word = label.replace("/", "-")
    if not args.out:
        return Path(f"{name}-{word}.png")
    out = Path(args.out)
    return out if args.split != "all" and "/" not in label else out.with_stem(f"{out.stem}-{word}")


def _draw(found: list[Leaf], loader: Any, out: Path) -> None:
    from forge_doctor.batch_show import picture

    drawn = picture(found, loader)
    if drawn is None:
        return
    content, words = drawn
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as beside:
        beside.write_bytes(content)
    show.console().print(Text.assemble(("picture  ", "dim"), f"{out}  ({words})"), soft_wrap=True)
