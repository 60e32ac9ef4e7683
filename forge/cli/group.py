"""Several runs with one command: `forge fit ... --seeds 0,1,2`, `--folds 5`."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from forge.cli import ranks, target
from forge.errors import ForgeError, NegativeVerdict
from forge.runs.folder import is_group
from forge.util import show


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that make a group of runs."""
    group = parser.add_argument_group(
        "several runs", "in one folder: their mean and deviation are one row of `forge runs`; --resume continues all"
    )
    group.add_argument("--seeds", metavar="N,N,...", help="train once with each seed, as in --seeds 0,1,2")
    group.add_argument(
        "--folds", type=int, metavar="K", help="train once on each of K folds: the data function gets fold and folds"
    )
    group.add_argument("--jobs", type=int, metavar="J", help="runs at a time (default: 1); with several GPUs one each")


def is_asked(args: Namespace) -> bool:
    """Whether the arguments ask for a group; a group that is continued knows its runs."""
    continued = bool(args.resume and args.run_dir and is_group(Path(args.run_dir)))
    if args.jobs is not None and not (args.seeds or args.folds or continued):
        raise ForgeError("--jobs is for several runs: add --seeds 0,1,2 or --folds 5.")
    return continued or args.seeds is not None or args.folds is not None


def run(args: Namespace) -> int:
    """Train the runs of a group that are not finished, each by `forge fit` in a process of its own."""
    from forge.engine import repeat
    from forge.runs.card import group_of
    from forge.runs.group import RunGroup, members, open_group
    from forge.runs.summary import group_summary

    _refuse(args)
    jobs = 1 if args.jobs is None else args.jobs
    repeat.check_jobs(jobs)
    asked = args.seeds is not None or args.folds is not None
    runs = members(parse_seeds(args.seeds), args.folds) if asked else RunGroup(args.run_dir).members
    if not runs:
        raise ForgeError(f"{args.run_dir} names no runs: add --seeds or --folds.")
    recipe = target.read(args)
    repeat.check_members(recipe, runs)
    first = [*args.overrides, *repeat.as_overrides(next(iter(runs.values())))]
    target.load(Namespace(**{**vars(args), "overrides": first}), to_train=True)  # refuses what no run could use
    job = [*target.same_target(args), *(["--weights", args.weights] if args.weights else [])]
    name = group_of(recipe, recipe.local["task"].__name__ if "task" in recipe.local else "")
    home = repeat.choose_folder(name, job, args.run_dir, "auto" if args.resume else None)
    group = open_group(home, shlex.join(["forge", *sys.argv[1:]]), job, runs)
    talks = not args.quiet
    count = len(group.members)

    def words(values: repeat.Values) -> list[str]:
        given = {"--weights": args.weights, "--nproc": args.nproc, "--max-restarts": args.max_restarts or None}
        named = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
        flags = [f"--{flag}" for flag in ("quiet", "trace") if getattr(args, flag)]
        return [*target.same_target(args, overrides=[*args.overrides, *repeat.as_overrides(values)]), *named, *flags]

    def tell(run: str, how: str) -> None:
        if talks or how not in ("", repeat.FINISHED):
            place = list(group.members).index(run) + 1
            show.message(f"{run} ({place} of {count}){f': {how}' if how else ''}", "" if how else "bold")

    failed = repeat.train_apart(group, words, jobs, tell)
    if talks:
        console = show.console()
        console.print()
        console.print(group_summary(RunGroup(home)), soft_wrap=True)
    if failed:
        raise NegativeVerdict(f"{len(failed)} of {count} runs failed: {', '.join(failed)}. --resume tries them again.")
    return 0


def parse_seeds(given: str | None) -> list[int]:
    """Read the value of --seeds."""
    try:
        seeds = [int(word) for word in given.split(",")] if given is not None else []
    except ValueError:
        raise ForgeError(f"--seeds takes whole numbers with commas between them, as in 0,1,2; not {given!r}.") from None
    if len(set(seeds)) < len(seeds):
        raise ForgeError(f"--seeds {given} names a seed twice: the two runs would be the same.")
    return seeds


def _refuse(args: Namespace) -> None:
    if args.smoke:
        raise ForgeError("--smoke keeps nothing, so there is nothing to put together: leave out --seeds and --folds.")
    if args.nnodes != "1" or ranks.is_worker():
        raise ForgeError("A group starts its runs itself, on this host: leave out torchrun, srun and --nnodes.")
