"""A run is continued only by the same job: what counts, what does not, and what is said."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.runs.job import another_job, changed_plan, job_of
from forge.testing.tiny import TinyTask, tiny_batches
from forge_plugins import DDP, JSONL, Checkpoint, Clip

OPTIONS = {"lr": 0.1, "width": [8, 8], "act": "<function gelu at 0x7f01>", "opt": {"a": 1}}
JOB: dict[str, Any] = {
    "task": {"class": "Net", "options": OPTIONS},
    "data": {"name": "digits", "noise": 0.1, "workers": 2, "root": "/scratch/1/digits"},
    "stack": [
        {"name": "clip", "options": {"max_norm": 1.0}, "observer": False, "provides": ["clip"]},
        {"name": "jsonl", "options": {}, "observer": True, "provides": []},
        {"name": "ddp", "options": {}, "observer": False, "provides": ["strategy"]},
    ],
    "trainer": {"max_epochs": 3, "max_updates": None, "log_every": 50, "device": "cpu", "validate_every": "1 epoch"},
    "seed": 1,
}


def changed(**changes: Any) -> dict[str, Any]:
    """The job with other values: task__lr=0.2 is the option lr of the task."""
    job = json.loads(json.dumps(JOB))
    for key, value in changes.items():
        *sections, last = key.split("__")
        holder = job
        for section in sections:
            holder = holder[section]["options"] if section == "task" and last != "class" else holder[section]
        holder[last] = value
    return job


CLIP, SINK, RANKS = JOB["stack"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task__class": "Other"}, "task was 'Net' and is 'Other'"),
        ({"task__lr": 0.2}, "task.lr was 0.1 and is 0.2"),
        ({"task__width": [8, 9]}, "task.width was [8, 8] and is [8, 9]"),
        ({"task__opt": {"a": 2}}, "task.opt.a was 1 and is 2"),
        ({"task__act": "<function relu at 0x7f02>"}, "task.act was '<function gelu at 0x7f01>' and is '<"),
        ({"data__name": "letters"}, "data.name was 'digits' and is 'letters'"),
        ({"data__noise": 0.2}, "data.noise was 0.1 and is 0.2"),
        ({"seed": 2}, "the seed was 1 and is 2"),
    ],
)
def test_these_options_make_another_job(change: dict[str, Any], said: str) -> None:
    assert another_job(JOB, changed(**change)).startswith(said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stack": [{**CLIP, "options": {"max_norm": 0.5}}]}, "clip.max_norm was 1.0 and is 0.5"),
        ({"stack": []}, "plugin clip was in the stack and is not"),
        ({"stack": [CLIP, {**CLIP, "name": "ema"}]}, "plugin ema was not in the stack and is"),
        ({"trainer__max_epochs": 2}, "trainer.max_epochs was 3 and is 2"),
        ({"trainer__max_updates": 10}, "trainer.max_updates was None and is 10"),
    ],
)
def test_these_must_be_asked_for_with_the_name_of_the_run(change: dict[str, Any], said: str) -> None:
    assert another_job(JOB, changed(**change)) == ""
    assert changed_plan(JOB, changed(**change)) == said


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"task__act": "<function gelu at 0x7fff>"},
        {"task__new_option": 3},
        {"data__workers": 8},
        {"data__root": "/scratch/2/digits"},
        {"trainer__max_epochs": 5},
        {"trainer__max_epochs": None},
        {"trainer__log_every": 5, "trainer__device": "cuda", "trainer__validate_every": None},
        {"stack": [CLIP]},
        {"stack": [RANKS, CLIP, {**SINK, "name": "tensorboard"}]},
    ],
)
def test_these_may_change(change: dict[str, Any]) -> None:
    assert another_job(JOB, changed(**change)) == changed_plan(JOB, changed(**change)) == ""


# -- which run ---------------------------------------------------------------------------------------------------------


def fit(plugins: Any = (), lr: float = 0.1, **options: Any) -> forge.FitResult:
    settings: dict[str, Any] = {"max_epochs": 1, "seed": 0, "device": "cpu", "resume": "auto", **options}
    return forge.Trainer(plugins=[Checkpoint(), *plugins], **settings).fit(TinyTask(lr=lr), tiny_batches())


@pytest.mark.parametrize("other", [{"lr": 0.2}, {"plugins": [Clip(0.5)]}, {"seed": 1}])
def test_another_job_begins_a_new_run(caplog: pytest.LogCaptureFixture, other: dict[str, Any]) -> None:
    caplog.set_level(logging.INFO, "forge")
    first = fit()
    second = fit(**other)
    assert (second.run_dir == first.run_dir, second.updates) == (False, 5)
    assert "is another job" in caplog.text
    assert fit(max_epochs=2).run_dir == first.run_dir  # though it is not the newest of all
    assert fit(max_epochs=3, **other).run_dir == second.run_dir


def test_observers_and_ranks_do_not_make_another_job() -> None:
    assert fit([JSONL()]).run_dir == fit([DDP()], max_epochs=2).run_dir


def test_a_launcher_without_a_task_knows_its_job() -> None:
    trainer = forge.Trainer(recipe=forge.recipe("quickstart", add=["ddp"]))
    now = job_of(trainer)
    trainer.task, _ = trainer.build()
    assert another_job(job_of(trainer), now) == changed_plan(job_of(trainer), now) == ""
    assert another_job(job_of(trainer), job_of(forge.Trainer(recipe=forge.recipe("quickstart", ["task.lr=1"])))) == (
        "task.lr was 0.003 and is 1.0"
    )


def test_a_named_run_of_another_job_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(run_dir=tmp_path)
    for resume in ("auto", tmp_path):
        with pytest.raises(forge.CheckpointError, match=r"holds another job: task.lr was 0.1 and is 0.2\. "):
            fit(lr=0.2, run_dir=tmp_path, resume=resume, max_epochs=2)
    fit(lr=0.2, run_dir=tmp_path, max_epochs=2, allow_inexact=True)
    assert "task.lr was 0.1 and is 0.2. The resumed run will differ" in caplog.text


def test_a_complete_run_says_so_and_trains_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forge")
    first = fit([Clip(1.0)], run_dir=tmp_path)
    assert fit([Clip(1.0)], run_dir=tmp_path) == first
    assert "this run is already complete (1 epochs, 5 updates); nothing is left to train" in caplog.text
    with pytest.raises(forge.CheckpointError, match=r"already complete, and clip.max_norm was 1.0 and is 0.5"):
        fit([Clip(0.5)], run_dir=tmp_path)
    assert fit([Clip(0.5)], run_dir=tmp_path, max_epochs=2).updates == 10


@pytest.mark.parametrize("names", [("Asia/Tokyo", "UTC"), ("UTC", "America/Los_Angeles")])
def test_the_newest_run_goes_by_utc(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    now = time.time()
    for number, zone in enumerate(names):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        run = fit(resume=None).run_dir
        assert run is not None
        card = json.loads((run / "card.json").read_text())
        started = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(now + 60 * number))
        (run / "card.json").write_text(json.dumps({**card, "started": started}))
        made.append(run)
    assert [run.name[:13] for run in made] == [time.strftime("%Y%m%d-%H%M", time.gmtime(now))] * 2
    made[0].rename(made[0].with_name("zzz"))
    assert fit(max_epochs=2).run_dir == made[1]
    monkeypatch.undo()
    time.tzset()
