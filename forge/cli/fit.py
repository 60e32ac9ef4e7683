"""`forge fit`: train a recipe, or a task from the user's own file."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from rich.text import Text

from forge.cli import group, ranks, target
from forge.cli.evaluate import explain_misfit
from forge.config.recipe import DEFAULT
from forge.errors import ForgeError, Interrupted
from forge.util import show
from forge.util.children import die_with_parent

if TYPE_CHECKING:
    from forge.data import Splits
    from forge.engine.trainer import FitResult, Trainer

EXAMPLES = """\
examples:
  forge fit quickstart
  forge fit quickstart trainer.max_epochs=3 task.hidden=64
  forge fit my_task.py:MyTask --recipe fast task.lr=1e-3
  forge fit my_task.py:MyTask --smoke
  forge fit my_recipe.yaml --run-dir runs/first --resume
  forge fit quickstart --seeds 0,1,2
  forge fit quickstart --seeds 0,1,2 --resume
  forge fit quickstart -p PLUGIN PLUGIN.OPTION=VALUE -p no:PLUGIN
  forge fit quickstart --nproc 2 -p STRATEGY --max-restarts 1
"""


def parser() -> ArgumentParser:
    parser = show.new_parser("fit", "Train a recipe, or a task from your own file.", EXAMPLES)
    target.add_arguments(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="folder of the run (default: runs/RECIPE/TIME-ID)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue --run-dir (or the folder named after it), or the newest run of the same job (recipe, task, "
        "options), from its newest valid checkpoint; without one, start new",
    )
    parser.add_argument("--smoke", action="store_true", help="run two batches of train, val and test, and keep nothing")
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="weights to start from: a run, a checkpoint, a file, the URL of one (s3://...), or best",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print only warnings and errors")
    parser.add_argument("--trace", action="store_true", help="print every hook call to stderr (slow)")
    group.add_arguments(parser)
    ranks.add_arguments(parser)
    return parser


def run(args: Namespace) -> int:
    die_with_parent()
    if group.is_asked(args):
        return group.run(args)
    recipe = target.load(args, to_train=True)
    if args.smoke:
        _refuse_kept(args)
        recipe = recipe.with_trainer({"smoke": True})
    if args.nproc is not None:
        with _slurms_signal(args.resume):
            return ranks.launch(args, recipe)
    ranks.use_users_command()
    talks = ranks.rank() == 0 and not args.quiet
    if args.quiet:
        logging.getLogger("forge").setLevel(logging.WARNING)  # show.plain_messages restores the level
    with _slurms_signal(args.resume):
        trainer, task, data = target.build(recipe, args.run_dir)
        if args.resume:
            trainer.resume = "auto"
        ranks.continue_own_run(trainer)
        if args.trace:
            trainer.trace = sys.stderr.write
        is_default = "max_epochs" in recipe.trainer and recipe.origin["trainer.max_epochs"] == DEFAULT
        if talks and not args.smoke and is_default:
            show.message(f"Training for {trainer.max_epochs} epochs; trainer.max_epochs=N changes that.", "dim")
        with explain_misfit(args, "fit", task):
            result = trainer.fit(task, data.train, data.val, weights=args.weights)
            if args.smoke and data.test is not None:
                result.metrics.update(trainer.test(task, data.test))
    if talks:
        _report(result, trainer, data, args)
    return 0


@contextmanager
def _slurms_signal(resume: bool) -> Iterator[None]:
    """In a job of SLURM, expect SIGUSR1 outside of the fit too, where it would end the process and so fail the job.

    Before the fit, leave with the exit code that has the job requeued. After it, go on: nothing is left to save.
    """
    number = getattr(signal, "SIGUSR1", None)
    is_main = threading.current_thread() is threading.main_thread()
    if number is None or not is_main or "SLURM_JOB_ID" not in os.environ or signal.getsignal(number) != signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise Interrupted("SIGUSR1 before the first update: the same command goes on.")

    if resume:
        signal.signal(number, leave)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_IGN)


def _refuse_kept(args: Namespace) -> None:
    """Raise for arguments that need what a smoke run does not keep."""
    given = next((flag for flag, value in (("--resume", args.resume), ("--run-dir", args.run_dir)) if value), None)
    if given:
        raise ForgeError(f"--smoke keeps nothing, so it has no {given}: leave one of them out.")


def _report(result: FitResult, trainer: Trainer, data: Splits, args: Namespace) -> None:
    """Print the result; on a terminal the progress bar has printed it, and only the next command is added."""
    console = show.console()
    prints = any("result_table" in plugin.provides for plugin in trainer.stack)
    shown = prints and sys.stdout.isatty() and sys.stderr.isatty()
    lines = {} if shown else _lines(result, trainer.resumed_from == result.updates)
    if args.smoke:
        lines["smoke"] = "it runs: two batches of each stage; nothing was kept"
    if data.test is not None and result.run_dir is not None:
        best = ":best" if (result.run_dir / "checkpoints" / "best").exists() else ""
        weights = f"{show.near(result.run_dir)}{best}"
        lines["test"] = shlex.join([show.command("forge"), "test", *_same_task(args), "--weights", weights])
    if shown:
        for label, text in lines.items():
            console.print(Text.assemble((f"{label:<12}", "dim"), text), soft_wrap=True)
        return
    from forge.metrics.media import is_diagnostic
    from forge.runs.compare import bests
    from forge.runs.folder import RunFolder
    from forge.runs.summary import summary

    diagnostics = [name for name in result.metrics if is_diagnostic(name, trainer.stack.names)]
    if diagnostics:
        plugins = ", ".join(dict.fromkeys(name.partition("/")[0] for name in sorted(diagnostics)))
        lines = {"also": f"{len(diagnostics)} metrics of {plugins}, in the run's logs", **lines}
    best = bests(RunFolder(result.run_dir)) if result.run_dir is not None else {}
    console.print()
    shown_metrics = {name: value for name, value in result.metrics.items() if name not in diagnostics}
    console.print(summary(shown_metrics, best, lines), soft_wrap=True)


def _lines(result: FitResult, was_complete: bool) -> dict[str, str]:
    from forge.runs.summary import folder_lines
    from forge.runs.wording import counted, ended

    done = f"{counted(result.epochs, 'epoch')}, {counted(result.updates, 'update')}"
    found = {"trained": ended(done, result.stop_reason, was_complete)}
    return found if result.run_dir is None else found | folder_lines(result.run_dir)


def _same_task(args: Namespace) -> list[str]:
    """Return the arguments that name the same task and data."""
    kept = [text for text in args.overrides if text.startswith(("task.", "data."))]
    return target.same_target(args, overrides=kept, plugins=())
