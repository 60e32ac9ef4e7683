"""Jobs on clusters: what `forge launch` writes for SLURM, Kubernetes, Ray, plain ssh and this machine.

Every one of them starts the same worker, `forge fit … --run-dir DIR --resume`, so that a job that was preempted goes on
where it was. These files write text and run nothing.
"""

from __future__ import annotations

from forge_cluster.launching.here import here_script
from forge_cluster.launching.job import LaunchJob
from forge_cluster.launching.kubernetes import KINDS, Pods, manifest
from forge_cluster.launching.ray import ray_driver
from forge_cluster.launching.slurm import CONTAINERS, GPUS, Container, sbatch_script
from forge_cluster.launching.ssh import ssh_script

__all__ = [
    "CONTAINERS",
    "GPUS",
    "KINDS",
    "Container",
    "LaunchJob",
    "Pods",
    "here_script",
    "manifest",
    "ray_driver",
    "sbatch_script",
    "ssh_script",
]
