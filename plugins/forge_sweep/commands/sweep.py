"""`forge sweep`: try values of options in many runs, and report the best."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from forge.cli import target
from forge.config import Recipe
from forge.errors import ForgeError, NegativeVerdict
from forge.runs import wording
from forge.util import show

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from forge_sweep.study import SweepPlan
    from forge_sweep.sweep import SweepResult

STORAGE = "FORGE_SWEEP_STORAGE"
"""The environment variable with the URL of a database, which may have a password in it."""
GROUP = "train"
EXAMPLES = f"""\
Ranges: log(LOW,HIGH), uniform(LOW,HIGH), int(LOW,HIGH[,STEP]), logint(LOW,HIGH), choice(A,B,...). Other overrides hold
for every trial. The same command again continues a sweep that was interrupted; with more --trials it grows. On several
machines, give each the same command and a shared --dir, or the URL of a database in {STORAGE}.

examples:
  forge sweep quickstart 'task.lr=log(1e-4,1e-1)' 'task.hidden=choice(64,256)' --metric val/accuracy --mode max
  forge sweep quickstart 'task.lr=log(1e-4,1e-1)' --metric val/loss --mode min --trials 50 --jobs 4 --prune
  forge sweep my_task.py:MyTask 'task.depth=int(2,8)' --metric val/accuracy --sampler grid
"""
STYLES = {"COMPLETE": "green", "PRUNED": "yellow", "FAIL": "red", "RUNNING": "cyan"}
"""By the name of a state of Optuna's."""


def parser() -> ArgumentParser:
    parser = show.new_parser("sweep", "Try values of options in many runs, and report the best.", EXAMPLES)
    target.add_arguments(parser)
    parser.add_argument("--metric", metavar="NAME", required=True, help="what to optimise, as in val/accuracy")
    parser.add_argument("--mode", choices=("max", "min"), help="whether larger or smaller is better (default: by name)")
    parser.add_argument("--trials", type=int, metavar="N", help="runs in all (default: 20; with grid: all of it)")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="runs at a time (default: 1); one GPU each")
    parser.add_argument(
        "--sampler",
        choices=("tpe", "random", "grid"),
        default="tpe",
        help="how values are chosen: by what was good (tpe, the default), at random, or all of them",
    )
    parser.add_argument(
        "--prune", action="store_true", help="stop runs that are worse than others at the same validation (ASHA)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the choices (default: 0)")
    parser.add_argument("--dir", metavar="DIR", help="folder of the sweep (default: runs/sweeps/RECIPE-ID)")
    parser.add_argument(
        "--storage", metavar="URL", help=f"a database for the trials; an address with a password belongs in {STORAGE}"
    )
    return parser


def run(args: Namespace) -> int:
    from forge_sweep.runners import OwnProcess
    from forge_sweep.space import is_space, parse_spaces
    from forge_sweep.study import SweepPlan, import_optuna
    from forge_sweep.sweep import SweepTarget, run_sweep

    import_optuna()
    ranges = [text for text in args.overrides if is_space(text)]
    fixed = [text for text in args.overrides if not is_space(text)]
    plan = SweepPlan(parse_spaces(ranges), args.metric, _mode(args), args.sampler, args.prune, args.seed)

    def load(more: Sequence[str]) -> Recipe:
        return target.load(Namespace(**{**vars(args), "overrides": [*fixed, *more]}), to_train=True)

    def words(more: Sequence[str]) -> list[str]:
        return target.same_target(args, overrides=[*fixed, *more])

    aim = SweepTarget(_name(args), load, OwnProcess(words, args.metric), words(()))
    trials = args.trials if args.trials is not None else 10**9 if args.sampler == "grid" else 20
    storage = args.storage or os.environ.get(STORAGE) or None
    result = run_sweep(aim, plan, trials, args.jobs, args.dir, storage, _tell(plan))
    _print(result, plan, args, load(()))
    if result.best is None:
        raise NegativeVerdict("No trial gave a result: the reasons are above.")
    return 0


def _mode(args: Namespace) -> str:
    from forge.runs.directions import mode_of

    mode = args.mode or mode_of(args.metric)
    if mode is None:
        raise ForgeError(f"Whether a larger {args.metric} is better is not known: add --mode max or --mode min.")
    return mode


def _name(args: Namespace) -> str:
    file, _, task = args.target.rpartition(":") if ".py:" in args.target else (args.target, "", "")
    return task or Path(file).stem


def _tell(plan: SweepPlan):
    """Return what prints a line for each trial that ended."""

    def tell(trial: FrozenTrial) -> None:
        why = trial.user_attrs.get("reason") or trial.user_attrs.get("pruned", "")
        words = [f"trial {trial.number:<4}", trial.state.name.lower(), _found(trial, plan), why]
        show.message("  ".join(word for word in words if word), STYLES.get(trial.state.name, ""))

    return tell


def _found(trial: FrozenTrial, plan: SweepPlan) -> str:
    """Return a trial's value and what it tried."""
    value = [f"{plan.metric} {wording.number(trial.value)}"] if trial.value is not None else []
    short = {key: float(f"{each:.4g}") if isinstance(each, float) else each for key, each in trial.params.items()}
    return "  ".join([*value, *(f"{key}={wording.value_text(each)}" for key, each in short.items())])


def _print(result: SweepResult, plan: SweepPlan, args: Namespace, recipe: Recipe) -> None:
    states = [trial.state.name for trial in result.trials]
    lines = {"trials": ", ".join(f"{states.count(name)} {name.lower()}" for name in STYLES if name in states)}
    if result.best is not None:
        lines["best"] = f"trial {result.best.number}  {_found(result.best, plan)}"
        lines["best run"] = str(show.near(result.best_run or result.folder))
        data = ["--data", args.data] if args.data else []
        best = str(show.near(result.recipe))
        words = [args.target, "--recipe", best, *data] if "task" in recipe.local else [best, *data]
        lines["use it"] = shlex.join([show.command("forge"), "fit", *words])
    named = f'"${STORAGE}"' if os.environ.get(STORAGE) else shlex.quote(str(show.near(result.journal)))
    lines["look at it"] = f"optuna-dashboard {args.storage or named}"
    for label, text in lines.items():
        show.console().print(Text.assemble((f"{label:<12}", "dim"), text), soft_wrap=True)
