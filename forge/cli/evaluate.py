"""Shared by `forge validate`, `forge test` and `forge predict`: one pass over a split, with given weights."""

from __future__ import annotations

import json
import math
import re
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forge.cli import ranks, target
from forge.errors import DataError, ForgeError, NegativeVerdict, did_you_mean
from forge.util import show

if TYPE_CHECKING:
    from forge.contract.task import TaskModule

SPLITS = {"validate": "val", "test": "test"}
"""The verbs that measure, and the split that each passes over."""
NOT_WORDS = ("true", "false", "null", "yes", "no", "on", "off")
"""Words that YAML does not read as text."""


def measuring_parser(verb: str, description: str) -> ArgumentParser:
    example = f"forge {verb} quickstart --weights runs/quickstart/RUN"
    examples = [example, f"{example} --nproc 2 -p STRATEGY"]
    if verb in SPLITS:
        examples.append(f"{example} --at-least {SPLITS[verb]}/accuracy=0.9")
    parser = show.new_parser(verb, description, "examples:\n  " + "\n  ".join(examples) + "\n")
    target.add_arguments(parser)
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="a run folder, a checkpoint, a .safetensors, .pt or .ckpt file, the URL of one (s3://...), or best: that "
        "of the newest run",
    )
    if verb in SPLITS:
        parser.add_argument(
            "--at-least",
            metavar="METRIC=NUMBER",
            action="append",
            default=[],
            type=_bound,
            help="exit with code 1 if a metric is less than this, or not a number; may be repeated",
        )
    ranks.add_arguments(parser, only_nproc=True)
    return parser


def _bound(text: str) -> tuple[str, float]:
    """Read test/accuracy=0.9."""
    name, _, number = text.rpartition("=")
    try:
        least = float(number)
    except ValueError:
        least = math.nan
    if not name or math.isnan(least):
        raise ArgumentTypeError(f"{text!r} is no METRIC=NUMBER, such as test/accuracy=0.9")
    return name, least


def warn_without_weights(args: Namespace) -> None:
    if args.weights is None and ranks.rank() == 0:
        show.warning("no --weights: the task's weights are freshly initialised, not trained.")


def check_bounds(metrics: Mapping[str, Any], bounds: list[tuple[str, float]]) -> None:
    """Raise NegativeVerdict for metrics that are below their bound; NaN is."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
    below: list[str] = []
    for name, least in bounds:
        if name not in numbers:
            raise ForgeError(f"--at-least: no metric is called {name!r}.{did_you_mean(name, numbers)}")
        # a mean in float32 of exactly 0.9 is 0.89999998
        if not (numbers[name] >= least or math.isclose(numbers[name], least, rel_tol=1e-6)):
            below.append(f"{name} is {numbers[name]:.6g}, less than {least:g}")
    if below:
        raise NegativeVerdict(f"{'; '.join(below)} (--at-least).")


def measure(args: Namespace, verb: str) -> int:
    """Evaluate one split, on --nproc ranks if given, and print the metrics; nothing is written."""
    split = SPLITS[verb]
    recipe = target.load(args)
    if args.nproc is not None:
        return ranks.launch_pass(verb, args, recipe)
    trainer, task, data = target.build(recipe, run_dir=False)
    loader = getattr(data, split)
    if loader is None:
        raise DataError(f"The data of {args.target!r} have no {split} split: return forge.data.Splits({split}=...).")
    warn_without_weights(args)
    with explain_misfit(args, verb, task):
        metrics = getattr(trainer, verb)(task, loader, weights=args.weights)
    if ranks.rank() == 0:
        show.console().print(show.metrics(metrics))
    check_bounds(metrics, args.at_least)
    return 0


@contextmanager
def explain_misfit(args: Namespace, verb: str, task: TaskModule) -> Iterator[None]:
    """Where weights do not fit because the task had other options, name those options and the command to use."""
    from forge.checkpoint.weights import Misfit

    try:
        yield
    except Misfit as misfit:
        saved = misfit.saved or {}
        options = (
            _changed_options(saved.get("options") or {}, task) if saved.get("class") == type(task).__name__ else {}
        )
        if options:
            changes = {f"task.{name}": _as_yaml(value) for name, value in options.items()}
            words = [show.command("forge"), verb, *target.same_target(args, changes), "--weights", args.weights]
            given = ", ".join(f"{key}={value}" for key, value in changes.items())
            misfit.args = (f"{args.weights} was trained with {given}. Use the same options: {shlex.join(words)}",)
        raise


def _changed_options(saved: Mapping[str, Any], task: TaskModule) -> dict[str, Any]:
    """Return the options with which a task was saved, where this task has other values."""
    from forge.options import plain

    return {
        name: value
        for name, value in saved.items()
        if name in task.init_args and plain(value) != plain(task.init_args[name])
    }


def _as_yaml(value: Any) -> str:
    """Write a value as it is typed after key=; words that YAML does not read as text are quoted."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in NOT_WORDS:
        return value
    return json.dumps(value)
