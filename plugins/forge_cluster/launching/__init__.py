"""One file that runs a fit on a cluster: a script for SLURM, a PyTorchJob for Kubernetes, or a task for SkyPilot.

All of them start the same command on every node, `forge fit … --nproc N --nnodes N --run-dir DIR --resume`, which is
torchrun's agent with forge's signals: a crashed rank is restarted, a job that was preempted goes on where it was. These
files write text and run nothing.
"""

from __future__ import annotations

from forge_cluster.launching.job import LaunchJob
from forge_cluster.launching.kubernetes import pytorchjob
from forge_cluster.launching.skypilot import skypilot_task
from forge_cluster.launching.slurm import sbatch_script

__all__ = ["LaunchJob", "pytorchjob", "sbatch_script", "skypilot_task"]
