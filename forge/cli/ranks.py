"""Several processes on the command line: start them, and let only rank 0 print."""

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
from typing import TYPE_CHECKING, Any

from forge import registry
from forge.errors import ForgeError, StackError

if TYPE_CHECKING:
    from forge.config import Recipe
    from forge.engine.trainer import Trainer

NAMED, FLAGS = ("recipe", "data", "run_dir", "weights", "out"), ("resume", "smoke", "trace", "quiet")
"""The options, with and without a value, that are passed on to workers, if the verb has them."""
COMMAND = "FORGE_COMMAND"
"""The environment variable with the user's command, which workers write into the run card instead of their own."""


def is_worker() -> bool:
    """Whether torchrun or srun says that this process is one of several."""
    from forge.distributed.rank_info import RankInfo

    return RankInfo.read().world > 1


def rank() -> int:
    """Return the rank of this process; 0 for a single process."""
    if "WORLD_SIZE" not in os.environ and "SLURM_NTASKS" not in os.environ:
        return 0
    from forge.distributed.rank_info import RankInfo

    return RankInfo.read().rank


@contextmanager
def only_first_talks(number: int) -> Iterator[None]:
    """On every rank but 0, print only the warnings of forge's log, prefixed with the rank."""
    if number == 0:
        yield
        return
    logger = logging.getLogger("forge")
    logger.setLevel(logging.WARNING)  # show.plain_messages restores the level

    def with_rank(record: logging.LogRecord) -> bool:
        record.msg, record.args = f"rank {number}: {record.getMessage()}", None
        return True

    logger.addFilter(with_rank)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rank 0 prints the same ones
            yield
    finally:
        logger.removeFilter(with_rank)


# -- launching --------------------------------------------------------------------------------------------------------


def add_arguments(parser: ArgumentParser, only_nproc: bool = False) -> None:
    """Add the arguments that start ranks; a single pass over data has no restarts and no changing hosts."""
    group = parser.add_argument_group(
        "several processes", "with a plugin that provides strategy; torchrun and srun work as well"
    )
    group.add_argument("--nproc", type=int, metavar="N", help="number of processes to start on this host")
    if only_nproc:
        return
    group.add_argument(
        "--max-restarts", type=int, default=0, metavar="K", help="restarts from the last checkpoint after a crash"
    )
    group.add_argument(
        "--nnodes", default="1", metavar="N", help="number of hosts, each given the same command; MIN:MAX may vary"
    )
    group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="rendezvous address of several hosts")


def launch(args: Namespace, recipe: Recipe) -> int:
    """Start the ranks of `forge fit` in one run folder, which is chosen here so that restarts continue it."""
    from forge.distributed.launch import Launch, nodes
    from forge.runs.choose import choose

    least, most = nodes(args.nnodes)
    if args.max_restarts < 0:
        raise ForgeError(f"--max-restarts is {args.max_restarts}; it must be at least 0.")
    if most > 1 and not (args.rdzv_endpoint and args.run_dir):
        raise ForgeError("Several hosts need --rdzv-endpoint HOST:PORT and --run-dir DIR, the same on each.")
    given = {} if args.run_dir is None else {"run_dir": args.run_dir}
    trainer = checked_trainer(recipe, args.nproc, **given)
    if args.resume:
        trainer.resume = "auto"
    chosen = choose(trainer, getattr(recipe.local.get("task"), "__name__", "")).run_dir
    words = _worker_words("fit", Namespace(**{**vars(args), "run_dir": chosen}))
    os.environ[COMMAND] = shlex.join(sys.argv)
    try:
        return Launch(args.nproc, args.max_restarts, (least, most), args.rdzv_endpoint or "localhost:0").run(words)
    finally:
        os.environ.pop(COMMAND, None)


def launch_pass(verb: str, args: Namespace, recipe: Recipe) -> int:
    """Start the ranks of a verb that passes over its data once, without restarts."""
    from forge.distributed.launch import Launch

    checked_trainer(recipe, args.nproc)
    return Launch(args.nproc).run(_worker_words(verb, args))


def checked_trainer(recipe: Recipe, processes: int, **given: Any) -> Trainer:
    """Build the Trainer that every one of several processes will build, so that its errors are printed once."""
    from forge.engine.trainer import Trainer

    if processes < 1:
        raise ForgeError(f"--nproc is {processes}; it must be at least 1.")
    trainer = Trainer(recipe=recipe, **given)
    if processes > 1 and not any("strategy" in plugin.provides for plugin in trainer.stack):
        raise StackError(
            f"This starts {processes} processes, but no plugin in this stack connects "
            f"them.{registry.advice('processes', ' Add {}.')}"
        )
    return trainer


def _worker_words(verb: str, args: Namespace) -> list[str]:
    """Return the command of a worker: this command without the options of the launch."""
    given = vars(args)
    return [
        verb,
        args.target,
        *args.overrides,
        *(f"-p{name}" for name in args.plugins),
        *(f"--{name.replace('_', '-')}={given[name]}" for name in NAMED if given.get(name) is not None),
        *(f"--{name}" for name in FLAGS if given.get(name)),
        *(f"--at-least={name}={least!r}" for name, least in given.get("at_least", ())),
    ]


def use_users_command() -> None:
    """In a worker of `forge fit --nproc`, set sys.argv to the command that the user typed."""
    typed = os.environ.pop(COMMAND, None)  # not for processes that this one starts
    if typed is not None:
        sys.argv = shlex.split(typed)


def continue_own_run(trainer: Trainer) -> None:
    """Let a restarted worker continue from the last checkpoint of its run folder."""
    from forge.distributed.worker_exit import FOLDER
    from forge.runs.choose import checkpoints_of

    wanted = trainer.wanted_run_dir
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not wanted or not (restarted or FOLDER in os.environ):
        return
    # our launcher has chosen a folder without checkpoints, so these are of this run, even if hosts have changed
    if checkpoints_of(Path(str(wanted))).all() or (restarted and trainer.resume is None):
        trainer.resume = "auto"
