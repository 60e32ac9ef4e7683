"""A batch script for SLURM. srun starts one process per rank, and forge reads srun's variables."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from forge.errors import ForgeError, Interrupted
from forge_cluster.launching.job import LaunchJob, of_printable_lines


@of_printable_lines
def sbatch_script(
    job: LaunchJob, time: str | None = None, partition: str | None = None, more: Sequence[str] = ()
) -> str:
    """Return the script. `more` are options of sbatch, written as for a shell: `--constraint=a100`."""
    given = [_words(option) for option in more]
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.procs,
        "gpus-per-node": job.gpus or None,
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
    head += ["#SBATCH --requeue", *(f"#SBATCH {shlex.join(words)}" for words in given)]
    return "\n".join(["#!/bin/bash", *head, "", *_body(job), ""])


def _words(option: str) -> list[str]:
    try:
        words = shlex.split(option)
    except ValueError:
        words = []
    if not words or not words[0].startswith("-"):
        raise ForgeError(f"--option {option!r}: give an option of sbatch, as in --option=--constraint=a100.")
    return words


def _body(job: LaunchJob) -> list[str]:
    run_dir, trials, chosen = shlex.quote(job.run_dir), [], ""
    if job.sweep:
        run_dir, chosen = f'{run_dir}/"$SLURM_ARRAY_TASK_ID"', ' "${trial[@]}"'
        trials = [
            "case $SLURM_ARRAY_TASK_ID in",
            *(f"  {number}) trial=({shlex.join(words)}) ;;" for number, words in enumerate(job.sweep)),
            "esac",
        ]
    fit = shlex.join([job.python, "-m", "forge", "fit", *job.words])
    return [
        *trials,
        f"# {job.grace} s before the limit SLURM sends SIGUSR1: all ranks save, and exit with {Interrupted.EXIT_CODE}",
        f"srun --kill-on-bad-exit=0 {fit}{chosen} --run-dir {run_dir} --resume",
        "code=$?",
        f'if [ "$code" -eq {Interrupted.EXIT_CODE} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    ]
