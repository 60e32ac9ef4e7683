"""Jobs after they were submitted: a small record of each in jobs/NAME.json, and the scheduler's own commands.

The record says which scheduler has the job, by which number, and where its run is; the run's card has the job. Nothing
else is kept: the scheduler is asked whether a job waits or runs, and the run folder how it ended.
"""

from __future__ import annotations

from forge_cluster.jobs.record import FOLDER, JobRecord, all_jobs, find_job
from forge_cluster.jobs.schedulers import ALIVE, SCHEDULERS, Scheduler, scheduler_of, state_of

__all__ = [
    "ALIVE",
    "FOLDER",
    "SCHEDULERS",
    "JobRecord",
    "Scheduler",
    "all_jobs",
    "find_job",
    "scheduler_of",
    "state_of",
]
