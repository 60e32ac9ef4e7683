"""A PyTorchJob, for Kubeflow's Training Operator. Each pod is a node and runs `forge fit --nproc`."""

from __future__ import annotations

import re
from typing import Any

import yaml

from forge.errors import ForgeError
from forge.runs.folder import JOB
from forge_cluster.launching.job import PORT, LaunchJob


def pytorchjob(job: LaunchJob) -> str:
    """Return the manifest as YAML."""
    if job.image is None:
        raise ForgeError("Name a container image that has forge and your code: --image NAME:TAG.")
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    made = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            "nprocPerNode": str(job.procs),
            "runPolicy": {"backoffLimit": job.restarts, "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": {
                name: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": _pod(job)}}
                for name, count in replicas.items()
                if count
            },
        },
    }
    return yaml.safe_dump(made, sort_keys=False, width=1000)


def _pod(job: LaunchJob) -> dict[str, Any]:
    # data workers pass batches in /dev/shm, of which a container has 64 MB
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for folder, claim in job.volumes().items():
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "runs", "mountPath": folder})
    limits = {
        "nvidia.com/gpu": job.gpus.rpartition(":")[2] or None,
        "cpu": str(job.cpus * job.procs) if job.cpus else None,
    }
    container = {
        "name": "pytorch",  # by which the operator finds it
        "image": job.image,
        "command": ["/bin/sh", "-c", _script(job)],
        "env": [{"name": JOB, "value": f"kubernetes:{job.name}"}],
        "ports": [{"name": "rendezvous", "containerPort": PORT}],
        "resources": {"limits": {name: amount for name, amount in limits.items() if amount is not None}},
        "volumeMounts": mounts,
    }
    return {"terminationGracePeriodSeconds": job.grace, "volumes": volumes, "containers": [container]}


def _script(job: LaunchJob) -> str:
    # RANK and WORLD_SIZE are those of the pods: every rank gets its own
    command = job.node_command(f"$MASTER_ADDR:{PORT}", "$NUMBER")
    # Kubernetes would fill in $(NAME), and make $$ one sign: both stand in quoted values only, and are parted there
    return "NUMBER=$RANK; unset RANK WORLD_SIZE; " + re.sub(r"\$(?=[$(])", "$''", command)
