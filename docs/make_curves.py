"""Draw the curve of a recipe's page from its runs: docs/pictures/recipes/NAME.svg, training against validation.

    python docs/make_curves.py runs/fashion_mlp/seed-1 runs/fashion_mlp/seed-2 runs/fashion_mlp/seed-3 --metric accuracy

Several runs are drawn in one chart. NAME is the recipe of the first run, unless --name is given.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from forge.errors import ForgeError, did_you_mean
from forge.report.svg import line_chart
from forge.runs.folder import RunFolder

FOLDER = Path(__file__).parent / "pictures" / "recipes"
STAGES = {"train": "training", "val": "validation", "test": "test"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser("make_curves.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run folder")
    parser.add_argument("--metric", default="loss", help="what to draw, without train/ or val/ (default: loss)")
    parser.add_argument("--name", help="the picture's name (default: the recipe of the first run)")
    parser.add_argument("--title", default="", help="a line above the picture")
    parser.add_argument("--log", action="store_true", help="a logarithmic axis")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=FOLDER, help="default: docs/pictures/recipes")
    args = parser.parse_args(argv)
    runs = [RunFolder(path) for path in args.runs]
    name = args.name or runs[0].recipe
    if not name:
        raise ForgeError(f"{runs[0].path} has no card that names its recipe. Pass --name NAME.")
    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / f"{name}.svg"
    title = args.title or f"{name}: {args.metric}"
    picture.write_text(line_chart(curves(runs, args.metric), title=title, y_label=args.metric, log_y=args.log))
    print(picture)
    return 0


def curves(runs: Sequence[RunFolder], metric: str) -> dict[str, list[tuple[float, float]]]:
    """Return the metric of every stage and run that has it, grouped by stage."""
    found = {
        f"{word}{label(run, runs)}": [(float(x), y) for x, y in run.series[f"{stage}/{metric}"]]
        for stage, word in STAGES.items()
        for run in runs
        if f"{stage}/{metric}" in run.series
    }
    if not found:
        known = sorted({name.partition("/")[2] or name for run in runs for name in run.series})
        places = ", ".join(str(run.path) for run in runs)
        raise ForgeError(f"No metric {metric!r} in metrics.jsonl of {places}.{did_you_mean(metric, known)}")
    return found


def label(run: RunFolder, runs: Sequence[RunFolder]) -> str:
    """Return what distinguishes one run from the others: its seed, else its folder."""
    if len(runs) == 1:
        return ""
    seeds = [other.card.get("seed") for other in runs]
    distinct = None not in seeds and len(set(seeds)) == len(seeds)
    return f", seed {run.card['seed']}" if distinct else f", {run.path.name}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ForgeError as error:
        sys.exit(f"error: {error}")
