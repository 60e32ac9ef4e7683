"""`forge launch`: write the file that runs a fit on a cluster, and print the command that submits it."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from forge.cli import ranks, target
from forge.errors import ForgeError
from forge.util import show
from forge.util.files import absolute, atomic_write, check_name

if TYPE_CHECKING:
    from forge_cluster.launching import LaunchJob

SYSTEMS = {
    "slurm": (".sbatch", "sbatch"),
    "kubernetes": (".yaml", "kubectl apply -f"),
    "skypilot": (".yaml", "sky jobs launch"),
}
"""The ending of each system's file, and what submits it."""
GROUP = "scale"
EXAMPLES = """\
The job is `forge fit RECIPE … --run-dir DIR --resume`: preempted and started again, it goes on where it was. DIR must
be on a file system that all nodes share.

examples:
  forge launch my_recipe.yaml -p fsdp --nodes 4 --gpus 8 --time 24:00:00 --run-dir /shared/runs/first
  forge launch my_recipe.yaml -p ddp --to kubernetes --nodes 2 --gpus 8 --image me/forge:1 --claim runs
  forge launch my_recipe.yaml -p ddp --to skypilot --nodes 2 --gpus H100:8 --claim runs
"""
BELONGS = {"time": "slurm", "option": "slurm", "image": "kubernetes, skypilot", "claim": "kubernetes, skypilot"}
"""Options that not every system has."""


def parser() -> ArgumentParser:
    parser = show.new_parser("launch", "Write the file that runs a fit on a cluster.", EXAMPLES)
    target.add_arguments(parser)
    parser.add_argument("--to", choices=SYSTEMS, default="slurm", help="what runs the job (default: slurm)")
    parser.add_argument(
        "--run-dir", metavar="DIR", help="folder of the run, which names the job (default: runs/ and the recipe's name)"
    )
    add = parser.add_argument_group("size").add_argument
    add("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    add("--gpus", default="", metavar="N", help="GPUs of each node, one process each: 8, or by name H100:8")
    add("--procs", type=int, metavar="N", help="processes of each node (default: one per GPU, else 1)")
    add("--cpus", type=int, metavar="N", help="cores of each process")
    add("--grace", type=int, default=120, metavar="S", help="seconds to save in before the end (default: 120)")
    add("--restarts", type=int, default=3, metavar="K", help="restarts after a crash (default: 3)")
    add = parser.add_argument_group("of one system").add_argument
    add("--time", metavar="LIMIT", help="slurm: time limit, after which the job is queued again: 24:00:00")
    add("--option", action="append", default=[], metavar="TEXT", help="slurm: an option of sbatch; may be repeated")
    add("--image", metavar="IMAGE", help="kubernetes, skypilot: container image with forge and your code")
    add("--claim", metavar="NAME", help="kubernetes, skypilot: the volume that the run folder is in")
    return parser


def run(args: Namespace) -> int:
    from forge_cluster.launching import pytorchjob, sbatch_script, skypilot_task

    for name, systems in BELONGS.items():
        if getattr(args, name) and args.to not in systems:
            raise ForgeError(f"--{name} is for {systems}, not for {args.to}: leave it out.")
    job = _job(args)
    writers = {"slurm": sbatch_script, "kubernetes": pytorchjob, "skypilot": skypilot_task}
    ending, command = SYSTEMS[args.to]
    file = f"{job.name}{ending}"
    with atomic_write(absolute(file)) as beside:
        beside.write_text(writers[args.to](job))
    show.message(f"Wrote {file}. To submit it: {command} {file}")
    return 0


def _job(args: Namespace) -> LaunchJob:
    """Build what every rank will build, too: better refused here than after a night in the queue."""
    from forge_cluster.launching import LaunchJob

    recipe = target.load(args)
    gpus = re.fullmatch(r"|(?:\w+:)?([1-9]\d*)", args.gpus, re.ASCII)
    if gpus is None:
        raise ForgeError(f"--gpus {args.gpus}: give a number, or a name and a number as in H100:8.")
    folder = args.run_dir or f"{'/runs' if args.claim else 'runs'}/{_plain(target.name_of(recipe))}"
    check_name(folder)
    is_here = args.to == "slurm"
    same = ("nodes", "gpus", "cpus", "grace", "restarts", "time", "image", "claim")
    job = LaunchJob(
        name=_plain(PurePosixPath(folder).name),
        words=tuple(target.same_target(args)),
        run_dir=str(absolute(folder)) if is_here else folder,
        procs=args.procs if args.procs is not None else int(gpus[1] or 1),
        python=sys.executable if is_here else "python",
        folder=str(absolute(".")),
        options=tuple(args.option),
        **{name: getattr(args, name) for name in same},
    )
    ranks.checked_trainer(recipe, job.nodes * job.procs)
    return job


def _plain(name: str) -> str:
    """Return a name that every system takes for a job."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:42].strip("-") or "forge"
