"""forge.ready and `forge ready`: the whole road, where it stops, what it leaves alone, and the pages that it writes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import forge
from forge import cli
from forge_doctor.ready import road
from forge_doctor.ready.report import ReadyReport, RoadStep
from tests.support.patients import Healthy, splits

DAYS = 10_000.0
"""A budget that no machine is too slow for."""
NAMES = [name for name, _, _ in road.STEPS]


class StepsItself(Healthy):
    """Runs backward in its step, as the Trainer does."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        loss.backward()
        return loss


def files_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> ReadyReport:
    """The whole road with a tiny task, walked once."""
    here = tmp_path_factory.mktemp("road")
    before, switch = Path.cwd(), os.environ.pop("FORGE_REHEARSE")
    os.chdir(here)
    try:
        task, (train, val) = Healthy(), splits()
        weights = {name: tensor.clone() for name, tensor in task.state_dict().items()}
        state = torch.get_rng_state()
        report = forge.ready(
            task, train, val, plugins=["checkpoint", "guard"], max_epochs=3, seed=1, price=3.6, budget=DAYS
        )
        assert files_under(here) == {
            f"runs/ready/healthy/{name}" for name in ("ready.md", "ready.html", "one-batch.svg")
        }
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in task.state_dict().items())
    finally:
        os.chdir(before)
        os.environ["FORGE_REHEARSE"] = switch
    report.folder = here / "runs/ready/healthy"
    return report


@pytest.mark.slow
def test_the_whole_road_is_walked_and_answered(walked: ReadyReport) -> None:
    assert [step.name for step in walked.steps] == NAMES
    assert {step.name: step.left_out for step in walked.steps if step.left_out} == {}
    assert walked.may_start
    assert walked.answer.startswith("Yes")
    facts = {step.name: step.facts for step in walked.steps}
    assert facts["data"]["val"]["shared_with_train"] == 0
    assert facts["one-batch"]["reached"] < facts["one-batch"]["first"]
    assert facts["resume"]["verdict"] == "rehearsed, exact"
    assert facts["precision"].keys() >= {"float32", "bf16", "take"}
    assert facts["device"]["seconds"]["cpu"] > 0
    assert facts["determinism"]["equal"]
    assert "fused_optimizer (rounding)" in facts["speed"]["levers"]
    lacks = [remark.what for remark in walked.steps[-1].remarks if remark.level == "note"]
    assert lacks == ["logging", "clipping", "early stopping"]


def test_every_line_has_evidence_and_a_risk(walked: ReadyReport) -> None:
    lines = [remark for step in walked.steps for remark in step.remarks]
    assert all(line.evidence and line.risk.endswith((".", "?")) for line in lines)


def test_the_page_reads_as_markdown_as_html_and_in_a_notebook(walked: ReadyReport) -> None:
    assert walked.folder is not None
    text, page = (walked.folder / "ready.md").read_text(), (walked.folder / "ready.html").read_text()
    assert text.startswith(f"# May I start the long run?\n\n**{walked.answer}**\n")
    assert "| float32 | " in text
    assert "![one batch](one-batch.svg)" in text
    assert "<script" not in page
    assert 'class="forge-chart"' in page
    assert walked._repr_html_().startswith('<iframe srcdoc="&lt;!doctype')
    json.dumps(walked.as_data())


def test_a_step_that_fails_ends_the_road() -> None:
    train, val = splits()
    report = forge.ready(StepsItself(), train, val, plugins=[], max_epochs=1, out=False, budget=DAYS)
    results = [step.result for step in report.steps]
    assert results[:2] == ["good", "error"]
    assert set(results[2:]) == {"left out"}
    assert report.answer.startswith("No, because doctor: ")
    assert not report.may_start
    assert report.folder is None


def test_what_a_step_raises_is_said_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(Healthy):
        def validation_step(self, batch: Any) -> Any:
            return {"loss": batch[0] @ 3}

    monkeypatch.setattr(road, "STEPS", [entry for entry in road.STEPS if entry[0] in ("smoke", "stack")])
    report = forge.ready(Breaks(), *splits(), plugins=[], max_epochs=1, out=False, budget=DAYS)
    (error,) = report.of("error")
    line = Breaks.validation_step.__code__.co_firstlineno + 1
    assert error.evidence.partition(": ")[0].endswith(f"test_ready.py:{line}")
    assert "raised in the task's validation_step" in error.evidence or "validation_step" in error.evidence
    assert list(report.why_left_out.values()) == [["2 clipping, guard, checkpoints, early stopping"]]


def test_a_budget_of_almost_nothing_lists_what_was_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["ready", "quickstart", "--budget", "1e-5", "--out", str(tmp_path), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["answer"].startswith("No, because this was not done: ")
    done = {step["name"] for step in said["steps"] if not step["left_out"]}
    assert done == {"stack"}
    assert all("budget" in step["left_out"] for step in said["steps"][1:-1])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_the_report_of_what_it_has(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def asks(run: Any, step: RoadStep) -> None:
        class Asks(forge.Plugin):
            @forge.hookimpl
            def forge_forward(self) -> None:
                os.kill(os.getpid(), number)

        trainer = run.short(1, put=[Asks()])
        trainer.fit(run.copy(), run.train)
        raise AssertionError("the update went on")

    monkeypatch.setattr(road, "STEPS", [("data", "data", asks), ("stack", "stack", asks)])
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert cli.main(["ready", "quickstart", "--out", str(tmp_path)]) == code
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert "It was interrupted" in (tmp_path / "ready.md").read_text()


def test_a_shared_sample_is_a_warning_and_a_second_word_is_a_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(road, "STEPS", [entry for entry in road.STEPS if entry[0] in ("data", "stack")])
    file = tmp_path / "leaks.py"
    file.write_text(
        "import torch\nfrom forge.data import Splits, TensorLoader\nfrom tests.support.patients import Healthy\n\n"
        "class Leaks(Healthy): ...\n\ndef data():\n    x, y = torch.randn(64, 8), torch.arange(64) % 4\n"
        "    return Splits(TensorLoader(x, y, batch_size=16), TensorLoader(x[:8], y[:8], batch_size=8))\n"
    )
    assert cli.main(["ready", f"{file}:Leaks", "debug", "--out", str(tmp_path / "out"), "--budget", f"{DAYS}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "val shares samples with train: 8 of 8 inputs of val are among 64 of train" in said
    assert "Yes, but val shares samples with train" in said
    assert "by guard, anomaly" in said or "by anomaly" in said
