"""profiler: what it tells of a recording, and of memory."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import forge
from forge.errors import RecipeError
from forge.testing import TinyTask, fit_tiny, tiny_batches
from forge_plugins import JSONL, Profiler, Tensorboard
from forge_plugins.profiler.memory import REST, at_peak, largest
from tests.support.profiler_kit import SHORT, Breaks, summary, traces
from tests.support.tasks import Classifier, fit, make_batches

# ---------------------------------------------------------------------------------------------------------------------
# What it tells


def test_the_report_is_logged_with_ranges_and_operators(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="forge"):
        fit_tiny([Profiler(**SHORT, top=3)], run_dir=tmp_path)
    (text,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("profiler:"))
    assert text.startswith("profiler: updates 3 to 4, recorded on cpu\n")
    for table in ("ranges", "operators"):
        assert re.search(rf"^{table} +calls +host$", text, re.MULTILINE)
    assert len(re.findall(r"^.+ +[\d.]+ +[\d.]+ (?:µs|ms|s)$", text, re.MULTILINE)) == 2 * 3
    assert str(traces(tmp_path)[0]) in text


class Sink(forge.Plugin):
    """Keeps the texts that are published."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[tuple[int, Any]] = []

    @forge.hookimpl
    def forge_log(self, update: int, metrics: dict[str, Any]) -> None:
        self.got.extend((update, value) for name, value in metrics.items() if name == "profile")


def test_every_sink_gets_it_as_a_text(tmp_path: Path) -> None:
    sink = Sink()
    fit_tiny([sink, Tensorboard(), JSONL(), Profiler(**SHORT)], run_dir=tmp_path)
    ((update, text),) = sink.got
    assert update == 5
    assert text == forge.Text((tmp_path / "profile" / "summary.md").read_text())
    assert "| forward |" in text.text


def test_the_summary_holds_every_recording(tmp_path: Path) -> None:
    plugin = Profiler(wait=1, warmup=0, active=2, repeat=3)
    fit_tiny([plugin], max_epochs=2, run_dir=tmp_path)
    told = json.loads((tmp_path / "profile" / "summary.json").read_text())["recordings"]
    assert [(each["first"], each["updates"]) for each in told] == [(1, 2), (4, 2), (7, 2)]
    assert (tmp_path / "profile" / "summary.md").read_text().count("## Profile of updates") == 3
    assert [report.first for report in plugin.reports] == [1, 4, 7]


def test_operators_are_counted_as_torch_counts_them(tmp_path: Path) -> None:
    task, batches = Classifier(), make_batches(1)
    with profile(activities=[ProfilerActivity.CPU]) as torchs:
        task.training_step(batches[0])["loss"].backward()
        task.configure_optimizers().step()
    fit(train=make_batches(8), plugins=[Profiler(**SHORT)], run_dir=tmp_path)
    ours = {each["name"]: each["calls"] for each in summary(tmp_path)["tables"]["operators"]}
    for name in ("aten::addmm", "aten::mm", "AddmmBackward0", "aten::relu"):
        assert ours[name] == sum(event.count for event in torchs.key_averages() if event.key == name)


def test_a_run_stopped_in_the_window_reports_what_there_is(tmp_path: Path) -> None:
    class Stop(forge.Plugin):
        @forge.hookimpl
        def forge_step_end(self, step: forge.Step) -> None:
            if step.index == 3:
                step.trainer.request_stop("enough")

    sink = Sink()
    fit_tiny([Stop(), sink, Profiler(wait=1, warmup=0, active=50)], run_dir=tmp_path)
    assert summary(tmp_path)["updates"] == 3
    assert [update for update, _ in sink.got] == [4]
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_other_verbs_are_not_recorded(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    plugin = Profiler(wait=1, warmup=0, active=1)
    trainer = forge.Trainer(plugins=[plugin], device="cpu")
    getattr(trainer, verb)(TinyTask(), tiny_batches())
    assert not plugin.reports
    assert not caplog.text


@pytest.mark.parametrize(
    ("option", "value", "least"), [("wait", 0, 1), ("warmup", -1, 0), ("active", 0, 1), ("repeat", 0, 1), ("top", 0, 1)]
)
def test_options_that_make_no_sense_are_refused(option: str, value: int, least: int) -> None:
    with pytest.raises(RecipeError, match=rf"profiler\.{option} is {value}; it must be at least {least}"):
        Profiler(**{option: value})


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def test_memory_at_the_peak_is_divided_by_purpose(tmp_path: Path) -> None:
    plugin = Profiler(**SHORT, memory=True)
    task, _ = fit_tiny([plugin], run_dir=tmp_path)
    trained = sum(p.untyped_storage().nbytes() for p in task.parameters())
    found = {row["name"]: row["bytes"] for row in summary(tmp_path)["tables"]["memory"]}
    assert found["weights"] > found["gradients"] == found["optimizer"] == trained  # weights have buffers too
    assert found[REST] > 0
    assert found.pop("all") == sum(found.values())
    assert any(row["bytes"] > 0 for row in summary(tmp_path)["tables"]["operators"])
    assert "memory" in plugin.reports[0].text(12)


def test_the_peak_is_that_of_the_runs_device() -> None:
    def change(total: int, kind: int) -> dict[str, Any]:
        return {"name": "[memory]", "args": {"Total Allocated": total, "Device Type": kind}}

    events = [change(100, 0), change(300, 0), change(900, 1), change(200, 0)]
    parts = {"weights": 50, "gradients": 50, "optimizer": 100}
    rest = {device: at_peak(parts, events, torch.device(device))[3] for device in ("cpu", "cuda")}
    assert (rest["cpu"]["bytes"], rest["cuda"]["bytes"]) == (150 + 300 - 200, 900 - 200)


def test_out_of_memory_says_what_memory_was_taken_up_by(tmp_path: Path) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit_tiny([Profiler(**SHORT)], task=Breaks(3, error), run_dir=tmp_path)
    note = "\n".join(caught.value.__notes__)
    assert "Memory of cpu when it ran out (update 3, epoch 0):" in note
    assert re.search(r"weights +\d+ B", note)
    assert re.search(r"optimizer +\d+ B", note)
    assert "-p accumulate" in note
    assert "-p remat" in note


def test_the_lines_that_hold_the_most_memory_are_the_users_own() -> None:
    def block(size: int, *files: str, state: str = "active_allocated") -> dict[str, Any]:
        frames = [{"filename": file, "line": 7, "name": "f"} for file in files]
        return {"size": size, "state": state, "frames": frames}

    torchs, forges = torch.nn.functional.__file__, forge.engine.trainer.__file__
    blocks = [
        block(100, torchs, forges, "<string>", "/home/me/model.py", forges),
        block(50, "/home/me/model.py"),
        block(120, torchs),
        block(900, "/home/me/model.py", state="inactive"),
        block(5),
    ]
    found = largest([{"blocks": blocks[:2]}, {"blocks": blocks[2:]}])
    assert list(found.items()) == [
        ("/home/me/model.py:7 in f", [100, 50]),
        (f"{torchs}:7 in f", [120]),
        ("a block of 5 B", [5]),
    ]
