"""`forge jobs`: list jobs, look at one, follow its output, cancel it, submit it again."""

from __future__ import annotations

import json
import subprocess
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forge.errors import ForgeError
from forge.runs import goodput
from forge.runs.folder import RunFolder
from forge.util import show

if TYPE_CHECKING:
    from forge_cluster.jobs import JobRecord

GROUP = "scale"
STYLES = {"queued": "dim", "running": "cyan", "finished": "green", "interrupted": "yellow", "cancelled": "yellow"}
EXAMPLES = """\
JOB is the name of a job, or its number at the scheduler. Jobs are those that were submitted from this folder; their
records are in jobs/. SYSTEM is slurm, kubernetes, ssh or here, and what follows is as for `forge launch`.

examples:
  forge jobs submit slurm my_recipe.yaml -p fsdp --nodes 4 --gpus 8 --time 24:00:00 --run-dir /shared/runs/first
  forge jobs submit here quickstart --name first   on this machine, in the background
  forge jobs                                       all jobs, the newest first
  forge jobs status first                          how it is, and how far its run has come
  forge jobs logs first -f                         its output, as it comes
  forge jobs cancel first                          end it; the run saves first, and can go on
  forge jobs retry first                           submit it again; the run goes on from its newest checkpoint
"""


def parser() -> ArgumentParser:
    parser = show.new_parser("jobs", "List jobs, look at one, follow its output, cancel it, submit it again.", EXAMPLES)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="submit SYSTEM ... | status JOB | logs JOB | cancel JOB | retry JOB",
        help="what to do",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="logs: go on until the job ends")
    parser.add_argument("--json", action="store_true", help="list, status: print JSON instead")
    return parser


def run(args: Namespace) -> int:
    from forge_cluster.jobs import all_jobs, find_job

    match args.words:
        case []:
            return _list(all_jobs(), args.json)
        case ["status", name]:
            return _status(find_job(name), args.json)
        case ["logs", name]:
            return _logs(find_job(name), args.follow)
        case ["cancel", name]:
            return _cancel(find_job(name))
        case ["retry", name]:
            return _retry(find_job(name))
    raise ForgeError(
        "Write: forge jobs, forge jobs submit SYSTEM RECIPE ..., or status, logs, cancel or retry with a JOB."
    )


def refuse_in_use(name: str) -> None:
    """Refuse a name whose job has not ended, before its file is written over."""
    from forge_cluster.jobs import ALIVE, all_jobs, state_of

    for job in all_jobs():
        if job.name == name and state_of(job) in ALIVE:
            raise ForgeError(
                f"The job {name} ({job.system} {job.id}) has not ended. Cancel it (forge jobs cancel {name}), or give "
                "this one another --name and --run-dir."
            )


def submit(job: JobRecord) -> int:
    """Hand a job to its scheduler, and keep the record of it."""
    from forge_cluster.jobs import scheduler_of

    made = replace(scheduler_of(job.system).submit(job), submitted=time.strftime("%Y-%m-%d %H:%M:%S %z"))
    made.write()
    show.message(f"Submitted {made.name} ({made.system} {made.id}). Its output: forge jobs logs -f {made.name}")
    return 0


def as_row(job: JobRecord) -> dict[str, Any]:
    """Return what is known of a job and its run."""
    from forge_cluster.jobs import state_of

    here = RunFolder(job.run_dir)
    spent = goodput.read(here.path)
    known = {"updates": here.updates, "planned_updates": here.planned} if here.card else {}
    return {
        **asdict(job),
        "state": state_of(job),
        "run": known | {"status": here.status, "reason": here.reason or None} if here.card else None,
        "goodput": None if spent is None else spent.as_json(),
    }


def _list(jobs: list[JobRecord], as_json: bool) -> int:
    rows = [as_row(job) for job in jobs]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        show.message("No jobs were submitted from this folder yet: forge jobs submit SYSTEM RECIPE.", "dim")
        return 0
    table = show.table("job", "system", "id", "state", "updates", "submitted", "run folder")
    for row in rows:
        state = Text(row["state"], STYLES.get(row["state"], "red"))
        cells = [row["name"], row["system"], row["id"], state, _updates(row), row["submitted"][:16], row["run_dir"]]
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    show.console().print(table)
    return 0


def _updates(row: dict[str, Any]) -> str:
    done, planned = (row["run"] or {}).get("updates"), (row["run"] or {}).get("planned_updates")
    return "" if done is None else f"{done}/{planned}" if planned and planned != done else str(done)


def _status(job: JobRecord, as_json: bool) -> int:
    row = as_row(job)
    if as_json:
        print(json.dumps(row, indent=2))
        return 0
    spent, run = goodput.read(Path(job.run_dir)), row["run"] or {}
    reason = f": {run['reason']}" if run.get("reason") else ""
    how = f"{run['status']}{reason}" if run else "which has not begun"
    lines = {
        "job": f"{job.name} ({job.system} {job.id}), submitted {job.submitted}",
        "state": row["state"],
        "run": f"{job.run_dir}, {how}",
        "updates": _updates(row),
        "goodput": "" if spent is None else spent.sentence(),
        "file": job.file,
    }
    for label, text in lines.items():
        if text:
            show.console().print(Text.assemble((f"{label:<10}", "dim"), text), soft_wrap=True)
    return 0


def _logs(job: JobRecord, follow: bool) -> int:
    from forge_cluster.jobs import ALIVE, scheduler_of, state_of

    words = scheduler_of(job.system).logs(job, follow and state_of(job) in ALIVE)
    if not words:
        show.message(f"{job.name} is {state_of(job)}, and has printed nothing yet.", "dim")
        return 0
    printing = subprocess.Popen(words)
    try:
        while follow and printing.poll() is None and state_of(job) in ALIVE:
            try:
                printing.wait(2)
            except subprocess.TimeoutExpired:
                continue
        if follow:
            time.sleep(0 if printing.poll() is not None else 1)  # what was written last is printed
            printing.terminate()
        return max(0, printing.wait()) if not follow else 0
    except KeyboardInterrupt:
        printing.terminate()
        return 0


def _cancel(job: JobRecord) -> int:
    from forge_cluster.jobs import ALIVE, scheduler_of, state_of

    state = state_of(job)
    if state not in ALIVE:
        show.message(f"{job.name} has ended already: {state}.", "dim")
        return 0
    scheduler_of(job.system).cancel(job)
    show.message(f"Asked {job.name} to end. To go on later: forge jobs retry {job.name}")
    return 0


def _retry(job: JobRecord) -> int:
    if not Path(job.file).is_file():
        raise ForgeError(
            f"The file of {job.name}, {job.file}, is gone. Submit it again: forge jobs submit {job.system} ..."
        )
    refuse_in_use(job.name)
    return submit(job)
