"""`forge launch`: write a job for a cluster, and submit it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.cli import target
from forge.errors import ForgeError, StackError
from forge.runs.folder import JOB
from forge.util import show
from forge.util.files import absolute, atomic_write, check_name

if TYPE_CHECKING:
    from forge.config import Recipe
    from forge_cluster.launching import LaunchJob

SYSTEMS = {"slurm": ".sbatch", "kubernetes": ".yaml", "ray": ".py", "ssh": ".sh", "here": ".sh"}
REMEMBERED = ("slurm", "kubernetes")
"""Systems whose jobs go on alone once they are submitted: `forge jobs` looks after them."""
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
    parser.add_argument(
        "system", metavar="SYSTEM", choices=SYSTEMS, help="slurm, kubernetes, ray, ssh, or here: this machine"
    )
    target.add_arguments(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="folder of the run, shared by all nodes (default: runs/NAME)")
    parser.add_argument("--name", metavar="NAME", help="name of the job (default: the recipe's or task's)")
    parser.add_argument("--out", metavar="FILE", help="file to write, or - to print it (default: NAME and an ending)")
    parser.add_argument(
        "--submit", action="store_true", help="submit it too: sbatch, kubectl, ray; ssh and here run in the foreground"
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
        "--restarts",
        type=int,
        default=3,
        metavar="K",
        help="restarts after a crash; on SLURM only after a task was killed, on other nodes (default: 3)",
    )
    size.add_argument(
        "--python", metavar="PATH", help="the Python of the nodes (slurm, ssh, here: this one; else: python)"
    )
    size.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of every rank: NCCL_DEBUG=INFO; may be repeated",
    )
    _add_of_one_system(parser)
    return parser


def _add_of_one_system(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("of one system")
    belongs: dict[str, tuple[str, Any]] = {}

    def add(systems: str, name: str, metavar: str, help: str, default: Any = None) -> None:
        action = "append" if default == [] else "store"
        text = f"{systems}: {help}"
        made = group.add_argument(name, metavar=metavar, default=default, help=text, action=action)
        belongs[made.dest] = (systems, default)

    add("slurm", "--time", "LIMIT", "time limit, after which the job is requeued: 24:00:00")
    add("slurm", "--partition", "NAME", "partition")
    add("slurm", "--option", "TEXT", "an option of sbatch, --option=--account=me; may be repeated", [])
    add("slurm", "--gpu-option", "TEXT", "how to ask for GPUs (default: --gpus-per-node={}); --gpus-per-task=1, say")
    add("slurm", "--array", "KEY=A,B", "one job for each value; may be repeated", [])
    add("slurm", "--container", "KIND", "run in --image, by pyxis (enroot) or apptainer")
    add("slurm", "--bind", "SOURCE[:TARGET]", "one more folder that the container sees; may be repeated", [])
    add("kubernetes, slurm", "--image", "IMAGE", "container image with forge and your code")
    add("kubernetes", "--kind", "KIND", "pytorchjob (default), trainjob or jobset")
    add("kubernetes", "--claim", "PVC", "volume claim for the run folder")
    add("kubernetes", "--mount", "DIR", "where the claim is mounted (default: /runs)", "/runs")
    add("kubernetes", "--shm", "SIZE", "the most that /dev/shm may hold (default: half of the node's memory)")
    add("kubernetes", "--queue", "NAME", "queue of Kueue")
    add("kubernetes", "--priority", "CLASS", "PriorityClass")
    add("kubernetes", "--toleration", "TAINT", "run on nodes with KEY[=VALUE][:EFFECT]; may be repeated", [])
    add("kubernetes", "--resource", "NAME=N", "more of each pod: rdma/hca=1; may be repeated", [])
    add("kubernetes", "--capability", "NAME", "a Linux capability: IPC_LOCK, for RDMA; may be repeated", [])
    add("kubernetes", "--secret", "NAME", "a Secret whose keys become variables; may be repeated", [])
    add("ray", "--address", "URL", "address of the cluster, to submit to")
    add("ssh", "--hosts", "A,B", "hosts, the first for the rendezvous")
    parser.set_defaults(belongs=belongs, remember=False)


def run(args: Namespace) -> int:
    for name, (systems, default) in args.belongs.items():
        if getattr(args, name) != default and args.system not in systems:
            raise ForgeError(f"--{name.replace('_', '-')} is for {systems}, not for {args.system}: leave it out.")
    job = _job(args)
    file = Path(args.out if args.out and args.out != "-" else f"{job.name}{SYSTEMS[args.system]}")
    words = _submit_words(args, file)
    text = _text(args, job, words)
    if args.out == "-":
        if args.submit:
            raise ForgeError("--out - prints the job, and --submit needs it in a file: leave one of them out.")
        print(text, end="")
        return 0
    remember = args.submit and (args.remember or args.system in REMEMBERED)
    if remember:
        _refuse_in_use(args.system, job.name)
    with atomic_write(absolute(file)) as beside:
        beside.write_text(text)
    show.message(f"Wrote {file}. To submit it: {shlex.join(words)}" if not args.submit else f"Wrote {file}.")
    if remember:
        return _remember(args, job, file)
    return _submit(words) if args.submit else 0


def _refuse_in_use(system: str, name: str) -> None:
    from forge_cluster.commands.jobs import refuse_in_use
    from forge_cluster.jobs import scheduler_of

    scheduler_of(system)  # refuses one that it does not know
    refuse_in_use(name)


def _remember(args: Namespace, job: LaunchJob, file: Path) -> int:
    from forge_cluster.commands.jobs import submit
    from forge_cluster.jobs import JobRecord

    where = {"file": str(absolute(file)), "folder": job.folder, "run_dir": job.run_dir}
    return submit(JobRecord(name=job.name, system=args.system, **where))


def _job(args: Namespace) -> LaunchJob:
    from forge_cluster.launching import LaunchJob
    from forge_cluster.launching.job import parse_sweep

    hosts = args.hosts.split(",") if args.hosts else []
    if args.system == "ssh" and not hosts:
        raise ForgeError("Name the hosts with --hosts A,B.")
    sweep = parse_sweep(args.array)
    recipe = target.load(Namespace(**{**vars(args), "overrides": [*args.overrides, *(sweep[0] if sweep else ())]}))
    shared = args.system in ("slurm", "ssh", "here") and args.container is None
    plain = re.sub(r"[^a-z0-9]+", "-", target.name_of(recipe).lower()).strip("-")
    name = args.name or plain[:42].strip("-") or "forge"
    folder = args.run_dir or f"runs/{name}"
    if args.system == "kubernetes" and args.run_dir is None:
        folder = f"{args.mount.rstrip('/')}/{name}"
    check_name(folder)
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
        env=(*(() if args.system == "slurm" else (f"{JOB}={args.system}:{name}",)), *args.env),
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
    from forge_cluster.launching import here_script, ray_driver, ssh_script

    if args.system == "here":
        return here_script(job)
    if args.system == "ssh":
        return ssh_script(job, args.hosts.split(","))
    if args.system == "ray":
        return ray_driver(job, submit=shlex.join(words))
    return _sbatch(args, job) if args.system == "slurm" else _manifest(args, job)


def _sbatch(args: Namespace, job: LaunchJob) -> str:
    from forge_cluster.launching import CONTAINERS, GPUS, Container, sbatch_script

    if args.container not in (None, *CONTAINERS):
        raise ForgeError(f"--container {args.container}: it is one of {', '.join(CONTAINERS)}.")
    if bool(args.container) != bool(args.image) or (args.bind and not args.container):
        raise ForgeError("A job in a container needs both --container KIND and --image IMAGE.")
    box = Container(args.container, args.image, tuple(args.bind)) if args.container else None
    return sbatch_script(job, args.time, args.partition, args.option, args.gpu_option or GPUS, box)


def _manifest(args: Namespace, job: LaunchJob) -> str:
    from forge_cluster.launching import KINDS, Pods, manifest

    kind = args.kind or KINDS[0]
    if kind not in KINDS:
        raise ForgeError(f"--kind {kind}: it is one of {', '.join(KINDS)}.")
    if not args.image:
        raise ForgeError("Name a container image that has forge and your code: --image NAME:TAG.")
    pods = Pods(
        claim=args.claim,
        mount=args.mount,
        shm=args.shm,
        queue=args.queue,
        priority=args.priority,
        tolerations=tuple(args.toleration),
        resources=tuple(args.resource),
        capabilities=tuple(args.capability),
        secrets=tuple(args.secret),
    )
    return manifest(job, kind, args.image, pods)


def _submit_words(args: Namespace, file: Path) -> list[str]:
    address = [f"--address={args.address}"] if args.address else []
    named = f"./{file}" if str(file).startswith("-") else str(file)
    return {
        "slurm": ["sbatch", named],
        "kubernetes": ["kubectl", "apply", "-f", named],
        "ray": ["ray", "job", "submit", *address, "--", "python", str(absolute(file))],
        "ssh": ["bash", named],
        "here": ["bash", named],
    }[args.system]


def _submit(words: list[str]) -> int:
    if shutil.which(words[0]) is None:
        raise ForgeError(
            f"--submit runs {words[0]!r}, which is not installed here. Run `{shlex.join(words)}` where it is."
        )
    return subprocess.run(words).returncode
