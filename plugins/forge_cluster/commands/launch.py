"""`forge launch`: write a job for a cluster, and submit it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from forge.cli import target
from forge.errors import ForgeError, StackError
from forge.util import show
from forge.util.files import absolute, atomic_write

if TYPE_CHECKING:
    from forge.config import Recipe
    from forge_cluster.launching import LaunchJob

SYSTEMS = {"slurm": ".sbatch", "kubernetes": ".yaml", "ray": ".py", "ssh": ".sh"}
GROUP = "scale"
EXAMPLES = """\
The job is `forge fit RECIPE … --run-dir DIR --resume`: preempted and started again, it goes on where it was. DIR must
be on a file system that all nodes share.

examples:
  forge launch slurm my_recipe.yaml -p fsdp --nodes 4 --gpus 8 --time 24:00:00 --run-dir /shared/runs/first --submit
  forge launch slurm quickstart --array task.lr=1e-3,1e-2 --array trainer.seed=1,2,3 --run-dir runs/grid
  forge launch kubernetes my_recipe.yaml -p ddp --nodes 2 --gpus 8 --image me/forge:1 --claim runs --run-dir /runs/first
  forge launch ray my_recipe.yaml -p ddp --nodes 2 --gpus 8 --run-dir /shared/runs/first --submit
  forge launch ssh my_recipe.yaml -p ddp --hosts node1,node2 --gpus 8 --run-dir /shared/runs/first
"""


def parser() -> ArgumentParser:
    parser = show.new_parser("launch", "Write a job for a cluster, and submit it.", EXAMPLES)
    parser.add_argument("system", metavar="SYSTEM", choices=SYSTEMS, help="slurm, kubernetes, ray or ssh")
    target.add_arguments(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="folder of the run, shared by all nodes (default: runs/NAME)")
    parser.add_argument("--name", metavar="NAME", help="name of the job (default: the recipe's or task's)")
    parser.add_argument("--out", metavar="FILE", help="file to write, or - to print it (default: NAME and an ending)")
    parser.add_argument(
        "--submit", action="store_true", help="submit it too: sbatch, kubectl, ray, or run the ssh script"
    )
    size = parser.add_argument_group("size")
    size.add_argument("--nodes", type=int, metavar="N", help="number of nodes (default: 1; ssh: the number of hosts)")
    size.add_argument(
        "--gpus", type=int, default=0, metavar="N", help="GPUs of each node, one process each (default: 0)"
    )
    size.add_argument("--procs", type=int, metavar="N", help="processes of each node (default: one per GPU, else 1)")
    size.add_argument("--cpus", type=int, metavar="N", help="cores of each process")
    size.add_argument("--memory", metavar="SIZE", help="memory of each node: 64G on SLURM, 64Gi on Kubernetes")
    size.add_argument(
        "--grace", type=int, default=120, metavar="S", help="seconds to save in before the end (default: 120)"
    )
    size.add_argument(
        "--restarts", type=int, default=3, metavar="K", help="restarts after a crash, not on SLURM (default: 3)"
    )
    size.add_argument("--python", metavar="PATH", help="the Python of the nodes (slurm, ssh: this one; else: python)")
    one = parser.add_argument_group("of one system")
    one.add_argument("--time", metavar="LIMIT", help="slurm: time limit, after which the job is requeued: 24:00:00")
    one.add_argument("--partition", metavar="NAME", help="slurm: partition")
    one.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="TEXT",
        help="slurm: an option of sbatch, --option=--account=me",
    )
    one.add_argument(
        "--array", action="append", default=[], metavar="KEY=A,B", help="slurm: one job for each value; may be repeated"
    )
    one.add_argument("--kind", default="pytorchjob", metavar="KIND", help="kubernetes: pytorchjob, trainjob or jobset")
    one.add_argument("--image", metavar="IMAGE", help="kubernetes: container image with forge and your code")
    one.add_argument("--claim", metavar="PVC", help="kubernetes: volume claim for the run folder")
    one.add_argument(
        "--mount", default="/runs", metavar="DIR", help="kubernetes: where the claim is mounted (default: /runs)"
    )
    one.add_argument("--address", metavar="URL", help="ray: address of the cluster, to submit to")
    one.add_argument("--hosts", metavar="A,B", help="ssh: hosts, the first for the rendezvous")
    return parser


def run(args: Namespace) -> int:
    job = _job(args)
    file = Path(args.out if args.out and args.out != "-" else f"{job.name}{SYSTEMS[args.system]}")
    words = _submit_words(args, file)
    text = _text(args, job, words)
    if args.out == "-":
        if args.submit:
            raise ForgeError("--out - prints the job, and --submit needs it in a file: leave one of them out.")
        print(text, end="")
        return 0
    with atomic_write(absolute(file)) as beside:
        beside.write_text(text)
    show.message(f"Wrote {file}. To submit it: {shlex.join(words)}" if not args.submit else f"Wrote {file}.")
    return _submit(words) if args.submit else 0


def _job(args: Namespace) -> LaunchJob:
    from forge_cluster.launching import LaunchJob
    from forge_cluster.launching.job import parse_sweep

    hosts = args.hosts.split(",") if args.hosts else []
    if (args.system == "ssh") != bool(hosts):
        raise ForgeError(
            "Name the hosts with --hosts A,B." if not hosts else f"--hosts is for ssh, not for {args.system}."
        )
    sweep = parse_sweep(args.array)
    recipe = target.load(Namespace(**{**vars(args), "overrides": [*args.overrides, *(sweep[0] if sweep else ())]}))
    shared = args.system in ("slurm", "ssh")
    plain = re.sub(r"[^a-z0-9]+", "-", target.name_of(recipe).lower()).strip("-")
    name = args.name or plain[:42].strip("-") or "forge"
    folder = args.run_dir or f"runs/{name}"
    if args.system == "kubernetes" and args.run_dir is None:
        folder = f"{args.mount.rstrip('/')}/{name}"
    job = LaunchJob(
        name=name,
        words=tuple(target.same_target(args)),
        run_dir=folder if args.system == "kubernetes" else str(absolute(folder)),
        nodes=args.nodes if args.nodes is not None else len(hosts) or 1,
        gpus=args.gpus,
        procs=args.procs if args.procs is not None else args.gpus or 1,
        cpus=args.cpus,
        memory=args.memory,
        python=args.python or (sys.executable if shared else "python"),
        folder=str(absolute(".")),
        grace=args.grace,
        restarts=args.restarts,
        sweep=sweep,
    )
    _refuse_unconnected(recipe, job.ranks)
    return job


def _refuse_unconnected(recipe: Recipe, ranks: int) -> None:
    """Build the Trainer that every rank will build: better refused here than after a night in the queue."""
    from forge.engine.trainer import Trainer

    trainer = Trainer(recipe=recipe)
    if ranks > 1 and not any("strategy" in plugin.provides for plugin in trainer.stack):
        raise StackError(
            f"This job has {ranks} processes, but no plugin in this stack connects them. Add -p ddp, or -p fsdp if the "
            "model is too big for one device."
        )


def _text(args: Namespace, job: LaunchJob, words: list[str]) -> str:
    from forge_cluster.launching import KINDS, manifest, ray_driver, sbatch_script, ssh_script

    if args.system == "slurm":
        return sbatch_script(job, args.time, args.partition, args.option)
    if args.system == "ssh":
        return ssh_script(job, args.hosts.split(","))
    if args.system == "ray":
        return ray_driver(job, submit=shlex.join(words))
    if args.kind not in KINDS:
        raise ForgeError(f"--kind {args.kind}: it is one of {', '.join(KINDS)}.")
    if not args.image:
        raise ForgeError("Name a container image that has forge and your code: --image NAME:TAG.")
    return manifest(job, args.kind, args.image, args.claim, args.mount)


def _submit_words(args: Namespace, file: Path) -> list[str]:
    address = [f"--address={args.address}"] if args.address else []
    named = f"./{file}" if str(file).startswith("-") else str(file)
    return {
        "slurm": ["sbatch", named],
        "kubernetes": ["kubectl", "apply", "-f", named],
        "ray": ["ray", "job", "submit", *address, "--", "python", str(absolute(file))],
        "ssh": ["bash", named],
    }[args.system]


def _submit(words: list[str]) -> int:
    if shutil.which(words[0]) is None:
        raise ForgeError(
            f"--submit runs {words[0]!r}, which is not installed here. Run `{shlex.join(words)}` where it is."
        )
    return subprocess.run(words).returncode
