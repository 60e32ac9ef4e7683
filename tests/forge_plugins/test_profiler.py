"""profiler: what it records is true, what it says follows from it, and training does not notice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import forge
from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import Accumulate, Checkpoint, Clip, Profiler
from tests.support.profiler_kit import SHORT, Breaks, events_of, ranges, traces
from tests.support.profiles import some
from tests.support.tasks import fit, make_batches


def nested(file: Path) -> list[str]:
    """The ranges of a trace, each behind the path of those around it."""
    around: list[tuple[str, float]] = []
    paths = []
    for name, start, end in ranges(file):
        while around and around[-1][1] <= start:
            around.pop()
        around.append((name, end))
        paths.append("/".join(name for name, _ in around))
    return paths


# ---------------------------------------------------------------------------------------------------------------------
# The trace


def test_the_rhythm_is_in_the_trace_with_its_names(tmp_path: Path) -> None:
    fit_tiny([Profiler(**SHORT)], train=tiny_batches([4] * 9), max_epochs=1, run_dir=tmp_path)
    (file,) = traces(tmp_path)
    inside = [f"update/{name}" for name in ("to_device", "forward", "backward", "optimizer")]
    assert nested(file) == [
        path
        for step in ("ProfilerStep#3", "ProfilerStep#4")
        for path in (step, f"{step}/data", f"{step}/update", *(f"{step}/{name}" for name in inside))
    ]


def test_with_accumulation_each_micro_batch_has_its_ranges(tmp_path: Path) -> None:
    plugins = [Accumulate(2), Profiler(wait=1, warmup=0, active=1)]
    fit_tiny(plugins, train=tiny_batches([4] * 8), max_epochs=1, run_dir=tmp_path)
    micro = [f"ProfilerStep#1/update/{name}" for name in ("to_device", "forward", "backward")]
    begin = ["ProfilerStep#1", "ProfilerStep#1/data", "ProfilerStep#1/update"]
    assert nested(traces(tmp_path)[0]) == [*begin, *micro, *micro, "ProfilerStep#1/update/optimizer"]


def test_what_plugins_do_is_named_after_them(tmp_path: Path) -> None:
    fit(plugins=[Clip(max_norm=1.0), Profiler(wait=1, warmup=0, active=1)], run_dir=tmp_path)
    assert "ProfilerStep#1/update/clip.edit_grads" in nested(traces(tmp_path)[0])


def test_an_evaluation_is_named(tmp_path: Path) -> None:
    plugins = [Profiler(wait=1, warmup=0, active=2)]
    fit(val=make_batches(2), plugins=plugins, validate_every="2 updates", run_dir=tmp_path)
    evaluated = [path for path in nested(traces(tmp_path)[0]) if "evaluate" in path]
    assert evaluated == [
        "ProfilerStep#1/evaluate",
        *["ProfilerStep#1/evaluate/to_device", "ProfilerStep#1/evaluate/forward"] * 2,
    ]


@pytest.mark.parametrize("option", ["record_shapes", "with_stack"])
def test_shapes_and_lines_are_in_the_trace_where_asked_for(option: str, tmp_path: Path) -> None:
    fit(plugins=[Profiler(wait=1, warmup=0, active=1, **{option: True})], run_dir=tmp_path)
    events = events_of(traces(tmp_path)[0])
    if option == "record_shapes":
        assert any("Input Dims" in event.get("args", {}) for event in events)
    else:
        assert any(event.get("cat") == "python_function" for event in events)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ranges that are opened, and of those that are closed, with a slash before them."""
    names: list[str] = []

    class Told(torch.profiler.record_function):
        def __enter__(self) -> Any:
            names.append(self.name)
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            names.append(f"/{self.name}")
            super().__exit__(*error)

    monkeypatch.setattr("forge_plugins.profiler.record_function", Told)
    return names


def test_no_range_is_opened_outside_of_the_recorded_updates(opened: list[str]) -> None:
    fit(plugins=[Profiler(**SHORT)], max_epochs=4)
    once = ["data", "update", "to_device", "forward", "backward", "optimizer"]
    assert [name for name in opened if name[0] != "/"] == [*once, *once]


# ---------------------------------------------------------------------------------------------------------------------
# Training does not notice


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    before = dict(os.environ)
    fit_tiny([Profiler(**SHORT)], run_dir=tmp_path)
    assert not torch.autograd._profiler_enabled()
    assert dict(os.environ) == before


@pytest.mark.parametrize("at", some([1, 2, 3, 4, 6], quick=2))
def test_an_error_at_any_moment_stops_the_recording(at: int, tmp_path: Path) -> None:
    plugin = Profiler(**SHORT)
    with pytest.raises(ZeroDivisionError, match="broken"):
        fit_tiny([plugin], task=Breaks(at), run_dir=tmp_path / "one")
    assert not torch.autograd._profiler_enabled()
    fit_tiny([plugin], run_dir=tmp_path / "two")
    assert len(traces(tmp_path / "two")) == 1


def test_a_resumed_run_counts_from_its_own_beginning(tmp_path: Path) -> None:
    straight, _ = fit_tiny([Checkpoint(background=False)], max_updates=9, run_dir=tmp_path / "straight")
    for updates in (4, 9):
        plugins = [Checkpoint(background=False), Profiler(wait=1, warmup=1, active=1)]
        ended, _ = fit_tiny(plugins, max_updates=updates, run_dir=tmp_path / "cut", resume="auto")
    assert [file.name for file in traces(tmp_path / "cut")] == ["rank0.2.pt.trace.json", "rank0.6.pt.trace.json"]
    assert_same(ended, straight)


def test_a_disk_that_takes_nothing_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file where the folder should be")
    _, result = fit_tiny([Profiler(**SHORT)], run_dir=tmp_path)
    assert result.stop_reason == "max_epochs"
    assert "profiler: nothing more is recorded: the report failed" in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# There is one profiler


def test_another_profiler_ends_the_recording_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    class Profiled(TinyTask):
        def training_step(self, batch: Any) -> Any:
            assert self.trainer is not None
            if self.trainer.progress.update == 3:
                with profile(activities=[ProfilerActivity.CPU]):
                    return super().training_step(batch)
            return super().training_step(batch)

    plugin = Profiler(**SHORT)
    _, result = fit_tiny([plugin], task=Profiled())
    assert result.stop_reason == "max_epochs"
    assert not plugin.reports
    assert "another torch profiler was started, which ended this one" in caplog.text


def test_it_waits_while_another_profiler_records() -> None:
    recorder = profile(activities=[ProfilerActivity.CPU])

    @forge.on("step_end")
    def record_three_updates(step: forge.Step) -> None:
        if step.index == 0:
            recorder.start()
        elif step.index == 3:
            recorder.stop()

    plugin = Profiler(**SHORT)
    fit_tiny([record_three_updates, plugin], max_epochs=3)
    assert [(report.first, report.updates) for report in plugin.reports] == [(6, 2)]


def test_ranges_are_for_nsight_systems_where_asked_for_on_cuda_alone(caplog: pytest.LogCaptureFixture) -> None:
    plugin = Profiler(nvtx=True)
    fit_tiny([plugin])
    assert "NVTX ranges need a CUDA device" in caplog.text
    assert not plugin.reports
