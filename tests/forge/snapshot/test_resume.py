"""A run that was cut off and resumed ends in the bits of a straight one: weights, metrics, sample order, logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import forge
from forge.checkpoint import Checkpoints
from forge.data import Loader, TensorLoader
from forge.snapshot.capture import capture
from forge.testing import TinyGAN, TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import JSONL, Accumulate, Checkpoint, Clip, Schedule
from tests.support.profiles import few
from tests.support.tasks import noting


def everything() -> list[Any]:
    return [
        Accumulate(2),
        Clip(0.5),
        Schedule("cosine", warmup=3),
        Checkpoint(every="2 updates", keep=2),
        JSONL(),
    ]


class PowerCut(Exception):
    """What ends a life in these tests."""


def cut_at(update: int) -> forge.Plugin:
    @forge.on("boundary", mutates=True)
    def power(trainer: forge.Trainer) -> None:
        if trainer.progress.update == update:
            raise PowerCut

    power.observer = True  # it may come and go
    return power


class Noisy(Dataset):
    """Samples with augmentation out of all three generators."""

    def __init__(self, length: int = 45):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(length, 6, generator=generator)
        self.y = torch.randint(3, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        import random

        noise = torch.randn(6) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return self.x[index] + noise, self.y[index]


class Wider(TinyTask):
    """The same task with one unit more."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 9), *list(self.net)[1:])


def live(folder: Path, plugins: list[Any], *, task: Any = None, train: Any = None, **options: Any) -> Any:
    """One life of a run in `folder`, from where it is to its end."""
    settings = {"seed": 3, "device": "cpu", "log_every": 2, "resume": "auto", "max_epochs": 3, **options}
    trained = task or TinyTask()
    trainer = forge.Trainer(plugins=plugins, run_dir=folder, **settings)
    result = trainer.fit(trained, tiny_batches() if train is None else train, tiny_batches(seed=1))
    return trained, result


def die(folder: Path, plugins: list[Any], update: int, **options: Any) -> None:
    with pytest.raises(PowerCut):
        live(folder, [*plugins, cut_at(update)], **options)


def log_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def ends_as_if_it_had_not_been_cut(live: Callable[..., Any], folder: Path, update: int) -> None:
    straight = live(folder / "straight")
    with pytest.raises(PowerCut):
        live(folder / "cut", cut_at(update))
    assert_same(live(folder / "cut"), straight)
    assert log_of(folder / "cut") == log_of(folder / "straight")


def resumes(
    folder: Path,
    make: Callable[[], dict[str, Any]],
    cuts: Callable[[int], list[int]],
    every: str = "1 updates",
    plugins: Callable[[], list[Any]] = list,
) -> forge.FitResult:
    """Compare a run that is cut after each of some updates, given those of a straight one, with the straight one."""

    def stack() -> list[Any]:
        return [*plugins(), Checkpoint(every=every, keep=2, background=False)]

    straight, expected = live(folder / "straight", stack(), **make())
    for update in cuts(expected.updates):
        die(folder / "cut", stack(), update, **make())
    resumed, result = live(folder / "cut", stack(), **make())
    assert_same(resumed, straight)
    assert (result.metrics, result.updates) == (expected.metrics, expected.updates)
    return result


def loaders() -> dict[str, Callable[[], Any]]:
    x, y = Noisy().x, Noisy().y
    return {
        "batches": tiny_batches,
        "tensors": lambda: TensorLoader(x, y, batch_size=8, shuffle=True),
        "samples": lambda: Loader(Noisy(), 8, shuffle=True),
    }


@few
@given(
    deaths=st.lists(st.integers(1, 8), max_size=3),
    kind=st.sampled_from(sorted(loaders())),
    gan=st.booleans(),
)
def test_any_number_of_deaths_ends_in_the_same_run(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[int], kind: str, gan: bool
) -> None:
    make, folder = loaders()[kind], tmp_path_factory.mktemp("runs")
    new_task = TinyGAN if gan else TinyTask
    straight, expected = live(folder / "straight", everything(), task=new_task(), train=make())
    for update in sorted(deaths):
        die(folder / "cut", everything(), update, task=new_task(), train=make())
    resumed, result = live(folder / "cut", everything(), task=new_task(), train=make())
    assert_same(resumed, straight)
    assert result.metrics == expected.metrics
    assert (result.updates, result.epochs, result.stop_reason) == (
        expected.updates,
        expected.epochs,
        expected.stop_reason,
    )
    assert log_of(folder / "cut") == log_of(folder / "straight")


# ---------------------------------------------------------------------------------------------------------------------
# What may change between two lives


def test_workers_and_prefetch_may_change_between_lives(tmp_path: Path) -> None:
    straight, _ = live(tmp_path / "straight", everything(), train=Loader(Noisy(), 8, shuffle=True))
    die(tmp_path / "cut", everything(), 4, train=Loader(Noisy(), 8, shuffle=True, num_workers=2))
    other = Loader(Noisy(), 8, shuffle=True, num_workers=1, prefetch_factor=3)
    resumed, _ = live(tmp_path / "cut", everything(), train=other, validate_every="2 updates", log_every=5)
    assert_same(resumed, straight)


@pytest.mark.parametrize("kind", ["cosine", "one_cycle"])
def test_a_run_may_grow(tmp_path: Path, kind: str) -> None:
    plugins = [Schedule(kind), Checkpoint()]
    live(tmp_path, plugins, max_epochs=2)
    _, result = live(tmp_path, [Schedule(kind), Checkpoint()], max_epochs=4)
    assert (result.updates, result.epochs, result.stop_reason) == (20, 4, "max_epochs")


def test_a_run_cannot_end_before_the_point_it_is_continued_from(tmp_path: Path) -> None:
    live(tmp_path, [Checkpoint()], max_epochs=3)
    with pytest.raises(forge.CheckpointError, match="was saved after 3 epochs, and max_epochs is 2"):
        live(tmp_path, [Checkpoint()], max_epochs=2)


def test_the_order_of_the_stack_and_its_observers_are_free(tmp_path: Path) -> None:
    straight, _ = live(tmp_path / "straight", everything())
    die(tmp_path / "cut", everything(), 4)
    resumed, _ = live(tmp_path / "cut", [p for p in reversed(everything()) if p.name != "jsonl"])
    assert_same(resumed, straight)


# ---------------------------------------------------------------------------------------------------------------------
# What may not


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 4}, "the seed was 3 and is 4"),
        ({"train": tiny_batches((8, 8, 8))}, "the length of the data was 37 and is 24"),
        ({"plugins": [Checkpoint(), Accumulate(2)]}, "the number of micro-batches in a window was 1 and is 2"),
        ({"task": Wider()}, "holds another job: task was 'TinyTask' and is 'Wider'"),
        ({"task": TinyTask(lr=0.2)}, r"holds another job: task.lr was 0.1 and is 0.2.*trainer.allow_inexact=true"),
        ({"task": Wider(), "allow_inexact": True}, "holds another model: net.0.weight was 8 × 6 float32 and is 9 × 6"),
    ],
)
def test_another_course_is_refused_by_the_name_of_what_changed(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    die(tmp_path, [Checkpoint(every="1 update")], 3)
    plugins = change.pop("plugins", [Checkpoint()])
    with pytest.raises(forge.CheckpointError, match=said):
        live(tmp_path, plugins, **change)


class Counting(forge.Plugin):
    """A plugin that changes the run and has state."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @forge.hookimpl
    def forge_step_end(self) -> None:
        self.count += 1

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_plugin_state_missing_on_either_side_is_refused(tmp_path: Path) -> None:
    die(tmp_path / "with", [Counting(), Checkpoint(every="1 update")], 3)
    with pytest.raises(
        forge.CheckpointError, match=r"has state of 'counting', which is not in this stack.*trainer.allow_inexact=true"
    ):
        live(tmp_path / "with", [Checkpoint()])
    die(tmp_path / "without", [Checkpoint(every="1 update")], 3)
    with pytest.raises(forge.CheckpointError, match="has no state of 'counting', which is in this stack"):
        live(tmp_path / "without", [Counting(), Checkpoint()])


class Careful(Counting):
    """Has state once there is something to remember."""

    def __init__(self, since: int):
        super().__init__()
        self.since = since

    @forge.hookimpl
    def forge_state_dict(self) -> Any:
        return {"count": self.count} if self.count >= self.since else None


def test_a_plugin_with_nothing_to_lose_may_come_and_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    die(tmp_path, [Careful(99), Checkpoint(every="1 update")], 3)
    die(tmp_path, [Checkpoint(every="1 update")], 5)
    assert "plugin 'careful' was removed from the stack" in caplog.text
    live(tmp_path, [Careful(99), Checkpoint()])
    assert "plugin 'careful' was added to the stack" in caplog.text


def test_allow_inexact_goes_on_without_the_state_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    die(tmp_path, [Counting(), Checkpoint(every="1 update")], 3)
    live(tmp_path, [Checkpoint()], allow_inexact=True)
    assert "has state of 'counting'" in caplog.text


class Doubling(forge.Plugin):
    """Changes the run, has no state."""

    @forge.hookimpl
    def forge_edit_grads(self, step: forge.Step) -> None:
        for parameter in step.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)


def test_a_new_plugin_or_option_is_worth_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    die(tmp_path, [Clip(0.5), Checkpoint(every="1 update")], 3)
    live(tmp_path, [Clip(0.25), Doubling(), Checkpoint()])
    assert "clip.max_norm was 0.5 and is 0.25 from here on" in caplog.text
    assert "plugin 'doubling' was added to the stack" in caplog.text


def test_a_loader_that_cannot_continue_trains_and_is_refused_when_it_should(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter(tiny_batches())

    often = Checkpoint(every="1 update")
    live(tmp_path / "unsaved", [], train=Endless(), max_epochs=1, resume=None)
    assert caplog.text == ""
    die(tmp_path, [often], 2, train=Endless())
    assert "A run over this loader cannot be continued exactly: Endless has neither seek" in caplog.text
    with pytest.raises(forge.DataError, match="This run cannot be continued exactly: Endless has neither seek"):
        live(tmp_path, [often], train=Endless())
    live(tmp_path, [often], train=Endless(), allow_inexact=True)


def test_a_state_is_captured_at_a_boundary_alone() -> None:
    @forge.on("step_end")
    def inside(step: forge.Step) -> None:
        with pytest.raises(RuntimeError, match="can be captured only at the boundary of an update: request a checkp"):
            capture(step.trainer)

    at_a_boundary, taken = noting("save", lambda capture: capture["progress"]["update"])
    fit_tiny([inside, at_a_boundary], max_updates=2)
    assert taken == [2]


def test_state_that_cannot_be_saved_is_refused_by_its_path(tmp_path: Path) -> None:
    class Holds(Counting):
        @forge.hookimpl
        def forge_state_dict(self) -> dict[str, Any]:
            return {"seen": {1, 2}}

    with pytest.raises(forge.CheckpointError, match=r"plugins.*seen.*is a set"):
        live(tmp_path, [Holds(), Checkpoint()])


# ---------------------------------------------------------------------------------------------------------------------
# Which run, which folder


def test_a_folder_with_a_run_in_it_is_not_trained_over(tmp_path: Path) -> None:
    live(tmp_path, [Checkpoint()])
    with pytest.raises(forge.CheckpointError, match="already holds the checkpoints of a run"):
        live(tmp_path, [Checkpoint()], resume=None)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    straight, _ = live(tmp_path / "straight", everything())
    die(tmp_path / "cut", everything(), 7)
    newest = max((tmp_path / "cut" / "checkpoints").glob("update-*"))
    data = bytearray((newest / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "state.safetensors").write_bytes(bytes(data))
    resumed, _ = live(tmp_path / "cut", everything())
    assert_same(resumed, straight)
    assert f"Skipping the checkpoint {newest.name}" in caplog.text


def test_a_run_with_only_broken_checkpoints_is_no_fresh_one(tmp_path: Path) -> None:
    live(tmp_path, [Checkpoint(keep=1)])
    for path in (tmp_path / "checkpoints").glob("update-*"):
        (path / "manifest.json").unlink()
    with pytest.raises(forge.CheckpointError, match="None of the 1 checkpoints"):
        live(tmp_path, [Checkpoint()], max_epochs=9)


def test_one_checkpoint_is_where_a_new_run_begins(tmp_path: Path) -> None:
    straight, _ = live(tmp_path / "first", [Checkpoint(every="2 updates", keep=99)])
    chosen = tmp_path / "first" / "checkpoints" / "update-00000004"
    branch, result = live(tmp_path / "second", [Checkpoint()], resume=chosen)
    assert_same(branch, straight)
    assert result.run_dir == tmp_path / "second"
    assert len(list((tmp_path / "first" / "checkpoints").glob("update-*"))) == 8


# ---------------------------------------------------------------------------------------------------------------------
# Rewind


def test_a_rewind_to_the_newest_checkpoint_skips_as_told(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    @forge.on("step_end", mutates=True)
    def watch(step: forge.Step) -> None:
        seen.append((step.index, step.updated))
        if step.index == 4 and step.updated:
            step.trainer.request_rewind("a test", leave_out=[4])

    _, result = live(tmp_path, [watch, Checkpoint(every="3 updates"), JSONL()], max_epochs=2)
    assert seen == [*[(i, True) for i in range(5)], (3, True), (4, False), *[(i, True) for i in range(5, 10)]]
    assert result.updates == 10
    updates = [line["update"] for line in log_of(tmp_path)]
    assert updates == sorted(updates)


def test_a_run_cut_off_after_a_rewind_ends_the_same(tmp_path: Path) -> None:
    @forge.on("step_end", mutates=True)
    def watch(step: forge.Step) -> None:
        if step.index == 4 and step.updated:
            step.trainer.request_rewind("a test", leave_out=[4])

    resumes(tmp_path, dict, lambda updates: [7], every="3 updates", plugins=lambda: [watch])


def test_a_rewind_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    @forge.on("step_end", mutates=True)
    def watch(step: forge.Step) -> None:
        step.trainer.request_rewind("a test")

    with pytest.raises(forge.CheckpointError, match="No checkpoint to return to"):
        live(tmp_path, [watch, Checkpoint()])


# ---------------------------------------------------------------------------------------------------------------------
# Folders and logs


def test_a_run_stays_in_its_folder_wherever_the_process_goes(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @forge.on("boundary")
    def wander(trainer: forge.Trainer) -> None:
        (empty_folder / "elsewhere").mkdir(exist_ok=True)
        monkeypatch.chdir(empty_folder / "elsewhere")

    live(Path("run"), [wander, Checkpoint(every="2 updates"), JSONL()])
    assert (empty_folder / "run" / "checkpoints" / "update-00000015").is_dir()
    assert not list((empty_folder / "elsewhere").iterdir())


def test_a_folder_that_another_run_has_is_not_swept(tmp_path: Path) -> None:
    live(tmp_path, [Checkpoint()])
    leftover = tmp_path / "checkpoints" / ".update-00000099.tmp-999999999-0123456789abcdef"

    @forge.on("boundary")
    def second(trainer: forge.Trainer) -> None:
        leftover.mkdir(exist_ok=True)
        with pytest.raises(forge.CheckpointError, match="in use by another run in this process"):
            live(tmp_path, [Checkpoint()])
        assert leftover.exists()

    live(tmp_path, [second, Checkpoint()], max_epochs=4)


def test_resuming_a_finished_run_gives_its_result_and_logs_nothing_twice(tmp_path: Path) -> None:
    def again() -> Any:
        plugins = [Schedule("cosine"), Checkpoint(), JSONL()]
        return live(tmp_path, plugins, max_epochs=None, max_updates=7, log_every=3)

    first, expected = again()
    before = log_of(tmp_path)
    task, result = again()
    assert_same(task, first)
    assert result == expected
    assert log_of(tmp_path) == before


def test_true_means_auto(tmp_path: Path) -> None:
    live(tmp_path, [Checkpoint()], max_epochs=1)
    assert live(tmp_path, [Checkpoint()], resume=True)[1].updates == 15


def test_a_schedule_that_grows_with_its_run_is_worth_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live(tmp_path, [Schedule("cosine"), Checkpoint()], max_epochs=2)
    live(tmp_path, [Schedule("cosine"), Checkpoint()], max_epochs=3)
    assert "planned for 10 updates and is now for 15" in caplog.text


class Late(forge.Plugin):
    """Finds out only when it is asked for its state that the last update was bad."""

    asked = False

    @forge.hookimpl
    def forge_state_dict(self, trainer: forge.Trainer) -> None:
        if trainer.progress.update == 10 and not self.asked:
            self.asked = True
            trainer.request_rewind("too late", leave_out=[9])


def test_a_capture_at_the_end_that_finds_it_must_go_back_does_so(tmp_path: Path) -> None:
    _, result = live(tmp_path, [Late(), Checkpoint(every="4 updates")], max_epochs=2)
    assert (result.updates, result.stop_reason) == (10, "max_epochs")
    assert Checkpoints(tmp_path / "checkpoints").all()[-1].name == "update-00000010"


class Breaks(Noisy):
    """One sample cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 44:
            raise OSError("unreadable")
        return super().__getitem__(index)


def test_an_exception_leaves_the_last_checkpoint_valid(tmp_path: Path) -> None:
    with pytest.raises(forge.DataError, match="unreadable"):
        live(tmp_path / "data", [Checkpoint(every="1 update")], train=Loader(Breaks(), 8))
    with pytest.raises(PowerCut):
        live(tmp_path / "hook", [Checkpoint(every="1 update"), cut_at(5)])
    for name, update in (("data", 5), ("hook", 4)):
        found = Checkpoints(tmp_path / name / "checkpoints").newest_valid()
        assert found is not None
        assert found.update == update


def test_a_loader_with_a_place_cannot_serve_two_stages(tmp_path: Path) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(zip(Noisy().x, Noisy().y, strict=True))

    loader = Loader(Stream(), 8)
    with pytest.raises(forge.DataError, match="keeps its position"):
        forge.Trainer(max_epochs=1, plugins=[], run_dir=False).fit(TinyTask(), loader, loader)
