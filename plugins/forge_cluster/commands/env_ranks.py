"""`forge env --ranks`: examine every rank, without a run."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from forge.cli import ranks
from forge.errors import ForgeError
from forge.util import show

GROUP = "scale"
EXAMPLES = """\
Each rank multiplies, copies, and exchanges with its neighbours. One that is wrong or slow is named with its host; then
the exit code is 1. Start it as a fit is started: with --nproc, on several hosts with --nnodes, by torchrun or by srun.

examples:
  forge env --ranks --nproc 8                                             the GPUs of this machine
  srun --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 forge env --ranks  those of a cluster
"""


def parser() -> ArgumentParser:
    parser = show.new_parser("env", "Examine every rank: wrong or slow ones are named.", EXAMPLES)
    parser.add_argument("--ranks", action="store_true", required=True, help="examine every rank")
    parser.add_argument("--slower", type=float, default=1.5, metavar="X", help="times the median that is slow (1.5)")
    parser.add_argument("--device", default="auto", metavar="NAME", help="device: auto, cpu or cuda (default: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    ranks.add_arguments(parser)
    return parser


def run(args: Namespace) -> int:
    if not ranks.is_worker() and args.nproc:
        return _start(args)
    from forge.distributed.rank_env import DistributedEnv
    from forge_cluster.health import UNFIT
    from forge_cluster.health.examination import MEASURES, examine, judge

    env = DistributedEnv(args.device)
    failed = True
    try:
        with env.no_timeout():
            pulses = examine(env, args.slower)
        failed = False
    finally:
        env.close(failed)
    found = judge(pulses, args.slower)
    if not env.is_main:
        return 1 if found else 0
    if args.json:
        print(
            json.dumps({"ranks": [asdict(pulse) for pulse in pulses], "found": [str(one) for one in found]}, indent=1)
        )
        return 1 if found else 0
    table = show.table("rank", "host", "device", *(f"{measure}, ms" for measure in MEASURES))
    for pulse in pulses:
        times = [f"{1e3 * pulse.seconds[measure]:.2f}" if measure in pulse.seconds else "" for measure in MEASURES]
        table.add_row(str(pulse.rank), pulse.host, pulse.device, *times)
    show.console().print(table)
    for one in found:
        show.message(f"{one}.", "red")
        show.message(f"{UNFIT} {one.pulse.host}")
    return 1 if found else 0


def _start(args: Namespace) -> int:
    """Start the ranks of this host."""
    from forge.distributed.launch import Launch, nodes

    if args.nproc < 1:
        raise ForgeError(f"--nproc is {args.nproc}; it must be at least 1.")
    least, most = nodes(args.nnodes)
    if most > 1 and not args.rdzv_endpoint:
        raise ForgeError("Several hosts need --rdzv-endpoint HOST:PORT, the same on each.")
    words = ["env", "--ranks", f"--slower={args.slower}", f"--device={args.device}", *(["--json"] if args.json else [])]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return Launch(args.nproc, 0, (least, most), args.rdzv_endpoint or "localhost:0").run(words)
