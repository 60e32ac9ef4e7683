"""What the command line does about several processes: it starts them, and lets only rank 0 talk."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forge.errors import ForgeError, StackError

if TYPE_CHECKING:
    from forge.config import Recipe
    from forge.engine.trainer import Trainer

NAMED, FLAGS = ("recipe", "data", "run_dir", "weights", "out"), ("resume", "trace", "quiet")
"""The options, with and without a value, that workers are told of, whichever of them a verb has."""
COMMAND = "FORGE_COMMAND"
"""The environment variable that tells workers what the user has typed: that, and not theirs, is in the run card."""


def rank() -> int:
    """Which of several processes this is; 0 where there is one."""
    if "WORLD_SIZE" not in os.environ and "SLURM_NTASKS" not in os.environ:
        return 0
    from forge.distributed.rank_info import RankInfo

    return RankInfo.read().rank


@contextmanager
def only_first_talks(number: int) -> Iterator[None]:
    """On every rank but 0, warnings of forge's log alone are printed, with the rank before them."""
    if number == 0:
        yield
        return
    logger = logging.getLogger("forge")
    logger.setLevel(logging.WARNING)  # whoever opened the log puts its level back

    def with_rank(record: logging.LogRecord) -> bool:
        record.msg, record.args = f"rank {number}: {record.getMessage()}", None
        return True

    logger.addFilter(with_rank)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rank 0 gets the same ones
            yield
    finally:
        logger.removeFilter(with_rank)


# -- launching --------------------------------------------------------------------------------------------------------


def add_arguments(parser: ArgumentParser, only_nproc: bool = False) -> None:
    """What starts ranks; a verb that passes over its data once has nothing to restart, nor hosts that come and go."""
    group = parser.add_argument_group("several processes", "with -p ddp or -p fsdp; torchrun and srun work as well")
    group.add_argument("--nproc", type=int, metavar="N", help="start so many processes on this host")
    if only_nproc:
        return
    group.add_argument(
        "--max-restarts", type=int, default=0, metavar="K", help="after a crash go on from the last checkpoint, K times"
    )
    group.add_argument(
        "--nnodes", default="1", metavar="N", help="hosts, each given the same command; MIN:MAX may vary"
    )
    group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where several hosts meet")


def launch(args: Namespace, recipe: Recipe) -> int:
    """Start the ranks of `forge fit`, all in one run folder, which is chosen here so that restarts continue it."""
    from forge.distributed.launch import Launch, nodes

    least, most = nodes(args.nnodes)
    if args.max_restarts < 0:
        raise ForgeError(f"--max-restarts is {args.max_restarts}; it must be at least 0.")
    if most > 1 and not (args.rdzv_endpoint and args.run_dir):
        raise ForgeError("With several hosts say --rdzv-endpoint HOST:PORT and --run-dir DIR, the same ones on each.")
    run_dir = _run_dir(_joined(args, recipe), args, recipe)
    words = _worker_words("fit", Namespace(**{**vars(args), "run_dir": run_dir}))
    os.environ[COMMAND] = shlex.join(sys.argv)
    try:
        return Launch(args.nproc, args.max_restarts, (least, most), args.rdzv_endpoint or "localhost:0").run(words)
    finally:
        os.environ.pop(COMMAND, None)


def launch_pass(verb: str, args: Namespace, recipe: Recipe) -> int:
    """Start the ranks of a verb that passes over its data once: nothing is resumed, so nothing is started again."""
    from forge.distributed.launch import Launch

    _joined(args, recipe)
    return Launch(args.nproc).run(_worker_words(verb, args))


def _joined(args: Namespace, recipe: Recipe) -> Trainer:
    """The Trainer that every worker will make; what they would all refuse is refused here, once."""
    from forge.engine.trainer import Trainer

    if args.nproc < 1:
        raise ForgeError(f"--nproc is {args.nproc}; it must be at least 1.")
    run_dir = getattr(args, "run_dir", None)
    trainer = Trainer(recipe=recipe, **({} if run_dir is None else {"run_dir": run_dir}))
    if not any("strategy" in plugin.provides for plugin in trainer.stack):
        raise StackError(
            f"--nproc {args.nproc} starts {args.nproc} processes, but nothing in this stack joins them. Add -p ddp, or "
            "-p fsdp where the model is too big for one device."
        )
    return trainer


def _run_dir(trainer: Trainer, args: Namespace, recipe: Recipe) -> str | None:
    """Where the workers of a fit write."""
    from forge.runs import choose

    if args.resume:
        trainer.resume = "auto"
    chosen = choose.choose(trainer, getattr(recipe.local.get("task"), "__name__", "")).run_dir
    return str(chosen) if chosen is not None else None


def _worker_words(verb: str, args: Namespace) -> list[str]:
    """The command of a worker: this one, less what concerns the launch."""
    given = vars(args)
    return [
        verb,
        args.target,
        *args.overrides,
        *(f"-p{name}" for name in args.plugins),
        *(f"--{name.replace('_', '-')}={given[name]}" for name in NAMED if given.get(name) is not None),
        *(f"--{name}" for name in FLAGS if given.get(name)),
    ]


def go_by_users_command() -> None:
    """In a worker of `forge fit --nproc`, make the command that the user has typed this process's own."""
    typed = os.environ.pop(COMMAND, None)  # whatever this process starts in its turn has a command of its own
    if typed is not None:
        sys.argv = shlex.split(typed)


def continue_own_run(trainer: Trainer) -> None:
    """A worker that its agent has started again goes on from the last checkpoint in its run folder."""
    from forge.distributed.exit_codes import FOLDER
    from forge.runs.choose import checkpoints_of

    wanted = trainer.wanted_run_dir
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not wanted or not (restarted or FOLDER in os.environ):
        return
    # our own launcher has looked: checkpoints in a new run's folder are this run's, however often hosts came and went
    if checkpoints_of(Path(str(wanted))).all() or (restarted and trainer.resume is None):
        trainer.resume = "auto"
