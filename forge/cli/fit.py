"""`forge fit`: train a recipe, or a task from the user's own file."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from rich.text import Text

from forge.cli import ranks, show, target
from forge.recipe.loading import DEFAULT

if TYPE_CHECKING:
    from forge.data import Splits
    from forge.trainer import FitResult

EXAMPLES = """\
examples:
  forge fit quickstart
  forge fit quickstart trainer.max_epochs=3 clip.max_norm=0.5 -p no:tensorboard
  forge fit my_task.py:MyTask --recipe fast task.lr=1e-3
  forge fit my_recipe.yaml --run-dir runs/first --resume
  forge fit quickstart --nproc 2 -p ddp --max-restarts 1
"""


def parser() -> ArgumentParser:
    parser = target.new_parser("fit", "Train a recipe, or a task from your own file.", EXAMPLES)
    target.add_arguments(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is written (default: runs/RECIPE/TIME-ID)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue --run-dir, or the recipe's newest run, from its newest valid checkpoint; none: start a new run",
    )
    parser.add_argument("--weights", metavar="FILE", help="weights to start from: a run, a checkpoint or a file")
    parser.add_argument("--trace", action="store_true", help="print every hook call to stderr (slow)")
    ranks.add_arguments(parser)
    return parser


def run(args: Namespace) -> int:
    recipe = target.load(args, to_train=True)
    if args.nproc is not None:
        return ranks.launch(args, recipe)
    talks = ranks.rank() == 0
    trainer, task, data = target.build(recipe, args.run_dir)
    if args.resume:
        trainer.resume = "auto"
    ranks.continue_own_run(trainer)
    if args.trace:
        trainer.trace = sys.stderr.write
    if talks and "max_epochs" in recipe.trainer and recipe.origin["trainer.max_epochs"] == DEFAULT:
        show.message(f"Training for {trainer.max_epochs} epochs; trainer.max_epochs=N says otherwise.", "dim")
    result = trainer.fit(task, data.train, data.val, weights=args.weights)
    if talks:
        _report(result, trainer.stack.names, data, args)
    return 0


def _report(result: FitResult, plugins: list[str], data: Splits, args: Namespace) -> None:
    from forge.metrics import is_diagnostic

    console = show.console()
    console.print()
    aside = [name for name in result.metrics if is_diagnostic(name, plugins)]
    console.print(show.metrics({name: value for name, value in result.metrics.items() if name not in aside}))
    if aside:
        whose = ", ".join(dict.fromkeys(name.partition("/")[0] for name in sorted(aside)))
        console.print(Text(f"and {len(aside)} of {whose}: in the run's logs", "dim"))
    console.print()
    console.print(f"{_count(result.epochs, 'epoch')}, {_count(result.updates, 'update')}: {result.stop_reason}")
    if result.run_dir is None:
        return
    folder = show.near(result.run_dir)
    weights = str(folder / "weights.safetensors")
    lines = {"run folder": str(folder)}
    if (result.run_dir / "tensorboard").is_dir():
        lines["look"] = shlex.join([show.command("tensorboard"), "--logdir", str(folder)])
    if data.test is not None:
        lines["test"] = shlex.join([show.command("forge"), "test", *_same_task(args), "--weights", weights])
    for label, text in lines.items():
        console.print(Text.assemble((f"{label:<12}", "dim"), text), soft_wrap=True)


def _same_task(args: Namespace) -> list[str]:
    """The arguments that name the same task and data again."""
    named = [("--recipe", args.recipe), ("--data", args.data)]
    options = [word for flag, value in named if value for word in (flag, value)]
    return [args.target, *options, *(text for text in args.overrides if text.startswith(("task.", "data.")))]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
