"""Manifests for Kubernetes: a PyTorchJob, a TrainJob or a JobSet. Each pod runs `forge fit --nproc`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
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
SHM = "shm"
QUEUE = "kueue.x-k8s.io/queue-name"
"""The label by which Kueue finds the queue of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """What every pod of a job gets beside its size."""

    claim: str | None = None
    "A PersistentVolumeClaim that all pods mount at `mount`."
    mount: str = "/runs"
    shm: str | None = None
    "The most that /dev/shm may hold; without it half of the node's memory. It counts as the pod's memory."
    queue: str | None = None
    "The queue of Kueue."
    priority: str | None = None
    "The PriorityClass."
    tolerations: tuple[str, ...] = ()
    "KEY, KEY=VALUE, each also with :EFFECT."
    resources: tuple[str, ...] = ()
    "NAME=COUNT: network cards for RDMA, say."
    capabilities: tuple[str, ...] = ()
    "Linux capabilities: IPC_LOCK, which RDMA needs to lock memory."
    secrets: tuple[str, ...] = ()
    "Secrets whose keys become variables: credentials."


@of_printable_lines
def manifest(job: LaunchJob, kind: str, image: str, pods: Pods | None = None) -> str:
    """Return a manifest as YAML."""
    pods = pods or Pods()
    if job.sweep:
        raise ForgeError("--array is for SLURM. On Kubernetes, launch one job for each value.")
    if pods.claim is None and job.nodes > 1:
        raise ForgeError(
            f"{job.nodes} pods write one run folder together: name the volume that they share with --claim PVC."
        )
    if pods.claim is not None and not PurePosixPath(normpath(job.run_dir)).is_relative_to(normpath(pods.mount)):
        raise ForgeError(
            f"--run-dir {job.run_dir} is not in the volume, which is mounted at {pods.mount}: use --run-dir "
            f"{pods.mount}/…"
        )
    made = {"pytorchjob": _pytorchjob, "trainjob": _trainjob, "jobset": _jobset}[kind](job, image, pods)
    if pods.queue is not None:
        made["metadata"]["labels"] = {QUEUE: pods.queue}
    return f"# {_HOW[kind]}\n" + _yaml(made)


_HOW = {
    "pytorchjob": "for the Training Operator (v1): kubectl apply -f FILE",
    "trainjob": "for Kubeflow Trainer (v2), with its runtime torch-distributed: kubectl apply -f FILE",
    "jobset": "for JobSet (jobset.sigs.k8s.io): kubectl apply -f FILE",
}


def _pytorchjob(job: LaunchJob, image: str, pods: Pods) -> dict[str, Any]:
    # RANK and WORLD_SIZE are those of the pods here; every rank gets its own
    script = f"exec env -u RANK -u WORLD_SIZE {job.node_command('$MASTER_ADDR', '$RANK')}"

    def replica(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": _pod(job, image, pods, script)}}

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


def _trainjob(job: LaunchJob, image: str, pods: Pods) -> dict[str, Any]:
    if pods.secrets or pods.capabilities or pods.priority:
        raise ForgeError(
            "A TrainJob has no --secret, --capability or --priority: its runtime has. Or use --kind jobset."
        )
    script = f"exec {job.node_command('$PET_MASTER_ADDR', '$PET_NODE_RANK')}"
    trainer = {
        "image": image,
        "command": _shell(script),
        "numNodes": job.nodes,
        "numProcPerNode": job.procs,
        "resourcesPerNode": _resources(job, pods),
        **({"env": _env(job)} if job.env else {}),
    }
    patch = {**_places(job, pods), "containers": [{"name": NODE, "volumeMounts": _mounts(pods)}]}
    node = {"name": NODE, "template": {"spec": {"template": {"spec": patch}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [node]}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": trainer,
            "runtimePatches": [{"manager": "forge.dev/launch", "trainingRuntimeSpec": runtime}],
        },
    }


def _jobset(job: LaunchJob, image: str, pods: Pods) -> dict[str, Any]:
    first = f"{job.name}-{NODE}-0-0.{job.name}"
    script = f"exec {job.node_command(first, '$JOB_COMPLETION_INDEX')}"
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
        "template": {"spec": _pod(job, image, pods, script) | {"restartPolicy": "Never"}},
    }
    # the only rule above that fails a job is the one about mistakes; every other failure is BackoffLimitExceeded
    mistake = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "failurePolicy": {"maxRestarts": job.restarts, "rules": [mistake]},
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": inner}}],
        },
    }


def _pod(job: LaunchJob, image: str, pods: Pods, script: str) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "command": _shell(script),
        "ports": [{"name": "rendezvous", "containerPort": PORT}],
        "resources": _resources(job, pods),
        "volumeMounts": _mounts(pods),
    }
    if job.env:
        container["env"] = _env(job)
    if pods.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in pods.secrets]
    if pods.capabilities:
        container["securityContext"] = {"capabilities": {"add": list(pods.capabilities)}}
    return {**_places(job, pods), "containers": [container]}


def _places(job: LaunchJob, pods: Pods) -> dict[str, Any]:
    """Return what a pod has beside its containers: where it may run, and its volumes."""
    # PyTorch's data workers pass batches in /dev/shm, of which a container has 64 MB
    shared = {"medium": "Memory"} | ({"sizeLimit": pods.shm} if pods.shm else {})
    volumes: list[dict[str, Any]] = [{"name": SHM, "emptyDir": shared}]
    if pods.claim is not None:
        volumes.append({"name": VOLUME, "persistentVolumeClaim": {"claimName": pods.claim}})
    return {
        "terminationGracePeriodSeconds": job.grace,
        **({"priorityClassName": pods.priority} if pods.priority else {}),
        **({"tolerations": [_toleration(text) for text in pods.tolerations]} if pods.tolerations else {}),
        "volumes": volumes,
    }


def _mounts(pods: Pods) -> list[dict[str, str]]:
    runs = [] if pods.claim is None else [{"name": VOLUME, "mountPath": pods.mount}]
    return [{"name": SHM, "mountPath": "/dev/shm"}, *runs]


def _toleration(text: str) -> dict[str, str]:
    taint, _, effect = text.partition(":")
    key, is_equal, value = taint.partition("=")
    if not key:
        raise ForgeError(f"--toleration {text!r}: write KEY, KEY=VALUE or KEY=VALUE:EFFECT.")
    found = {"key": key, **({"operator": "Equal", "value": value} if is_equal else {"operator": "Exists"})}
    return found | ({"effect": effect} if effect else {})


def _env(job: LaunchJob) -> list[dict[str, str]]:
    # Kubernetes would fill in $(NAME), and make $$ a single sign
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in job.variables.items()]


def _shell(script: str) -> list[str]:
    """Return the command that runs a script. Kubernetes itself would fill in $(NAME), and make $$ a single sign: in the
    quoted values, the only place of either, the two signs are parted by empty quotes."""
    return ["/bin/sh", "-c", re.sub(r"\$(?=[$(])", "$''", script)]


def _resources(job: LaunchJob, pods: Pods) -> dict[str, Any]:
    amounts = {
        "nvidia.com/gpu": str(job.gpus) if job.gpus else None,
        "cpu": str(job.cpus * job.procs) if job.cpus else None,
        "memory": job.memory,
    }
    for text in pods.resources:
        name, _, count = text.partition("=")
        if not name or not count.isdecimal():
            raise ForgeError(f"--resource {text!r}: write a name and a number, as in --resource rdma/hca=1.")
        amounts[name] = count
    return {"limits": {name: amount for name, amount in amounts.items() if amount is not None}}


def _yaml(tree: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(json.loads(json.dumps(tree)), sort_keys=False, width=1000)
