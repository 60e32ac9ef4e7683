"""Manifests for Kubernetes: a PyTorchJob, a TrainJob or a JobSet. Each pod runs `forge fit --nproc`."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any

from forge.errors import ForgeError
from forge_cluster.launching.job import PORT, LaunchJob, of_printable_lines

KINDS = ("pytorchjob", "trainjob", "jobset")
CONTAINER = "pytorch"
"""The name by which the Training Operator finds the container of a PyTorchJob."""
NODE = "node"
VOLUME = "runs"


@of_printable_lines
def manifest(job: LaunchJob, kind: str, image: str, claim: str | None = None, mount: str = "/runs") -> str:
    """Return a manifest as YAML. `claim` is a PersistentVolumeClaim that all pods mount at `mount`."""
    if job.sweep:
        raise ForgeError("--array is for SLURM. On Kubernetes, launch one job for each value.")
    if claim is None and job.nodes > 1:
        raise ForgeError(
            f"{job.nodes} pods write one run folder together: name the volume that they share with --claim PVC."
        )
    if claim is not None and not PurePosixPath(normpath(job.run_dir)).is_relative_to(normpath(mount)):
        raise ForgeError(
            f"--run-dir {job.run_dir} is not in the volume, which is mounted at {mount}: use --run-dir {mount}/…"
        )
    made = {"pytorchjob": _pytorchjob, "trainjob": _trainjob, "jobset": _jobset}[kind](job, image, claim, mount)
    return f"# {_HOW[kind]}\n" + _yaml(made)


_HOW = {
    "pytorchjob": "for the Training Operator (v1): kubectl apply -f FILE",
    "trainjob": "for Kubeflow Trainer (v2), with its runtime torch-distributed: kubectl apply -f FILE",
    "jobset": "for JobSet (jobset.sigs.k8s.io): kubectl apply -f FILE",
}


def _pytorchjob(job: LaunchJob, image: str, claim: str | None, mount: str) -> dict[str, Any]:
    def replica(count: int) -> dict[str, Any]:
        # RANK and WORLD_SIZE are those of the pods here; every rank gets its own
        pod = _pod(
            job, image, claim, mount, f"exec env -u RANK -u WORLD_SIZE {job.node_command('$MASTER_ADDR', '$RANK')}"
        )
        return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}

    replicas = {"Master": replica(1)} | ({"Worker": replica(job.nodes - 1)} if job.nodes > 1 else {})
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            "nprocPerNode": str(job.procs),
            "runPolicy": {"backoffLimit": job.restarts, "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _trainjob(job: LaunchJob, image: str, claim: str | None, mount: str) -> dict[str, Any]:
    trainer = {
        "image": image,
        "command": _shell(f"exec {job.node_command('$PET_MASTER_ADDR', '$PET_NODE_RANK')}"),
        "numNodes": job.nodes,
        "numProcPerNode": job.procs,
        "resourcesPerNode": _resources(job),
    }
    spec: dict[str, Any] = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": job.grace}
    if claim is not None:
        pod |= {
            "volumes": [_volume(claim)],
            "containers": [{"name": NODE, "volumeMounts": [{"name": VOLUME, "mountPath": mount}]}],
        }
    node = {"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}
    spec["runtimePatches"] = [
        {
            "manager": "forge.dev/launch",
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
        }
    ]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": spec,
    }


def _jobset(job: LaunchJob, image: str, claim: str | None, mount: str) -> dict[str, Any]:
    first = f"{job.name}-{NODE}-0-0.{job.name}"
    pod = _pod(job, image, claim, mount, f"exec {job.node_command(first, '$JOB_COMPLETION_INDEX')}") | {
        "restartPolicy": "Never"
    }
    inner = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                # a mistake in the input would only be repeated
                {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [2]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "failurePolicy": {"maxRestarts": job.restarts},
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": inner}}],
        },
    }


def _pod(job: LaunchJob, image: str, claim: str | None, mount: str, script: str) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "command": _shell(script),
        "ports": [{"name": "rendezvous", "containerPort": PORT}],
        "resources": _resources(job),
    }
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": job.grace, "containers": [container]}
    if claim is not None:
        container["volumeMounts"] = [{"name": VOLUME, "mountPath": mount}]
        pod["volumes"] = [_volume(claim)]
    return pod


def _shell(script: str) -> list[str]:
    """Return the command that runs a script. Kubernetes itself would fill in $(NAME), and make $$ a single sign: in the
    quoted values, the only place of either, the two signs are parted by empty quotes."""
    return ["/bin/sh", "-c", re.sub(r"\$(?=[$(])", "$''", script)]


def _volume(claim: str) -> dict[str, Any]:
    return {"name": VOLUME, "persistentVolumeClaim": {"claimName": claim}}


def _resources(job: LaunchJob) -> dict[str, Any]:
    amounts = {
        "nvidia.com/gpu": str(job.gpus) if job.gpus else None,
        "cpu": str(job.cpus * job.procs) if job.cpus else None,
        "memory": job.memory,
    }
    return {"limits": {name: amount for name, amount in amounts.items() if amount is not None}}


def _yaml(tree: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(json.loads(json.dumps(tree)), sort_keys=False, width=1000)
