"""A batch script for SLURM: srun starts one agent on every node, which starts the ranks."""

from __future__ import annotations

import shlex

from forge.errors import Interrupted
from forge.runs.folder import JOB
from forge_cluster.launching.job import LaunchJob

BODY = """\
export {JOB}=slurm:$SLURM_JOB_ID
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not inherit it, from SLURM 22.05 on
# this script runs on the first node: the address by which SLURM itself finds it, and a port of this job's own
first=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
export FIRST=${{first:-$(hostname)}}:$((20000 + SLURM_JOB_ID % 10000))
# {grace} s before the limit SLURM sends SIGUSR1: all ranks save, and exit with {saved}
srun --kill-on-bad-exit=0 --wait=60 bash -c {command}
code=$?
# what was killed is tried again too, unless the job has been requeued {restarts} times
if [ "$code" -eq {saved} ] || {{ [ "$code" -gt 128 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; }}; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def sbatch_script(job: LaunchJob) -> str:
    """Return the script."""
    head = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": job.procs * (job.cpus or 1),
        "gpus-per-node": job.gpus or None,
        "time": job.time,
        "chdir": job.folder,
        "output": "%x-%j.out",
        "open-mode": "append",
        "signal": f"USR1@{job.grace}",
    }
    # sbatch reads these lines as a shell does: a folder with a space is quoted
    lines = [f"#SBATCH {shlex.quote(f'--{name}={value}')}" for name, value in head.items() if value is not None]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in job.options), ""]
    command = shlex.quote(job.node_command("$FIRST", "$SLURM_NODEID"))
    body = BODY.format(JOB=JOB, grace=job.grace, saved=Interrupted.EXIT_CODE, restarts=job.restarts, command=command)
    return "\n".join(["#!/bin/bash", *lines, body])
