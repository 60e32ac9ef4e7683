"""A task for SkyPilot, which rents the nodes, runs it on each of them, and finds others if they are taken away."""

from __future__ import annotations

from typing import Any

import yaml

from forge.errors import ForgeError, Interrupted
from forge.runs.folder import JOB
from forge_cluster.launching.job import PORT, LaunchJob


def skypilot_task(job: LaunchJob) -> str:
    """Return the task as YAML."""
    if job.gpus.isdecimal():
        raise ForgeError(f"SkyPilot asks for GPUs by name: --gpus H100:{job.gpus}, say.")
    resources: dict[str, Any] = {
        "accelerators": job.gpus or None,
        "cpus": f"{job.cpus * job.procs}+" if job.cpus else None,
        "image_id": f"docker:{job.image}" if job.image else None,
        "job_recovery": {"max_restarts_on_errors": job.restarts, "recover_on_exit_codes": [Interrupted.EXIT_CODE]},
    }
    first = f'"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)":{PORT}'
    made = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": {name: value for name, value in resources.items() if value is not None},
        "workdir": job.folder,
        "volumes": job.volumes(),
        "envs": {JOB: f"skypilot:{job.name}"},
        "run": job.node_command(first, '"$SKYPILOT_NODE_RANK"') + "\n",
    }
    return yaml.safe_dump(made, sort_keys=False, width=1000)
