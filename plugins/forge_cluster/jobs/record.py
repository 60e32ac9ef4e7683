"""JobRecord: what is known of a job that was submitted."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from forge.errors import ForgeError, did_you_mean
from forge.runs.folder import read_object
from forge.util.files import atomic_write, make_folder

FOLDER = Path("jobs")
"""Where the records are, in the working directory, as runs are in runs/."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job, in the scheduler's words and in forge's."""

    name: str
    system: str
    file: str
    "The job file that was submitted, and that is submitted again."
    folder: str
    "The working directory of the job."
    run_dir: str
    id: str = ""
    "The scheduler's name of it: a number of SLURM, KIND/NAME of Kubernetes, a process."
    mark: str = ""
    "When its process began, so that no other of the same number is taken for it."
    submitted: str = ""

    def path(self, ending: str = "json") -> Path:
        return FOLDER / f"{self.name}.{ending}"

    def write(self) -> None:
        make_folder(FOLDER)
        with atomic_write(self.path()) as beside:
            beside.write_text(json.dumps(asdict(self), indent=2) + "\n")


def all_jobs() -> list[JobRecord]:
    """Return the jobs that were submitted from here, the newest first."""
    found = [_read(path) for path in FOLDER.glob("*.json")] if FOLDER.is_dir() else []
    return sorted((job for job in found if job is not None), key=lambda job: job.submitted, reverse=True)


def find_job(name: str) -> JobRecord:
    """Return a job by its name, or by its number at the scheduler."""
    known = all_jobs()
    for job in known:
        if name in (job.name, job.id):
            return job
    near = did_you_mean(name, [job.name for job in known])
    raise ForgeError(f"No job {name!r} was submitted from this folder.{near} `forge jobs` lists them.")


def _read(path: Path) -> JobRecord | None:
    record = read_object(path)
    names = [field.name for field in fields(JobRecord)]
    if any(not isinstance(record.get(name), str) for name in names) or record["name"] != path.stem:
        return None
    return JobRecord(**{name: record[name] for name in names})
