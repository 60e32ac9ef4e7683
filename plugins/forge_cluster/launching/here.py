"""A script that runs a job on this machine."""

from __future__ import annotations

import shlex

from forge.errors import ForgeError
from forge_cluster.launching.job import LaunchJob, of_printable_lines


@of_printable_lines
def here_script(job: LaunchJob) -> str:
    """Return the script. It becomes the job's process, so that signals reach it."""
    if job.sweep:
        raise ForgeError("--array is for SLURM. On this machine, launch one job for each value, or use forge sweep.")
    if job.nodes > 1:
        raise ForgeError(f"--nodes is {job.nodes}, but this machine is one: leave --nodes out.")
    return f"#!/bin/bash\ncd {shlex.quote(job.folder)} || exit 1\nexec {job.with_env(job.node_command())}\n"
