"""profiler: what it records is true, what it says follows from it, and training does not notice."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset

import forge
from forge.data import Loader
from forge.errors import RecipeError
from forge.testing import TinyGAN, TinyTask, assert_same_weights, fit_tiny, tiny_batches
from forge_plugins import AMP, JSONL, Accumulate, Checkpoint, Compile, Prefetch, Profiler, Remat, Tensorboard
from forge_plugins.profiler import memory, results, timeline, unrecorded
from forge_plugins.profiler.intervals import covers, length, minus, union
from forge_plugins.profiler.memory import largest
from forge_plugins.profiler.trace import analyse
from forge_plugins.profiler.verdict import BUSY, Measured, Setup, duration, judge, measured, provided
from tests.conftest import Run
from tests.support.reference import train
from tests.support.tasks import Classifier, fit, make_batches

SHORT: dict[str, Any] = {"wait": 2, "warmup": 1, "active": 2}
"""Updates 3 and 4 are recorded."""


def traces(folder: Path) -> list[Path]:
    return sorted((folder / "profile").glob("*.pt.trace.json"))


def events_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["traceEvents"]


def ranges(file: Path) -> list[tuple[str, float, float]]:
    """(name, start, end) of every range that is not torch's own, in order."""
    found = [event for event in events_of(file) if event.get("cat") == "user_annotation"]
    own = [e for e in found if not e["name"].startswith("Optimizer.")]
    return sorted(((e["name"], e["ts"], e["ts"] + e["dur"]) for e in own), key=lambda r: (r[1], -r[2]))


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


def summary(folder: Path) -> dict[str, Any]:
    """What was recorded last."""
    return json.loads((folder / "profile" / "summary.json").read_text())["recordings"][-1]


# ---------------------------------------------------------------------------------------------------------------------
# The trace


def test_the_rhythm_is_in_the_trace_with_its_names(tmp_path: Path) -> None:
    fit_tiny([Profiler(**SHORT)], train=tiny_batches([4] * 9), max_epochs=1, run_dir=tmp_path)
    (file,) = traces(tmp_path)
    inside = ["transfer", "forward", "backward", "step"]
    assert nested(file) == [
        path
        for n in (3, 4)
        for path in (
            f"ProfilerStep#{n}",
            f"ProfilerStep#{n}/data",
            f"ProfilerStep#{n}/update {n}",
            *(f"ProfilerStep#{n}/update {n}/{name}" for name in inside),
        )
    ]


def test_with_accumulation_each_micro_batch_has_its_ranges(tmp_path: Path) -> None:
    plugins = [Accumulate(2), Profiler(wait=1, warmup=0, active=1)]
    fit_tiny(plugins, train=tiny_batches([4] * 8), max_epochs=1, run_dir=tmp_path)
    micro = [f"ProfilerStep#1/update 1/{name}" for name in ("transfer", "forward", "backward")]
    begin = ["ProfilerStep#1", "ProfilerStep#1/data", "ProfilerStep#1/update 1"]
    assert nested(traces(tmp_path)[0]) == [*begin, *micro, *micro, "ProfilerStep#1/update 1/step"]


def test_with_two_optimizers_each_has_its_update(tmp_path: Path) -> None:
    options: dict[str, Any] = {"wait": 1, "warmup": 0, "active": 1}
    fit_tiny([Profiler(**options)], task=TinyGAN(), max_epochs=1, run_dir=tmp_path)
    paths = [path.removeprefix("ProfilerStep#1/") for path in nested(traces(tmp_path)[0])]
    first, second = "update 1 generator", "update 1 discriminator"
    assert paths[1:3] == ["data", first]
    assert paths[3:] == [
        *(f"{first}/{name}" for name in ("transfer", "forward", "backward", "step")),
        second,
        *(f"{second}/{name}" for name in ("forward", "backward", "step")),
    ]


class Closure(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_a_closure_optimizer_reruns_the_window_in_its_step(tmp_path: Path) -> None:
    fit(Closure(), plugins=[Profiler(wait=1, warmup=0, active=1)], run_dir=tmp_path)
    paths = nested(traces(tmp_path)[0])
    assert paths.count("ProfilerStep#1/update 1/forward") == 1
    assert "ProfilerStep#1/update 1/step/forward" in paths
    phases = summary(tmp_path)["phases"]
    assert min(phases.values()) >= 0
    assert sum(phases.values()) == pytest.approx(summary(tmp_path)["seconds_recorded"])


def test_an_evaluation_is_named_and_not_counted(tmp_path: Path) -> None:
    plugins = [Profiler(wait=1, warmup=0, active=2)]
    fit(val=make_batches(2), plugins=plugins, validate_every="2 updates", run_dir=tmp_path)
    evaluated = [path for path in nested(traces(tmp_path)[0]) if "evaluation" in path]
    assert evaluated == [
        "ProfilerStep#1/evaluation",
        *["ProfilerStep#1/evaluation/transfer", "ProfilerStep#1/evaluation/forward"] * 2,
    ]
    told = summary(tmp_path)
    assert told["phases"]["evaluation"] > 0
    counted = sum(seconds for name, seconds in told["phases"].items() if name != "evaluation")
    assert counted == pytest.approx(told["seconds_recorded"])


def test_traces_can_be_told_apart_by_their_names(tmp_path: Path) -> None:
    fit_tiny([Profiler(**SHORT, repeat=2)], max_epochs=4, run_dir=tmp_path)
    names = [file.name for file in traces(tmp_path)]
    assert names == ["rank0.3.pt.trace.json", "rank0.8.pt.trace.json"]
    worker_and_span = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")  # torch-tb-profiler's own rule
    assert [match.groups() for name in names if (match := worker_and_span.match(name))] == [
        ("rank0", ".3"),
        ("rank0", ".8"),
    ]


def test_ranges_of_the_same_names_in_a_model_are_left_alone(tmp_path: Path) -> None:
    class Named(Classifier):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.profiler.record_function("data"), torch.profiler.record_function("evaluation"):
                return self.net(x)

    fit(Named(), plugins=[Profiler(wait=1, warmup=0, active=1)], run_dir=tmp_path)
    assert "ProfilerStep#1/update 1/forward/data/evaluation" in nested(traces(tmp_path)[0])
    assert summary(tmp_path)["phases"]["evaluation"] == 0


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
    once = ["transfer", "forward", "backward", "step"]
    assert [name for name in opened if name[0] != "/"] == ["data", "update 3", *once, "data", "update 4", *once]


def test_an_error_in_the_loader_closes_the_open_range(opened: list[str]) -> None:
    def broken() -> Iterator[Any]:
        yield from make_batches(4)
        raise ZeroDivisionError("no more data")

    with pytest.raises(ZeroDivisionError, match="no more data"):
        fit(train=broken(), plugins=[Profiler(wait=1, warmup=0, active=9)])
    assert not torch.autograd._profiler_enabled()
    assert opened[-2:] == ["data", "/data"]
    assert len(opened) % 2 == 0


# ---------------------------------------------------------------------------------------------------------------------
# Training does not notice


EVERYTHING: dict[str, Any] = {
    **SHORT,
    "repeat": 2,
    "record_shapes": True,
    "with_stack": True,
    "profile_memory": True,
    "memory": True,
}


@pytest.mark.parametrize("task", [TinyTask, TinyGAN])
def test_weights_are_the_same_to_the_bit(task: Callable[[], forge.TaskModule], tmp_path: Path) -> None:
    alone, _ = fit_tiny(task=task(), max_epochs=3)
    watched, _ = fit_tiny([Profiler(**EVERYTHING)], task=task(), max_epochs=3, run_dir=tmp_path)
    assert_same_weights(watched, alone)
    assert len(traces(tmp_path)) == 2


def test_weights_are_those_of_a_plain_loop() -> None:
    torch.manual_seed(0)
    watched = Classifier()
    torch.manual_seed(0)
    plain = Classifier()
    fit(watched, train=make_batches(8), plugins=[Profiler(**SHORT)])
    loss = nn.functional.cross_entropy
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(plain, lambda model, batch: loss(model(batch[0]), batch[1]), optimizer, make_batches(8), 1)
    assert_same_weights(watched, plain)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    before = dict(os.environ)
    fit_tiny([Profiler(**SHORT)], run_dir=tmp_path)
    assert not torch.autograd._profiler_enabled()
    assert dict(os.environ) == before


class Breaks(TinyTask):
    """Training fails at an update."""

    def __init__(self, at: int, error: BaseException | None = None):
        super().__init__()
        self.at, self.error = at, error or ZeroDivisionError("broken")

    def training_step(self, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.progress.update == self.at:
            raise self.error
        return super().training_step(batch)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6])
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
    assert_same_weights(ended, straight)


def test_a_disk_that_takes_nothing_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file where the folder should be")
    _, result = fit_tiny([Profiler(**SHORT)], run_dir=tmp_path)
    assert result.stop_reason == "max_epochs"
    assert "profiler: the report failed" in caplog.text


def test_the_error_of_a_sink_is_its_own() -> None:
    class Broken(forge.Plugin):
        @forge.hookimpl
        def forge_log(self, metrics: dict[str, Any]) -> None:
            if "profile" in metrics:
                raise ZeroDivisionError("a broken sink")

    with pytest.raises(ZeroDivisionError, match="a broken sink"):
        fit_tiny([Broken(), Profiler(**SHORT)])


# ---------------------------------------------------------------------------------------------------------------------
# There is one profiler


def test_another_profiler_is_left_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    plugin = Profiler(**SHORT)
    with profile(activities=[ProfilerActivity.CPU]) as outer:
        fit_tiny([plugin])
    assert "another torch profiler is recording in this process" in caplog.text
    assert not plugin.reports
    assert any(event.key == "aten::addmm" for event in outer.key_averages())


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


def test_two_of_them_are_refused() -> None:
    with pytest.raises(forge.StackError, match="profiler"):
        fit_tiny({"profiler": {}, "profiler@again": {}})  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------------------------------------------------------
# What it tells


def test_the_report_is_logged_with_verdict_phases_and_operators(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="forge"):
        fit_tiny([Profiler(**SHORT, top=3)], run_dir=tmp_path)
    (text,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("profiler:"))
    assert text.startswith("profiler: recorded updates 3 to 4 on cpu\n")
    assert re.search(r"^  (data|host|compute)-bound$", text, re.MULTILINE)
    assert re.search(r"^  forward +[\d.]+ (µs|ms|s) +[\d.]+%$", text, re.MULTILINE)
    assert len(re.findall(r"^  \S+(?:: \S+)? +\d+ +[\d.]+ (?:µs|ms|s) +[\d.]+%$", text, re.MULTILINE)) == 3
    assert str(traces(tmp_path)[0]) in text


def test_where_nobody_listens_to_the_log_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("forge").setLevel(logging.WARNING)
    try:
        fit_tiny([Profiler(**SHORT)])
    finally:
        logging.getLogger("forge").setLevel(logging.NOTSET)
    assert "profiler: recorded updates 3 to 4 on cpu" in capsys.readouterr().err


def test_without_a_run_folder_nothing_is_written(empty_folder: Path) -> None:
    plugin = Profiler(**SHORT, memory=True)
    fit_tiny([plugin])
    assert plugin.reports[0].files == ()
    assert not list(empty_folder.iterdir())


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
    assert re.search(r"\*\*(data|host|compute)-bound\*\*", text.text)


def test_the_summary_holds_every_recording(tmp_path: Path) -> None:
    plugin = Profiler(wait=1, warmup=0, active=2, repeat=3)
    fit_tiny([plugin], max_epochs=2, run_dir=tmp_path)
    told = json.loads((tmp_path / "profile" / "summary.json").read_text())["recordings"]
    assert [(each["first"], each["updates"]) for each in told] == [(1, 2), (4, 2), (7, 2)]
    assert (tmp_path / "profile" / "summary.md").read_text().count("## Recorded updates") == 3
    assert [report.first for report in plugin.reports] == [1, 4, 7]


def test_phases_are_the_whole_of_an_update(tmp_path: Path) -> None:
    fit(train=make_batches(8), plugins=[Profiler(**SHORT)], run_dir=tmp_path)
    told = summary(tmp_path)
    assert sum(told["phases"].values()) == pytest.approx(told["seconds_recorded"])
    assert sum(told["verdict"]["shares"].values()) == pytest.approx(1)
    assert told["seconds"] <= told["seconds_recorded"]


def test_operators_are_counted_as_torch_counts_them(tmp_path: Path) -> None:
    task, batches = Classifier(), make_batches(1)
    with profile(activities=[ProfilerActivity.CPU]) as torchs:
        task.training_step(batches[0])["loss"].backward()
        task.configure_optimizers().step()
    fit(train=make_batches(8), plugins=[Profiler(**SHORT)], run_dir=tmp_path)
    ours = {each["name"]: each["calls"] for each in summary(tmp_path)["operators"]}
    for name in ("aten::addmm", "aten::mm", "AddmmBackward0", "aten::relu"):
        assert ours[name] == sum(event.count for event in torchs.key_averages() if event.key == name)


def test_a_run_that_ends_in_the_window_reports_what_there_is(tmp_path: Path) -> None:
    sink = Sink()
    fit_tiny([sink, Profiler(wait=1, warmup=0, active=50)], max_updates=4, run_dir=tmp_path)
    assert summary(tmp_path)["updates"] == 3
    assert [update for update, _ in sink.got] == [4]


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


def test_a_stop_after_the_boundary_is_reported_at_the_end(tmp_path: Path) -> None:
    class Late(forge.Plugin):
        @forge.hookimpl
        def forge_boundary(self, trainer: forge.Trainer) -> None:
            if trainer.progress.update == 4:
                trainer.request_stop("enough")

    sink = Sink()
    fit_tiny([sink, Profiler(wait=1, warmup=0, active=50), Late()], run_dir=tmp_path)
    assert summary(tmp_path)["updates"] == 3
    assert not sink.got  # a sink may be closed by then


def test_a_run_that_ends_before_the_window_says_so(caplog: pytest.LogCaptureFixture) -> None:
    fit_tiny([Profiler()], max_updates=6)
    assert (
        "nothing was recorded: the run had 6 updates, and profiler.wait=5 with profiler.warmup=2 skips the first 7. "
        "Set profiler.wait=1 profiler.warmup=0, or train longer." in caplog.text
    )


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


@pytest.mark.slow
def test_the_command_line_prints_it(run_forge: Run, empty_folder: Path) -> None:
    done = run_forge("fit", "quickstart", "-p", "profiler", "trainer.max_epochs=1", "profiler.top=4")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^profiler: recorded updates 7 to 11 on cpu$", done.stderr, re.MULTILINE)
    assert re.search(r"^  what to change$", done.stderr, re.MULTILINE)
    told = re.search(r"^  trace: (\S+)$", done.stderr, re.MULTILINE)
    assert told is not None
    assert (empty_folder / told[1]).is_file()
    assert "Kineto" not in done.stderr
    assert "profiler_start" not in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def test_the_memory_of_each_operator_is_counted(tmp_path: Path) -> None:
    plugin = Profiler(**SHORT, profile_memory=True)
    fit(train=make_batches(8), plugins=[plugin], run_dir=tmp_path)
    taken = {operator.name: operator.memory for operator in plugin.reports[0].trace.operators}
    assert taken["aten::addmm"] == 2 * (4 * 8 + 4 * 3) * 4  # two updates; outputs of both layers, batch 4, float32
    assert plugin.reports[0].peak is not None
    assert "by memory taken" in (tmp_path / "profile" / "summary.md").read_text()
    assert not list((tmp_path / "profile").glob("*.svg"))


def test_the_memory_timeline_is_a_picture_and_a_track(tmp_path: Path) -> None:
    plugin = Profiler(**SHORT, memory=True)
    fit(train=make_batches(8), plugins=[plugin], run_dir=tmp_path)
    (picture,) = (tmp_path / "profile").glob("*.memory-timeline.svg")
    assert picture.read_text().startswith("<svg ")
    track = [event for event in events_of(traces(tmp_path)[0]) if event.get("ph") == "C"]
    assert max(event["args"]["bytes"] for event in track) == plugin.reports[0].peak
    begin, end = ranges(traces(tmp_path)[0])[0][1], ranges(traces(tmp_path)[0])[-1][2]
    assert all(begin - 1 <= event["ts"] <= end + 1e6 for event in track)


def test_a_picture_keeps_the_extremes_of_each_column() -> None:
    points = [(i / 1000, (i * 7919) % 1000) for i in range(1000)]
    thin = timeline.thinned(points, 1.0, 50)
    assert len(thin) <= 2 * 51
    assert max(size for _, size in thin) == max(size for _, size in points)
    assert thin == sorted(thin)


def test_out_of_memory_says_what_memory_was_taken_up_by(tmp_path: Path) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit_tiny([Profiler(**SHORT)], task=Breaks(3, error), run_dir=tmp_path)
    note = "\n".join(caught.value.__notes__)
    assert "Memory of cpu when it ran out (update 3, epoch 0):" in note
    assert re.search(r"parameters +\d+ B", note)
    assert re.search(r"optimizer state +\d+ B", note)
    assert "-p accumulate" in note
    assert "-p remat" in note
    file = tmp_path / "profile" / "rank0.out-of-memory.txt"
    assert str(file) in note
    assert "Tried to allocate 20.00 GiB" in file.read_text()


def test_out_of_memory_does_not_advise_what_is_done_already() -> None:
    class Halves(forge.Plugin):
        provides = ("autocast", "activation_checkpointing")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit_tiny([Profiler(), Halves()], task=Breaks(1, torch.OutOfMemoryError("CUDA out of memory.")))
    note = "\n".join(caught.value.__notes__)
    assert "What helps:" in note
    assert "-p amp" not in note
    assert "-p remat" not in note


@pytest.mark.parametrize("failure", [RuntimeError("no more"), MemoryError(), OSError("disk full")])
def test_a_snapshot_that_fails_loses_nothing_else(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path) -> None:
        raise failure

    monkeypatch.setattr(memory, "usage", lambda trainer: "What memory was taken up by")
    monkeypatch.setattr(memory, "dump", fail)
    trainer: Any = SimpleNamespace(run_dir=tmp_path, env=SimpleNamespace(rank=0, device=torch.device("cuda")))
    error = RuntimeError("CUDA out of memory.")
    results.explain(trainer, error)
    first, written, failed = error.__notes__
    assert first == "What memory was taken up by"
    assert "out-of-memory.txt" in written
    assert type(failure).__name__ in failed


def test_out_of_memory_without_a_run_folder_is_a_note_only(empty_folder: Path) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit_tiny([Profiler()], task=Breaks(1, error))
    assert "What helps:" in "\n".join(caught.value.__notes__)
    assert not list(empty_folder.iterdir())


def test_other_errors_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        fit_tiny([Profiler()], task=Breaks(1, RuntimeError("shapes do not fit")), run_dir=tmp_path)
    assert "What helps:" not in "\n".join(caught.value.__notes__)
    assert not (tmp_path / "profile").exists()


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
    assert [(held.where, held.bytes, held.blocks) for held in found] == [
        ("/home/me/model.py:7 in f", 150, 2),
        (f"{torchs}:7 in f", 120, 1),
        ("a block of 5 B", 5, 1),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Reading a trace: one of an accelerator, written by hand, in microseconds


def span(cat: str, name: str, start: float, end: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": tid, "args": args}


def one_update() -> list[dict[str, Any]]:
    """1000 µs: data to 300, an update to 900; the device copies, computes, waits and computes again until 1100."""
    return [
        span("user_annotation", "ProfilerStep#7", 0, 1000),
        span("user_annotation", "data", 100, 300),
        span("user_annotation", "update 7", 300, 900),
        span("user_annotation", "transfer", 300, 400),
        span("user_annotation", "forward", 400, 600),
        span("cpu_op", "aten::linear", 410, 500, **{"External id": 1}),
        span("cpu_op", "aten::addmm", 420, 480, **{"External id": 2}),
        span("user_annotation", "backward", 600, 800),
        span("cpu_op", "aten::mm", 610, 700, tid=2, **{"External id": 3}),
        span("cpu_op", "aten::item", 820, 880, **{"External id": 4}),
        span("cuda_runtime", "cudaStreamSynchronize", 830, 870, **{"External id": 4}),
        span("cuda_runtime", "cudaDeviceSynchronize", 1001, 1100),
        span("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 350, 450, tid=7, bytes=300),
        span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 450, 460, tid=7, bytes=100),
        span("kernel", "gemm", 440, 540, tid=7, **{"External id": 2}),
        span("kernel", "gemm", 700, 1100, tid=7, **{"External id": 3}),
        span("gpu_user_annotation", "forward", 440, 540, tid=7),
    ]


def micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def test_the_hosts_time_is_divided_by_phases() -> None:
    phases = {name: micro(seconds) for name, seconds in analyse(one_update(), {7: 200e-6}).phases.items()}
    assert phases == {
        "data": 200,
        "transfer": 100,
        "forward": 200,
        "backward": 200,
        "step": 0,
        "update": 100,
        "between": 200,
        "evaluation": 0,
    }


def test_the_beginning_of_an_epoch_counts_as_waiting_for_data() -> None:
    assert micro(analyse(one_update(), {7: 280e-6}).phases["data"]) == 280
    assert micro(analyse(one_update(), {7: 0.0}).phases["data"]) == 200


def test_the_devices_time_is_computing_copying_starving() -> None:
    trace = analyse(one_update(), {7: 200e-6})
    assert micro(trace.window) == 1100
    assert micro(trace.busy) == 500
    assert micro(trace.copying) == 90  # 350 to 440; beside a kernel it costs nothing
    assert micro(trace.starved) == 200
    assert (trace.copied, trace.pageable) == (400, 300)


def test_waits_for_the_device_are_named_without_its_own() -> None:
    assert analyse(one_update(), {}).waits == {"aten::item": 1}


def test_operators_have_their_own_time_and_their_kernels() -> None:
    trace = analyse(one_update(), {})
    found = {each.name: (each.calls, micro(each.cpu), micro(each.device)) for each in trace.operators}
    assert found["aten::linear"] == (1, 30, 0)
    assert found["aten::addmm"] == (1, 60, 100)
    assert found["aten::mm"] == (1, 90, 400)
    assert {each.name: each.calls for each in trace.kernels}["gemm"] == 2


def test_a_kernel_without_an_operator_is_found_by_its_launch() -> None:
    launch = span("cuda_runtime", "cudaLaunchKernel", 430, 435, correlation=77, **{"External id": 2})
    kernel = span("kernel", "relu", 540, 550, tid=7, correlation=77)
    found = {each.name: micro(each.device) for each in analyse([*one_update(), launch, kernel], {}).operators}
    assert found["aten::addmm"] == 110


def test_an_evaluation_is_taken_out_of_everything() -> None:
    evaluation = [
        span("user_annotation", "ProfilerStep#8", 1000, 3000),
        span("user_annotation", "evaluation", 1200, 2900),
        span("cpu_op", "aten::conv", 1300, 1500, **{"External id": 9}),
        span("kernel", "conv", 1400, 2500, tid=7, **{"External id": 9}),
        span("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 2600, 2700, tid=7, bytes=1000),
    ]
    trace, without = analyse([*one_update(), *evaluation], {}), analyse(one_update(), {})
    assert micro(trace.window) == 3000 - 1700
    assert (trace.busy, trace.copying, trace.copied) == (without.busy, without.copying, without.copied)
    assert "aten::conv" not in {each.name for each in trace.operators}


def test_an_operators_work_begins_where_a_calls_own_cost_ends() -> None:
    assert micro(analyse(one_update(), {}).work) == 20 + 50 + 50  # linear, addmm, item: each less 10


def updates_of(*calls: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """Updates that each call these operators, for so many µs."""
    events = []
    for n, called in enumerate(calls):
        at = n * 100_000.0
        events += [span("user_annotation", f"{name}{n}", at, at + 99_000) for name in ("ProfilerStep#", "update ")]
        for name, micros in called:
            at += 10
            events.append(span("cpu_op", name, at, at + micros))
            at += micros
    return events


def test_an_interrupted_operator_has_not_worked_so_long() -> None:
    first, second, third = (
        [("mm", 30.0), ("add", 20.0)],
        [("mm", 5000.0), ("add", 20.0)],
        [("mm", 30.0), ("add", 9000.0)],
    )
    assert micro(analyse(updates_of(first, second, third), {}).work) == 3 * (20 + 10)
    assert micro(analyse(updates_of(second, third), {}).work) == 2 * (20 + 10)


def test_updates_that_differ_count_as_the_median_one() -> None:
    one, two, three = [("mm", 30.0)], [("mm", 5000.0), ("add", 20.0)], [("add", 50.0)]
    assert micro(analyse(updates_of(one, two, three), {}).work) == 3 * 40


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing was recorded"):
        analyse([span("cpu_op", "aten::mm", 0, 1)], {})


Times = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


@given(Times, Times)
def test_stretches_of_time_are_sets_of_moments(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    def moments(intervals: Any) -> set[int]:
        return {moment for start, end in intervals for moment in range(start, end)}

    one, two = union(first), union(second)
    assert moments(one) == moments(first)
    assert moments(minus(one, two)) == moments(first) - moments(second)
    assert length(one) == len(moments(first))
    assert all(covers(one, moment) == (moment in moments(first)) for moment in range(61))
    assert all(early[1] < late[0] for early, late in pairwise(one))


# ---------------------------------------------------------------------------------------------------------------------
# The verdict, from made-up measurements


def on_cuda(**shares: float) -> Measured:
    """An update of one second on cuda."""
    return replace(Measured(device="cuda", wall=1.0, busy=0.0), **shares)


@pytest.mark.parametrize(
    ("measurements", "kind"),
    [
        (on_cuda(busy=1.0), "compute-bound"),
        (on_cuda(busy=BUSY), "compute-bound"),
        (on_cuda(busy=BUSY - 0.01), "host-bound"),
        (on_cuda(busy=BUSY - 0.01, data=0.1), "data-bound"),
        (on_cuda(busy=BUSY - 0.01, copying=0.1), "transfer-bound"),
        (on_cuda(busy=0.6, data=0.15, copying=0.05), "host-bound"),
        (on_cuda(busy=0.6, data=0.21), "data-bound"),
        (on_cuda(busy=0.6, copying=0.21), "transfer-bound"),
        (on_cuda(busy=0.5, data=0.24, copying=0.25), "transfer-bound"),
        (on_cuda(busy=0.5, data=0.25, copying=0.24), "data-bound"),
        (on_cuda(busy=0.0), "host-bound"),
        (Measured(device="cpu", wall=1.0, busy=0.51), "compute-bound"),
        (Measured(device="cpu", wall=1.0, busy=0.49), "host-bound"),
        (Measured(device="cpu", wall=1.0, busy=0.4, data=0.41), "data-bound"),
        (Measured(device="cpu", wall=1.0, busy=0.41, data=0.4), "compute-bound"),
        (Measured(device="cpu", wall=1.0, busy=0.3, data=0.3), "host-bound"),
    ],
)
def test_the_verdict_follows_from_the_measurements(measurements: Measured, kind: str) -> None:
    verdict = judge(measurements, Setup())
    assert verdict.kind == kind
    assert verdict.evidence
    assert 1 <= len(verdict.advice) <= 4


@given(
    st.sampled_from(["cpu", "cuda"]),
    st.lists(st.floats(0, 10), min_size=4, max_size=4),
    st.none() | st.floats(0, 20),
)
def test_shares_are_the_whole_whatever_is_measured(device: Any, parts: list[float], before: float | None) -> None:
    busy, data, copying, host = parts
    copying = copying if device == "cuda" else 0.0
    found = Measured(
        device=device, wall=busy + data + copying + host, busy=busy, data=data, copying=copying, unrecorded=before
    )
    assert all(0 <= share <= 1 for share in found.shares.values())
    assert sum(found.shares.values()) == pytest.approx(1 if any(found.shares.values()) else 0)
    assert found.seconds <= found.wall
    judge(found, Setup())


def test_what_recording_costs_is_taken_off_the_hosts_part() -> None:
    slow = on_cuda(busy=0.5)
    assert judge(slow, Setup()).kind == "host-bound"
    alone = Measured(device="cuda", wall=1.0, busy=0.5, unrecorded=0.55)
    assert alone.seconds == pytest.approx(0.55)
    assert judge(alone, Setup()).kind == "compute-bound"  # 0.5 of 0.55
    ahead = Measured(device="cuda", wall=1.0, busy=0.5, unrecorded=0.1)  # the host ran ahead: it never had to wait
    assert ahead.seconds == pytest.approx(0.5)
    assert ahead.shares["compute-bound"] == pytest.approx(1)


def test_the_evidence_has_the_numbers() -> None:
    found = Measured(device="cuda", wall=4e-3, busy=1e-3, unrecorded=2e-3, calls=500, waits=2, waiting_in="aten::item")
    assert judge(found, Setup()).evidence == (
        "The device computes for 50% of the time; for 50% it has nothing to do because the host is not fast enough.",
        "An update takes 2 ms (4 ms while it is recorded).",
        "500 kernels are launched in an update, with 2 µs of work each on average.",
        "The host waits for the device 2.0 times an update, most often in aten::item.",
        "Without it an update would be 2.0× as fast at most.",
    )


def test_time_that_the_system_gave_to_others_is_told() -> None:
    trace = analyse(one_update(), {7: 200e-6})
    for ran, absent in ((850e-6, 50), (100e-6, 800), (2.0, 0), (None, 0)):
        assert micro(measured(trace, "cpu", 1, ran=ran).absent) == absent
    assert measured(trace, "cuda", 1, ran=0.0).absent == 0
    told = judge(measured(trace, "cpu", 1, ran=100e-6), Setup()).evidence
    assert "For 73% of the time the system ran something else: all these numbers are uncertain." in told


def advice(found: Measured, **setup: Any) -> str:
    return "\n".join(judge(found, Setup(**setup)).advice)


def test_a_plugin_counts_by_what_it_provides_or_its_name() -> None:
    class Halves(forge.Plugin):
        provides = ("autocast",)

    class Silent(forge.Plugin): ...

    second = Silent()
    second.name = "compile@second"
    assert provided([Halves(), second]) == {"autocast", "compile"}
    assert provided([AMP(dtype="bf16"), Remat(), Prefetch(), Compile()]) == {
        "autocast",
        "activation_checkpointing",
        "prefetch",
        "compile",
    }


def test_nobody_is_told_to_do_what_is_done() -> None:
    waiting, copying = on_cuda(busy=0.1, data=0.8), on_cuda(busy=0.1, copying=0.8, pageable=1.0)
    hosting, computing = on_cuda(busy=0.1), on_cuda(busy=1.0)
    assert "num_workers=4" in advice(waiting, workers=0)
    assert "more than its 8 workers" in advice(waiting, workers=8)
    assert "workers" not in advice(waiting, workers=None)
    assert "TensorLoader" in advice(waiting)
    assert "-p prefetch" in advice(copying)
    assert "pin_memory=True" in advice(copying)
    assert "-p prefetch" not in advice(copying, provided=frozenset({"prefetch"}))
    assert "compile.mode=reduce-overhead" in advice(hosting)
    assert "-p compile" not in advice(hosting, provided=frozenset({"compile"}))
    assert "fused=True" in advice(hosting)
    assert "fused=True" not in advice(hosting, fused=True)
    assert "-p amp" in advice(computing)
    assert "-p amp" not in advice(computing, provided=frozenset({"autocast"}))
    assert "channels_last" in advice(computing, convolutions=True)
    assert "set_float32_matmul_precision" in advice(computing, full_float32=True)
    assert "-p throughput" in advice(computing, provided=frozenset({"autocast", "compile"}))


def test_advice_depends_on_what_was_seen() -> None:
    assert ".item()" in advice(on_cuda(busy=0.1, waits=3))
    assert ".item()" not in advice(on_cuda(busy=0.1))
    assert "-p ledger" in advice(on_cuda(busy=0.1, between=0.5))
    assert "1 of 8 cores" in advice(Measured(device="cpu", wall=1.0, busy=0.9), threads=1, cores=8)


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.234e-5, "12.3 µs"), (3.4567e-3, "3.46 ms"), (1.2, "1.2 s"), (0.99999, "1 s"), (0, "0 µs")]
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_an_update_before_the_recording_is_the_median() -> None:
    assert unrecorded([0.0, 10.0, 11.0, 12.0]) == 1.0
    assert unrecorded([5.0]) is None


# ---------------------------------------------------------------------------------------------------------------------
# The verdict, from real runs


def verdict_of(task: forge.TaskModule, data: Any) -> tuple[str, Profiler]:
    plugin = Profiler(wait=3, warmup=1, active=3)
    fit(task, train=data, plugins=[plugin])
    verdict = plugin.reports[0].verdict
    assert verdict is not None
    return verdict.kind, plugin


class Heavy(Dataset[Any]):
    """Each sample is worked out in Python, number by number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        total = 0
        for i in range(20_000):
            total += i % (index + 1)
        return torch.full((8,), float(total % 7)), index % 3


def test_a_heavy_dataset_is_data_bound() -> None:
    kind, plugin = verdict_of(Classifier(), Loader(Heavy(), batch_size=8))
    assert kind == "data-bound"
    assert plugin.reports[0].verdict is not None
    assert "num_workers=4" in plugin.reports[0].verdict.advice[0]


def test_a_tiny_model_is_host_bound() -> None:
    assert verdict_of(Classifier(), make_batches(8))[0] == "host-bound"


class Matmuls(forge.TaskModule):
    """Few operators, much work in each."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(768, 768, bias=False), nn.Linear(768, 768, bias=False))

    def training_step(self, batch: Any) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.slow
def test_large_matrix_products_are_compute_bound() -> None:
    kind, plugin = verdict_of(Matmuls(), [torch.randn(512, 768) for _ in range(8)])
    assert kind == "compute-bound"
    report = plugin.reports[0]
    assert report.operators("cpu").rows[0][0] in ("aten::mm", "aten::addmm")


def test_a_device_that_torch_does_not_record_gets_no_verdict() -> None:
    plugin = Profiler(**SHORT)
    fit_tiny([plugin])
    report = plugin.reports[0]
    bare = type(report)("mps", 3, 2, report.trace, None, None, 12)
    for told in (bare.text(), bare.markdown()):
        assert "bound" not in told
        assert "No verdict: torch's profiler does not record the device mps." in told
    assert "verdict" not in bare.plain()


def test_averages_are_of_one_update() -> None:
    trace = analyse(one_update(), {7: 200e-6})
    one, two = measured(trace, "cuda", 1), measured(trace, "cuda", 2)
    for name in ("wall", "busy", "data", "copying", "calls", "waits", "between", "step"):
        assert getattr(two, name) == pytest.approx(getattr(one, name) / 2)
    assert two.pageable == one.pageable == 0.75
