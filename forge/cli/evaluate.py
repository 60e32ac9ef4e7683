"""What `forge validate`, `forge test` and `forge predict` share: a recipe, weights, one pass without training."""

from __future__ import annotations

import json
import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forge.cli import ranks, target
from forge.util import show

if TYPE_CHECKING:
    from forge.contract.task import TaskModule

NOT_WORDS = ("true", "false", "null", "yes", "no", "on", "off")
"""What YAML reads as something else than text."""


def measuring_parser(verb: str, description: str) -> ArgumentParser:
    example = f"forge {verb} quickstart --weights runs/quickstart/RUN"
    parser = show.new_parser(verb, description, f"examples:\n  {example}\n  {example} --nproc 2 -p ddp\n")
    target.add_arguments(parser)
    parser.add_argument(
        "--weights", metavar="FILE", help="a run folder, a checkpoint, or a .safetensors, .pt or .ckpt file"
    )
    ranks.add_arguments(parser, only_nproc=True)
    return parser


def warn_without_weights(args: Namespace) -> None:
    if args.weights is None and ranks.rank() == 0:
        show.warning("no --weights: the task's weights are freshly initialised, as before any training.")


def measure(args: Namespace, verb: str, split: str) -> int:
    """Run one evaluation, on as many ranks as asked for, and print its metrics; nothing is written."""
    from forge.errors import DataError

    recipe = target.load(args)
    if args.nproc is not None:
        return ranks.launch_pass(verb, args, recipe)
    trainer, task, data = target.build(recipe, run_dir=False)
    loader = getattr(data, split)
    if loader is None:
        raise DataError(f"The data of {args.target!r} have no {split} split: return forge.data.Splits({split}=...).")
    warn_without_weights(args)
    with naming_options(args, verb, task):
        metrics = getattr(trainer, verb)(task, loader, weights=args.weights)
    if ranks.rank() == 0:
        show.console().print(show.metrics(metrics))
    return 0


@contextmanager
def naming_options(args: Namespace, verb: str, task: TaskModule) -> Iterator[None]:
    """Weights that do not fit because the task had other options: say which, and what to type."""
    from forge.checkpoint.weights import Misfit

    try:
        yield
    except Misfit as misfit:
        saved = misfit.saved or {}
        options = _other_options(saved.get("options") or {}, task) if saved.get("class") == type(task).__name__ else {}
        if options:
            words = [f"task.{name}={_written(value)}" for name, value in options.items()]
            again = shlex.join(
                [show.command("forge"), verb, *_others(args, options), "--weights", args.weights, *words]
            )
            misfit.args = (f"{args.weights} was trained with {', '.join(words)}. Say so: {again}",)
        raise


def _other_options(saved: Mapping[str, Any], task: TaskModule) -> dict[str, Any]:
    """The options that a task was saved with, where this one has others."""
    from forge.runs.card import plain

    return {
        name: value
        for name, value in saved.items()
        if name in task.init_args and plain(value) != plain(task.init_args[name])
    }


def _others(args: Namespace, options: Mapping[str, Any]) -> list[str]:
    """The arguments of this command, without those that `options` stand for."""
    named = [("--recipe", args.recipe), ("--data", args.data), *(("-p", name) for name in args.plugins)]
    replaced = {f"task.{name}" for name in options}
    kept = [text for text in args.overrides if text.partition("=")[0] not in replaced]
    return [args.target, *(word for flag, value in named if value for word in (flag, value)), *kept]


def _written(value: Any) -> str:
    """A value as it is typed after key=; words that YAML reads as something else are quoted."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in NOT_WORDS:
        return value
    return json.dumps(value)
