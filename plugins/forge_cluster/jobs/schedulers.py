"""Schedulers by their own commands: sbatch, squeue and scancel; kubectl; and processes, on this machine or by ssh.

Each says in one word how a job is: queued, running, finished, interrupted, failed or cancelled; "" if it knows no more.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from forge.errors import ForgeError, Interrupted
from forge.runs.folder import RunFolder
from forge.util.files import make_folder
from forge_cluster.jobs.record import FOLDER, JobRecord

ALIVE = ("queued", "running")


class Scheduler(Protocol):
    """What `forge jobs` asks of one."""

    def submit(self, job: JobRecord) -> JobRecord:
        """Hand the job's file over, for the first time or again (it has an id), and return what is known of it."""
        ...

    def state(self, job: JobRecord) -> str: ...

    def logs(self, job: JobRecord, follow: bool) -> list[str]:
        """Return the command that prints the job's output; empty if there is none yet."""
        ...

    def cancel(self, job: JobRecord) -> None: ...


def call(*words: str, fails: bool = True) -> str:
    """Run a scheduler's command and return what it prints; "" if it fails and may."""
    if shutil.which(words[0]) is None:
        raise ForgeError(f"This needs {words[0]!r}, which is not installed here: run it where it is.")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode and fails:
        raise ForgeError(f"`{shlex.join(words)}` failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return "" if done.returncode else done.stdout.strip()


class Slurm:
    STATES = {"PENDING": "queued", "COMPLETED": "finished", "CANCELLED": "cancelled"}
    FAILED = ("BOOT_FAIL", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")

    def submit(self, job: JobRecord) -> JobRecord:
        said = call("sbatch", "--parsable", f"--chdir={job.folder}", _named(job))
        return replace(job, id=said.splitlines()[-1].partition(";")[0])

    def state(self, job: JobRecord) -> str:
        # squeue knows jobs that wait or run, and for a few minutes those that ended; an array has several lines
        words = call("squeue", "-h", "-t", "all", "-j", job.id, "-o", "%T", fails=False).split()
        states = [self.STATES.get(word, "failed" if word in self.FAILED else "running") for word in words]
        return next((state for state in ("running", "queued", "failed", "cancelled") if state in states), "") or (
            "finished" if states else ""
        )

    def logs(self, job: JobRecord, follow: bool) -> list[str]:
        files = sorted(map(str, Path(job.folder).glob(f"{job.name}-{job.id}*.out")))
        return ["tail", "-n", "+1", *(["-F"] if follow else []), "--", *files] if files else []

    def cancel(self, job: JobRecord) -> None:
        call("scancel", job.id)


class Kubernetes:
    SELECTORS = {"pytorchjob": "training.kubeflow.org/job-name"}
    SELECTOR = "jobset.sigs.k8s.io/jobset-name"
    ENDED = {"Failed": "failed", "Completed": "finished", "Complete": "finished", "Succeeded": "finished"}

    def submit(self, job: JobRecord) -> JobRecord:
        if job.id:  # again: it is not changed, but made anew; a stranger's job of this name is never deleted
            call("kubectl", "delete", "--ignore-not-found", job.id)
        return replace(job, id=call("kubectl", "create", "-f", _named(job), "-o", "name").splitlines()[-1])

    def state(self, job: JobRecord) -> str:
        said = call("kubectl", "get", job.id, "-o", "json", fails=False)
        status: dict[str, Any] = json.loads(said).get("status", {}) if said else {}
        holds = [each["type"] for each in status.get("conditions", ()) if each.get("status") == "True"]
        if ended := next((self.ENDED[name] for name in holds if name in self.ENDED), ""):
            return ended
        if not said:
            return ""
        return "running" if "Running" in holds or any(_counts(status, "active", "ready")) else "queued"

    def logs(self, job: JobRecord, follow: bool) -> list[str]:
        selector = self.SELECTORS.get(job.id.partition(".")[0], self.SELECTOR)
        more = ["-f"] if follow else []
        words = ["kubectl", "logs", *more, "-l", f"{selector}={job.name}", "--prefix", "--tail=-1"]
        return [*words, "--max-log-requests=1000"]

    def cancel(self, job: JobRecord) -> None:
        call("kubectl", "delete", "--wait=false", job.id)


class Processes:
    """The job's file as a process of this machine, on its own: ours, or the script that holds the ssh connections."""

    # a signal that this shell gets is the job's; its exit code is kept for those who ask later
    WATCH = """\
trap 'kill -TERM $child' TERM
bash "$1" & child=$!
while true; do
  wait $child; code=$?
  kill -0 $child 2> /dev/null || break
done
echo $code > "$2"
"""

    def submit(self, job: JobRecord) -> JobRecord:
        make_folder(FOLDER)
        job.path("code").unlink(missing_ok=True)
        words = ["/bin/sh", "-c", self.WATCH, job.name, _named(job), str(job.path("code").absolute())]
        with open(job.path("log"), "ab") as log:
            made = subprocess.Popen(
                words, cwd=job.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return replace(job, id=str(made.pid), mark=_began(made.pid))

    def state(self, job: JobRecord) -> str:
        if self._runs(job):
            return "running"
        code = job.path("code").read_text().strip() if job.path("code").exists() else ""
        return {"0": "finished", str(Interrupted.EXIT_CODE): "interrupted"}.get(code, "failed")

    def logs(self, job: JobRecord, follow: bool) -> list[str]:
        return ["tail", "-n", "+1", *(["-F"] if follow else []), "--", str(job.path("log"))]

    def cancel(self, job: JobRecord) -> None:
        if self._runs(job):
            os.kill(int(job.id), signal.SIGTERM)

    def _runs(self, job: JobRecord) -> bool:
        return bool(job.mark) and job.id.isdecimal() and _began(int(job.id)) == job.mark


SCHEDULERS: dict[str, Scheduler] = {
    "slurm": Slurm(),
    "kubernetes": Kubernetes(),
    "ssh": Processes(),
    "here": Processes(),
}


def scheduler_of(system: str) -> Scheduler:
    """Return the scheduler that has the jobs of a system."""
    if system not in SCHEDULERS:
        raise ForgeError(
            f"forge jobs knows no {system}; it knows {', '.join(SCHEDULERS)}. Ray has its own: ray job list."
        )
    return SCHEDULERS[system]


def state_of(job: JobRecord) -> str:
    """Return how a job is: by its scheduler, and once that has forgotten it, by its run."""
    said = scheduler_of(job.system).state(job)
    return said or (RunFolder(job.run_dir).status if Path(job.run_dir).is_dir() else "unknown")


def _named(job: JobRecord) -> str:
    return str(Path(job.file).absolute())


def _began(pid: int) -> str:
    """Return when a process began, as ps says it; "" if there is none, or only what is left of one."""
    said = call("ps", "-o", "stat=,lstart=", "-p", str(pid), fails=False).split()
    return "" if not said or said[0].startswith("Z") else " ".join(said[1:])


def _counts(tree: Any, *names: str) -> Iterator[int]:
    """Yield the numbers of these names at any depth."""
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, part in parts:
        if name in names and isinstance(part, int):
            yield part
        yield from _counts(part, *names)
