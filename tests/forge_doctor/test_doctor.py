"""forge.doctor and `forge doctor`: the page, the exit code, what is silenced, and what is left as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional as F

import forge
from forge import cli
from forge.errors import TaskError
from forge_doctor.findings import Finding
from forge_doctor.probe_order import BEFORE
from forge_doctor.report import DoctorReport
from tests.support.patients import Healthy, splits
from tests.support.profiles import some

FILE = """
import torch
from torch import nn
from torch.nn import functional as F
import forge
from forge.data import Splits, TensorLoader


class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch):
        x, y = batch
        return ((self.net(x) - y) ** 2).mean()

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 8, generator=g)
    y = x[:, 0] * x[:, 1] + 0.1 * torch.randn(200, generator=g)
    train = TensorLoader(x[:160], y[:160], batch_size=16, shuffle=True)
    return Splits(train, TensorLoader(x[160:], y[160:], batch_size=16))
"""


def test_a_healthy_task_has_no_findings_and_stays_as_it_was() -> None:
    task, (train, val) = Healthy(), splits()
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    stored: Any = train.dataset
    samples, state = [tensor.clone() for tensor in stored.tensors], torch.get_rng_state()
    report = forge.doctor(task, train, val)
    assert report.findings == []
    assert report.skipped == {}
    assert "from train to val" in report.good
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.state_dict().items())
    assert all(torch.equal(*pair) for pair in zip(stored.tensors, samples, strict=True))
    assert task.trainer is None


def test_the_command_line_prints_a_page_and_exits_with_1(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("task.py").write_text(FILE)
    assert cli.main(["doctor", "task.py:Task", "--quick"]) == 1
    text = capsys.readouterr().out
    assert "error  broadcast_loss" in text
    assert "task.py:16" in text
    assert "Cure: Give predictions and targets one shape" in text
    assert "Found good: " in text
    assert not Path("runs").exists()
    assert cli.main(["doctor", "task.py:Task", "--quick", "--json"]) == 1
    [first, *_] = json.loads(capsys.readouterr().out)["findings"]
    assert (first["level"], first["name"]) == ("error", "broadcast_loss")


class Expected(Healthy):
    expected = {"sum_reduction"}

    def loss(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, y, reduction="sum")


def test_what_is_expected_is_silenced_and_reported() -> None:
    report = forge.doctor(Expected(), *splits())
    assert report.findings == []
    assert [finding.name for finding in report.silenced] == ["sum_reduction"]


class Uncopyable(Healthy):
    def __deepcopy__(self, memo: object) -> None:
        raise TypeError("no copies")


def test_a_task_that_cannot_be_copied_is_refused_by_name() -> None:
    with pytest.raises(TaskError, match=r"Uncopyable cannot be copied \(TypeError: no copies\)"):
        forge.doctor(Uncopyable(), *splits())


def test_what_a_fit_refuses_is_a_finding() -> None:
    task = Healthy()
    task.loss = lambda scores, y: F.cross_entropy(scores.softmax(1), y)  # pyright: ignore[reportAttributeAccessIssue]
    report = forge.doctor(task, *splits())
    assert {finding.name for finding in report.errors} == {"activation_before_loss"}


class Planned(Healthy):
    """Notes how long its run is."""

    lengths: ClassVar[list[int | None]] = []

    def configure_optimizers(self) -> Any:
        assert self.trainer is not None
        self.lengths.append(self.trainer.planned_updates)
        return super().configure_optimizers()


@pytest.mark.parametrize(("options", "updates"), some([("{max_epochs: 3}", 30), ("{max_updates: 7}", 7), ("{}", 100)]))
def test_the_run_of_the_recipe_is_planned(tmp_path: Path, options: str, updates: int) -> None:
    recipe = tmp_path / "short.yaml"
    recipe.write_text(f"trainer: {options}\nplugins: {{}}\n")
    Planned.lengths.clear()
    forge.doctor(Planned(), *splits(), recipe=recipe)
    assert Planned.lengths[0] == updates


@pytest.mark.slow
def test_a_run_without_a_validation_is_noted() -> None:
    without = forge.doctor(Healthy(), splits()[0])
    assert [(finding.level, finding.name) for finding in without.findings] == [("note", "no_validation")]


class DropsItsSchedule(Healthy):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return optimizer


def test_what_only_a_fit_sees_is_a_finding() -> None:
    report = forge.doctor(DropsItsSchedule(), *splits())
    assert [finding.name for finding in report.findings] == ["schedule_dropped"]


def test_a_report_is_shown_in_a_notebook_and_at_a_prompt() -> None:
    report = DoctorReport([Finding("no_gradient", "No weight has a <gradient>.")], good=[*BEFORE])
    shown = report._repr_html_()
    assert "No weight has a &lt;gradient&gt;." in shown
    assert "Cure:" in shown
    assert f"Found good: {len(BEFORE)} checks" in shown
    assert "--all" not in shown
    assert repr(report) == "warning: no_gradient: No weight has a <gradient>."
