"""The doctor examines a copy of the process while a fit goes on: the fit tells, and is not changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import forge
from forge.util.apart import can_fork
from forge_doctor import beside
from forge_doctor.first_look import FirstLook
from tests.support.patients import Healthy, loader, numbers

pytestmark = pytest.mark.skipif(not can_fork(), reason="a process cannot be copied here")


class TurnedTargets(Healthy):
    """A mistake that the first look does not see."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self(x).roll(3, 0), y)


def trained(kind: type[Healthy], **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    task = kind()
    trainer = forge.Trainer(plugins=[FirstLook(**options)], run_dir=False, seed=0, max_updates=20, validate_every=None)
    trainer.fit(task, loader(*numbers()))
    return {name: p.detach().clone() for name, p in task.named_parameters()}


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the end of a fit wait until all is said."""
    monkeypatch.delenv(beside.SWITCH)
    monkeypatch.setattr(beside, "patience", lambda seconds: 300.0)
    monkeypatch.setattr(beside, "DELAY", 0.0)
    monkeypatch.setattr("os.sched_setscheduler", lambda *_: None)  # beside busy processes it would wait for ever


@pytest.mark.usefixtures("_patient")
def test_a_fit_tells_what_the_doctor_finds_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    told = trained(TurnedTargets)
    assert "compared with the target of another sample" in caplog.text
    alone = trained(TurnedTargets, beside=False)
    assert all(torch.equal(told[name], alone[name]) for name in alone)


@pytest.mark.usefixtures("_patient")
def test_what_a_task_expects_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    class Meant(TurnedTargets):
        expected = frozenset({"compared_with_others"})

    trained(Meant)
    assert "compared with the target" not in caplog.text


def test_a_fit_without_a_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is off" in beside.why_not(forge.Trainer(plugins=[], run_dir=False))
    monkeypatch.delenv(beside.SWITCH)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert beside.why_not(forge.Trainer(plugins=[], run_dir=False)) == "it runs on several ranks"
    monkeypatch.delenv("WORLD_SIZE")
    trainer = forge.Trainer(plugins=[], run_dir=False)
    trainer.task = Healthy()
    assert beside.why_not(trainer) == ""
    monkeypatch.setattr(beside, "LARGEST", 10)
    assert beside.why_not(trainer) == "the task is large"
