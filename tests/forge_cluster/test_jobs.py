"""`forge jobs`: on this machine for real, and against stand-ins of the schedulers' commands that keep a state."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main
from forge_cluster.jobs import ALIVE, find_job, state_of
from tests.support.patience import PATIENCE

TASK = """
import time
import forge
from forge.data import Splits
from forge.testing import TinyTask, tiny_batches

class Paced(TinyTask):
    def __init__(self, pause: float = 0.0):
        super().__init__()
        self.pause = pause

    def training_step(self, batch):
        time.sleep(self.pause)
        return super().training_step(batch)

def data():
    return Splits(train=tiny_batches())
"""
FIT = ["task.py:Paced", "trainer.seed=1", "checkpoint.every=1 updates", "-p", "no:tensorboard", "-p", "no:progress"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main(["jobs", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def await_state(name: str, *states: str) -> str:
    deadline = time.monotonic() + PATIENCE
    while (state := state_of(find_job(name))) not in states:
        assert state in ALIVE, Path(f"jobs/{name}.log").read_text()
        assert time.monotonic() < deadline, Path(f"jobs/{name}.log").read_text()
        time.sleep(0.05)
    return state


@pytest.mark.slow
def test_a_job_of_this_machine_is_cancelled_saved_and_retried_to_its_end(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*FIT, "trainer.max_updates=40", "--name", "first"]
    assert main(["jobs", "submit", "here", *words, "task.pause=0.1"]) == 0
    written = (folder / "first.sh").read_text()
    assert main(["jobs", "submit", "here", *words]) == 2  # it runs
    assert "has not ended" in " ".join(capsys.readouterr().err.split())
    assert (folder / "first.sh").read_text() == written
    deadline = time.monotonic() + PATIENCE
    while not list(folder.glob("runs/first/checkpoints/update-*")):
        assert time.monotonic() < deadline, (folder / "jobs/first.log").read_text()
        time.sleep(0.05)
    assert main(["jobs", "cancel", "first"]) == 0
    await_state("first", "interrupted")  # by its exit code, 85: the state was saved
    card = json.loads((folder / "runs/first/card.json").read_text())
    assert card["job"] == "here:first"  # the run knows its job
    assert main(["jobs", "retry", "first"]) == 0
    await_state("first", "finished")
    row = asked(capsys, "status", "first")
    assert row["run_dir"] == str(folder / "runs/first")  # the job knows its run
    assert row["run"] == {"updates": 40, "planned_updates": 40, "status": "finished", "reason": "max_updates"}
    assert row["goodput"]["attempts"] == 2
    assert main(["jobs", "logs", "first", "-f"]) == 0  # it has ended, so this does too
    assert main(["jobs", "cancel", "first"]) == 0
    assert "has ended already: finished" in " ".join(capsys.readouterr().err.split())
    assert [job["name"] for job in asked(capsys)] == ["first"]


@pytest.mark.slow
def test_a_mistake_in_the_job_is_seen_in_its_state_and_its_output(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobs", "submit", "here", *FIT, "trainer.max_updates=1", "--name", "bad"]) == 0
    Path("task.py").write_text("import no_such_module\n")  # what it runs is read after it was submitted
    await_state("bad", "failed", "finished")
    assert main(["jobs", "logs", "bad"]) == 0
    assert "no_such_module" in capfd.readouterr().out


STAND_IN = """#!{python}
import json, pathlib, sys
at = pathlib.Path({folder!r}) / "cluster.json"
jobs = json.loads(at.read_text()) if at.exists() else {{"calls": [], "next": 7, "states": {{}}}}
name, words = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
jobs["calls"].append([name, *words])
states, code = jobs["states"], 0
if name == "sbatch":
    states[str(jobs["next"])] = "PENDING"
    print(f"{{jobs['next']}};main")
    jobs["next"] += 1
elif name == "squeue":
    found = states.get(words[words.index("-j") + 1])
    print(found) if found else sys.exit("slurm_load_jobs error: Invalid job id specified")
elif name == "scancel":
    states[words[-1]] = "CANCELLED"
elif name == "kubectl" and words[0] == "create":
    if "first" in states:
        sys.exit("AlreadyExists")
    states["first"] = {{"conditions": []}}
    print("jobset.jobset.x-k8s.io/first")
elif name == "kubectl" and words[0] == "get":
    print(json.dumps({{"status": states["first"]}})) if "first" in states else sys.exit("NotFound")
elif name == "kubectl" and words[0] == "delete":
    states.pop("first", None)
elif name == "kubectl" and words[0] == "logs":
    print("from the pods")
at.write_text(json.dumps(jobs))
"""


class Cluster:
    """The state of the stand-ins."""

    def __init__(self, folder: Path):
        self.file = folder / "cluster.json"

    @property
    def calls(self) -> list[list[str]]:
        return json.loads(self.file.read_text())["calls"]

    def say(self, job: str, state: Any) -> None:
        found = json.loads(self.file.read_text())
        found["states"][job] = state
        self.file.write_text(json.dumps(found))


@pytest.fixture
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    programs = folder / "bin"
    programs.mkdir()
    for name in ("sbatch", "squeue", "scancel", "kubectl"):
        (programs / name).write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    return Cluster(folder)


def test_a_job_of_slurm(cluster: Cluster, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "submit", "slurm", "quickstart", "trainer.max_updates=1", "--name", "first"]) == 0
    job = find_job("7")
    assert (job.name, job.system, job.run_dir) == ("first", "slurm", str(folder / "runs/first"))
    assert cluster.calls[-1][1:] == ["--parsable", f"--chdir={folder}", str(folder / "first.sbatch")]
    assert state_of(job) == "queued"
    for said, meant in {"RUNNING": "running", "COMPLETING": "running", "NODE_FAIL": "failed"}.items():
        cluster.say("7", said)
        assert state_of(job) == meant
    cluster.say("7", "COMPLETED\nRUNNING")  # an array
    assert state_of(job) == "running"
    assert main(["jobs", "logs", "first"]) == 0
    assert "has printed nothing yet" in " ".join(capfd.readouterr().err.split())
    (folder / "first-7.out").write_text("the output\n")
    assert main(["jobs", "logs", "first"]) == 0
    assert "the output" in capfd.readouterr().out
    assert main(["jobs", "cancel", "first"]) == 0
    assert cluster.calls[-1] == ["scancel", "7"]
    assert state_of(job) == "cancelled"
    assert main(["jobs", "retry", "first"]) == 0
    assert find_job("first").id == "8"
    cluster.say("8", None)  # SLURM has forgotten it, so the run says
    assert state_of(find_job("first")) == "unknown"
    (folder / "runs/first").mkdir(parents=True)
    card = {"started": "now", "task": {"class": "T"}}
    (folder / "runs/first/card.json").write_text(json.dumps(card))
    (folder / "runs/first/end.json").write_text(json.dumps({"started": "now", "status": "finished"}))
    assert state_of(find_job("first")) == "finished"


def test_a_job_of_kubernetes(cluster: Cluster, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["quickstart", "trainer.max_updates=1", "--name", "first", "--kind", "jobset", "--image", "me/x"]
    assert main(["jobs", "submit", "kubernetes", *words]) == 0
    job = find_job("first")
    assert job.id == "jobset.jobset.x-k8s.io/first"
    assert state_of(job) == "queued"
    cluster.say("first", {"replicatedJobsStatus": [{"name": "node", "active": 1, "ready": 0}]})
    assert state_of(job) == "running"
    assert main(["jobs", "logs", "first"]) == 0
    assert "from the pods" in capfd.readouterr().out
    assert "jobset.sigs.k8s.io/jobset-name=first" in next(c for c in cluster.calls if c[1] == "logs")
    for kind, state in {"Failed": "failed", "Completed": "finished", "Suspended": "queued"}.items():
        cluster.say("first", {"conditions": [{"type": kind, "status": "True"}]})
        assert state_of(job) == state
    cluster.say("first", {"conditions": [{"type": "Failed", "status": "True"}]})
    assert main(["jobs", "retry", "first"]) == 0
    assert [call[1] for call in cluster.calls[-2:]] == ["delete", "create"]
    Path("jobs/first.json").unlink()
    assert main(["jobs", "submit", "kubernetes", *words]) == 2  # a stranger's job of this name is not touched
    assert "AlreadyExists" in capfd.readouterr().err
    assert cluster.calls[-1][1] == "create"


def test_what_is_not_there_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs"]) == 0
    for words, said in {
        ("status", "first"): "No job 'first' was submitted from this folder",
        ("submit", "ray", "quickstart", "trainer.max_updates=1"): "ray job list",
        ("look",): "status, logs, cancel or retry",
    }.items():
        assert main(["jobs", *words]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    Path("jobs").mkdir(exist_ok=True)
    Path("jobs/torn.json").write_text('{"name": ')
    assert asked(capsys) == []
