"""A batch script for SLURM. srun starts one process per rank, and forge reads srun's variables."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from forge.errors import ForgeError, Interrupted
from forge.runs.folder import JOB
from forge_cluster.launching.job import LaunchJob, of_printable_lines

GPUS = "--gpus-per-node={}"
"""How GPUs are asked for; {} is the number of a node's."""
CONTAINERS = ("pyxis", "apptainer")


@dataclass(frozen=True, slots=True)
class Container:
    """An image in which every rank runs: by srun's plugin pyxis (enroot), or by apptainer."""

    kind: str
    image: str
    binds: tuple[str, ...] = ()
    "Folders of the node that it sees beside the working directory and the run folder: SOURCE or SOURCE:TARGET."


@of_printable_lines
def sbatch_script(
    job: LaunchJob,
    time: str | None = None,
    partition: str | None = None,
    more: Sequence[str] = (),
    gpu_option: str = GPUS,
    container: Container | None = None,
) -> str:
    """Return the script. `more` are options of sbatch, written as for a shell: `--constraint=a100`."""
    given = [_words(option) for option in more]
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.procs,
        "cpus-per-task": job.cpus,
        "mem": job.memory,
        "time": time,
        "partition": partition,
        "array": f"0-{len(job.sweep) - 1}" if job.sweep else None,
        "chdir": job.folder,
        "output": "%x-%A_%a.out" if job.sweep else "%x-%j.out",
        "open-mode": "append",
        "signal": f"USR1@{job.grace}",
    }
    # sbatch reads these lines as a shell does: a folder with a space is quoted
    head = [f"#SBATCH {shlex.quote(f'--{name}={value}')}" for name, value in options.items() if value is not None]
    if job.gpus:
        given.insert(0, _words(gpu_option.replace("{}", str(job.gpus)), "--gpu-option"))
    head += ["#SBATCH --requeue", *(f"#SBATCH {shlex.join(words)}" for words in given)]
    return "\n".join(["#!/bin/bash", *head, "", *_body(job, container), ""])


def _words(option: str, of: str = "--option") -> list[str]:
    try:
        words = shlex.split(option)
    except ValueError:
        words = []
    if not words or not words[0].startswith("-"):
        raise ForgeError(f"{of} {option!r}: give an option of sbatch, as in {of}=--constraint=a100.")
    return words


def _body(job: LaunchJob, container: Container | None) -> list[str]:
    run_dir, trials, chosen = shlex.quote(job.run_dir), [], ""
    if job.sweep:
        run_dir, chosen = f'{run_dir}/"$SLURM_ARRAY_TASK_ID"', ' "${trial[@]}"'
        trials = [
            "case $SLURM_ARRAY_TASK_ID in",
            *(f"  {number}) trial=({shlex.join(words)}) ;;" for number, words in enumerate(job.sweep)),
            "esac",
        ]
    fit = shlex.join([*_inside(job, container), job.python, "-m", "forge", "fit", *job.words])
    lines = AFTER.format(code=Interrupted.EXIT_CODE, restarts=job.restarts, run_dir=run_dir)
    return [
        f"export {JOB}=slurm:$SLURM_JOB_ID",
        *(f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()),
        *(["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # not inherited since SLURM 22.05"] if job.cpus else []),
        *trials,
        *([f"mkdir -p {run_dir}"] if container else []),
        "said=$(mktemp)",
        f"# {job.grace} s before the limit SLURM sends SIGUSR1: all ranks save, and exit with {Interrupted.EXIT_CODE}",
        f'srun --kill-on-bad-exit=0 {fit}{chosen} --run-dir {run_dir} --resume 2> >(tee "$said" >&2)',
        *lines.splitlines(),
    ]


AFTER = """\
code=$?
host=$(sed -n 's/^unfit host: *//p' "$said" | head -n 1)  # which --check has found
if [ "$code" -eq {code} ]; then
  scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" -gt 128 ] || [ -n "$host" ]; then  # or a task was killed: try again without its node, {restarts} times
  if [ -z "$host" ]; then
    host=$(sed -En '/Exited with exit code/!s/^srun: error: ([^][, :]+): task [0-9]+: .*/\\1/p' "$said" | head -n 1)
  fi
  lost={run_dir}/.slurm-launch/$SLURM_JOB_ID  # a line for each time
  mkdir -p "${{lost%/*}}" && echo "${{host:-unknown}}" >> "$lost"
  if [ "$(wc -l < "$lost")" -le {restarts} ]; then
    trap '' TERM  # a requeue ends this script, and the job starts again only once it has ended
    scontrol requeue "$SLURM_JOB_ID"
    nodes=$(sinfo -h -r -o %D -p "$SLURM_JOB_PARTITION") out=$(squeue -h -j "$SLURM_JOB_ID" -o %x)
    if [ -n "$host" ] && [ $((nodes - $(sort -u "$lost" | wc -l))) -ge "$SLURM_JOB_NUM_NODES" ]; then
      scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${{out:+$out,}}$host" && echo "Left out from now on: $host."
    fi
  fi
fi
exit $code"""


def _inside(job: LaunchJob, container: Container | None) -> list[str]:
    """Return the words before the worker's: options of srun, or the command that enters a container."""
    if container is None:
        return []
    binds = [job.folder, job.run_dir, *container.binds]
    for bind in binds:
        if "," in bind or bind.count(":") > (0 if bind in binds[:2] else 2):
            raise ForgeError(f"{bind!r} cannot be bound into a container: its name has a comma or a colon. Rename it.")
    if container.kind == "pyxis":
        mounts = ",".join(bind if ":" in bind else f"{bind}:{bind}" for bind in binds)
        return [
            f"--container-image={container.image}",
            f"--container-mounts={mounts}",
            f"--container-workdir={job.folder}",
        ]
    gpus = ["--nv"] if job.gpus else []
    return ["apptainer", "exec", *gpus, f"--bind={','.join(binds)}", f"--pwd={job.folder}", container.image]
