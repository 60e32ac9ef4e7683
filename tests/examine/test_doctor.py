"""forge.doctor and `forge doctor`: the page, the exit code, what is silenced, and what is left as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import forge
from forge import cli
from forge.errors import TaskError
from tests.support.patients import Healthy, splits

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
    state = torch.get_rng_state()
    report = forge.doctor(task, train, val, budget=60)
    assert report.findings == []
    assert report.skipped == {}
    assert "learning one batch" in report.good
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.state_dict().items())
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
    assert "found good:" in text
    assert not Path("runs").exists()
    assert cli.main(["doctor", "task.py:Task", "--quick", "--json"]) == 1
    [first, *_] = json.loads(capsys.readouterr().out)["findings"]
    assert (first["level"], first["name"]) == ("error", "broadcast_loss")


class Expected(Healthy):
    expected = {"sum_reduction"}

    def loss(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, y, reduction="sum")


def test_what_is_expected_is_silenced_and_reported() -> None:
    report = forge.doctor(Expected(), *splits(), budget=0)
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
    report = forge.doctor(task, *splits(), budget=0)
    assert {finding.name for finding in report.errors} == {"activation_before_loss"}
