"""What the page of forge doctor ends with: samples that stand out, readiness, and results that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forge
from forge.config.build import make_plugins
from forge_doctor.readiness import planned, readiness
from tests.support.patients import Healthy, loader, numbers


class Quick(Healthy):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def squares(wrong: int | None) -> tuple[Tensor, Tensor]:
    y = torch.arange(320) % 4
    x = 0.1 * torch.rand(320, 8, generator=torch.Generator().manual_seed(0))
    x[torch.arange(320), y] += 2
    if wrong is not None:
        y[wrong] = (y[wrong] + 2) % 4
    return x, y


@pytest.mark.slow
def test_a_sample_with_a_wrong_label_stands_out() -> None:
    train = loader(*squares(wrong=5), shuffle=False, batch=32)
    report = forge.doctor(Quick(), train, budget=0)
    assert report.worst[0]["sample"] == 5  # the few updates of a look leave others high too
    assert report.worst[0]["loss"] > 6 * report.worst[0]["median"]
    assert report.worst[0]["shown"].endswith("\n3")
    assert forge.doctor(Quick(), loader(*squares(wrong=None), shuffle=False, batch=32), budget=0).worst == []


def test_readiness_names_what_is_missing() -> None:
    found = {item.what: item for item in readiness(make_plugins(["guard", "jsonl"]), has_val=True, seed=None)}
    assert {what: item.is_on for what, item in found.items()} == {
        "checkpoints": False,
        "validation": True,
        "logging": True,
        "reproducibility": False,
        "failure detection": True,
        "clipping": False,
        "early stopping": False,
    }
    assert found["checkpoints"].evidence == "add -p checkpoint, which saves and resumes"
    assert planned({"seed": 3})["seed"] == 3
    assert planned({}) == {}


class Rounds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e4).sin()  # 1e4 times what rounding leaves


class Sensitive(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), Rounds(), nn.Linear(16, 4))


def results(task: forge.TaskModule) -> list[tuple[str, str]]:
    report = forge.doctor(task, loader(*numbers()), loader(*numbers(48, seed=5)), plugins=["amp"], budget=0)
    return [(finding.name, finding.where) for finding in report.findings if finding.name == "results_differ"]


@pytest.mark.slow
def test_the_first_module_that_bf16_changes_is_named() -> None:
    assert results(Sensitive()) == [("results_differ", "net.1")]
    assert results(Healthy()) == []


def test_what_a_run_does_not_have_is_not_called_good() -> None:
    report = forge.doctor(Healthy(), loader(*numbers()), budget=0)
    assert not {"results in mixed precision", "results of the compiled model"} & {*report.good, *report.skipped}
