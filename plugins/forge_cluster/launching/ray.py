"""A driver for Ray: it reserves the nodes, and runs `forge fit --nproc` on each of them."""

from __future__ import annotations

import json
import shlex

from forge.errors import ForgeError, Interrupted
from forge_cluster.launching.job import LaunchJob, of_printable_lines

ENDPOINT = "FORGE_ENDPOINT"
"""The variable in which the nodes find the first of them."""
DRIVER = '''\
# To submit it: {submit}
"""Train on a Ray cluster.

`ray job submit` turns every exit code but 0 into 1. So the true one is printed, as `forge exit code: 85`, and this
driver itself starts again after {code} (preempted, state saved) and after a lost node, {restarts} times at most.
"""

import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

JOB = {job}
INTERRUPTED = {code}


@ray.remote(max_retries=0)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def node(command, first, number):
    names = [name for name in os.environ if name.startswith("RAY_")] + ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    environment = {{name: value for name, value in os.environ.items() if name not in names}}
    environment |= {{"FORGE_NODE_RANK": str(number), "{endpoint}": first}}
    return subprocess.run(["/bin/sh", "-c", command], env=environment).returncode


def attempt():
    bundle = {{"CPU": JOB["cpus"]}} | ({{"GPU": JOB["gpus"]}} if JOB["gpus"] else {{}})
    group = placement_group([bundle] * JOB["nodes"], strategy=JOB["strategy"])
    ray.get(group.ready())
    try:
        places = [PlacementGroupSchedulingStrategy(group, index) for index in range(JOB["nodes"])]
        first = ray.get(address.options(num_cpus=0, scheduling_strategy=places[0]).remote())
        amounts = {{"num_cpus": JOB["cpus"], "num_gpus": JOB["gpus"]}}
        running = [
            node.options(scheduling_strategy=place, **amounts).remote(JOB["command"], first, number)
            for number, place in enumerate(places)
        ]
        codes = ray.get(running)
    except (ray.exceptions.RayError) as error:
        print(f"a node was lost: {{error}}", flush=True)
        return 1
    finally:
        remove_placement_group(group)
    return next((code for code in sorted(codes, key=lambda code: code != INTERRUPTED) if code), 0)


ray.init(ignore_reinit_error=True)
for left in reversed(range(JOB["restarts"] + 1)):
    code = attempt()
    print(f"forge exit code: {{code}}", flush=True)
    if code in (0, 2) or not left:
        sys.exit(code)
'''


@of_printable_lines
def ray_driver(job: LaunchJob, strategy: str = "STRICT_SPREAD", submit: str = "python FILE") -> str:
    """Return the driver, a Python file that needs ray alone."""
    if job.sweep:
        raise ForgeError("--array is for SLURM. On Ray, launch one job for each value.")
    content = {
        "command": f"cd {shlex.quote(job.folder)} && exec {job.with_env(job.node_command(f'${ENDPOINT}'))}",
        "nodes": job.nodes,
        "gpus": job.gpus,
        "cpus": (job.cpus or 1) * job.procs,
        "restarts": job.restarts,
        "strategy": strategy if job.nodes > 1 else "PACK",
    }
    shown = json.dumps(content, indent=4)
    return DRIVER.format(job=shown, code=Interrupted.EXIT_CODE, restarts=job.restarts, endpoint=ENDPOINT, submit=submit)
