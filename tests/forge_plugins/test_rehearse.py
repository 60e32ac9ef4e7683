"""A run is rehearsed at its first checkpoint: a second process continues it, and must end in the same bits."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import forge
from forge.errors import CheckpointError
from forge.runs.folder import RunFolder
from forge.snapshot.evidence import UNSAVED, WEIGHTS
from forge.testing import TinyTask, fit_tiny
from forge.twin.record import Record
from forge_plugins import Checkpoint, Rehearse
from forge_plugins.rehearse.verdict import judged
from tests.support.patience import until

EXACT = "Resume rehearsed: a second process continued this run bit for bit."


@pytest.fixture(autouse=True)
def _rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_REHEARSE")


def live(folder: Path, task: forge.TaskModule, rehearse: Rehearse | None = None, **options: Any) -> None:
    """Fit ten updates with a checkpoint every four, and wait for the verdict."""
    saver = Checkpoint(every="4 updates", keep="all")
    given = {"max_updates": 10, "max_epochs": None, "validate_every": None, "run_dir": folder, **options}
    fit_tiny([rehearse or Rehearse(strict=True), saver], task=task, **given)


def resume_of(folder: Path) -> str:
    return str(RunFolder(folder).card["resume"])


# -- what a resumed run would not have --------------------------------------------------------------------------------


class Scaled(TinyTask):
    """Scales its loss by a number that changes with every update, and that a test keeps somewhere."""

    def next(self) -> float:
        raise NotImplementedError

    def training_step(self, batch: Any) -> Any:
        return {"loss": super().training_step(batch)["loss"] * self.next()}


class InAttribute(Scaled):
    count = 0

    def next(self) -> float:
        self.count += 1
        return float(self.count)


class OnClass(Scaled):
    total = 0

    def next(self) -> float:
        type(self).total += 1
        return float(self.total)


class InClosure(Scaled):
    def __init__(self) -> None:
        super().__init__()
        calls = [0]

        def count() -> float:
            calls[0] += 1
            return float(calls[0])

        self.next = count


class InGenerator(Scaled):
    """In a frame that nothing can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = self.make()

    def make(self) -> Iterator[float]:
        rate = 1.0
        while True:
            yield rate
            rate += 1

    def next(self) -> float:
        return next(self.rates)


class Teacher(Scaled):
    """Has a random teacher that is no part of the task."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [torch.rand(1, generator=torch.Generator().manual_seed(len(os.listdir())))]

    def next(self) -> float:
        self.teachers[0].mul_(1.5)
        return float(self.teachers[0])


class ByHand(Scaled):
    """Keeps a schedule of torch's by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def next(self) -> float:
        self.optimizer.step()
        self.schedule.step()
        return float(self.schedule.get_last_lr()[0])


class Spawns(Scaled):
    """Its generator's children are counted by its seed sequence, which no state of the generator shows."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(1)

    def next(self) -> float:
        return float(self.rng.spawn(1)[0].random())


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (InAttribute, "task.count"),
        (OnClass, "(class OnClass).total"),
        (InClosure, "task.next.calls[0]"),
        (InGenerator, "running generators"),
        (Teacher, "task.teachers[0]"),
        (ByHand, "task.schedule"),
    ],
)
def test_a_run_that_cannot_be_resumed_is_told_with_the_place(tmp_path: Path, kind: type[Scaled], named: str) -> None:
    OnClass.total = 0
    with pytest.raises(CheckpointError) as caught:
        live(tmp_path, kind())
    text = str(caught.value)
    assert text.startswith("A resumed run differs from this one at update 5, in ")
    assert named in text
    assert "get_extra_state" in text
    assert "rehearse.strict is set, so the run stops here." in text
    assert resume_of(tmp_path).startswith("differs: at update 5")


def test_by_default_a_difference_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forge_plugins.rehearse.PATIENCE", 100)
    live(tmp_path, InAttribute(), Rehearse())
    [record] = [r for r in caplog.records if "differs from this one" in r.getMessage()]
    assert record.levelname == "WARNING"
    assert record.finding == "state_not_saved"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("kind", [TinyTask, Spawns])
def test_a_run_that_can_be_resumed_is_told_so(
    tmp_path: Path, kind: type[TinyTask], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forge")
    live(tmp_path, kind())
    assert EXACT in caplog.text
    assert resume_of(tmp_path) == "rehearsed, exact"
    assert "| resume | rehearsed, exact |" in (tmp_path / "card.md").read_text()
    assert not (tmp_path / ".rehearsal").exists()


class Counts(TinyTask):
    """Counts for nobody."""

    seen = 0

    def training_step(self, batch: Any) -> Any:
        self.seen += 1
        return super().training_step(batch)


def test_what_drifts_without_effect_is_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    live(tmp_path, Counts())
    assert "It did not have task.seen as this run has, and did not need it yet." in caplog.text
    assert resume_of(tmp_path) == "rehearsed, exact: task.seen is not restored"


class Unlike(Scaled):
    def next(self) -> float:
        return 1 + int.from_bytes(os.urandom(2)) / 1e9


def test_what_no_two_processes_repeat_is_not_blamed_on_the_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live(tmp_path, Unlike())
    assert "Two processes that continue this run differ from each other" in caplog.text
    assert resume_of(tmp_path).startswith("not deterministic: ")


class Stamps(TinyTask):
    """Notes the time, which differs in every process and matters to none."""

    def training_step(self, batch: Any) -> Any:
        self.now = time.monotonic_ns()
        return super().training_step(batch)


def test_what_differs_in_every_process_without_effect_is_not_mentioned(tmp_path: Path) -> None:
    live(tmp_path, Stamps())
    assert resume_of(tmp_path) == "rehearsed, exact"


# -- the run is not disturbed -----------------------------------------------------------------------------------------


class Lines(Dataset):
    """Reads samples from a file that it holds open: the position is the process's."""

    def __init__(self, file: Path):
        self.file = io.FileIO(file)
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        first = os.lseek(self.file.fileno(), 0, os.SEEK_CUR)
        self.seen.append(first)
        sample = torch.frombuffer(bytearray(self.file.read(24)), dtype=torch.float32)
        if len(sample) < 6:
            self.file.seek(0)
            return self[index]
        return sample, 1


class Shares(TinyTask):
    """Writes what it does into memory that it shares, a file, and a class."""

    steps = 0

    def __init__(self, file: Path):
        super().__init__()
        self.memory, self.file = torch.zeros(1).share_memory_(), file.open("a")
        self.lock, self.values = multiprocessing.Lock(), multiprocessing.Array("i", 1)

    def training_step(self, batch: Any) -> Any:
        self.memory += 1
        with self.lock, self.values.get_lock():
            self.values[0] += 1
        Shares.steps += 1
        print(Shares.steps, file=self.file, flush=True)
        return super().training_step(batch)


def test_the_second_process_shares_nothing_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_plugins.rehearse.PATIENCE", 100)
    (tmp_path / "data").write_bytes(np.random.default_rng(0).random(40 * 6).astype("float32").tobytes())
    ends: dict[str, list[Tensor]] = {}
    for name in ("alone", "rehearsed"):
        if name == "alone":
            monkeypatch.setenv("FORGE_REHEARSE", "off")
        else:
            monkeypatch.delenv("FORGE_REHEARSE")
        Shares.steps = 0
        task, data = Shares(tmp_path / f"{name}.txt"), Lines(tmp_path / "data")
        given: Any = DataLoader(data, batch_size=4)
        live(tmp_path / name, task, Rehearse(), train=given, allow_inexact=True)
        ends[name] = [p.detach().clone() for p in task.parameters()]
        assert (task.memory.item(), task.values[0], Shares.steps) == (10, 10, 10)
        assert (tmp_path / f"{name}.txt").read_text().split() == [str(i) for i in range(1, 11)]
        assert data.seen[:40] == [24 * i for i in range(40)]
    assert all(map(torch.equal, ends["alone"], ends["rehearsed"]))
    assert resume_of(tmp_path / "rehearsed").startswith("differs: ")  # the position in the file is in no checkpoint


def test_no_process_is_left(tmp_path: Path) -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    resource_tracker.ensure_running()  # Python's own, which the first user of shared memory starts for good
    before = set(children.read_text().split())
    live(tmp_path / "one", TinyTask(), Rehearse())
    with pytest.raises(RuntimeError):
        live(tmp_path / "other", Breaks(), Rehearse())
    # one that has ended is there until a thread has waited for it, which a busy machine may put off
    until(lambda: set(children.read_text().split()) <= before, "a process is left")


class Breaks(TinyTask):
    def training_step(self, batch: Any) -> Any:
        raise RuntimeError("on purpose")


# -- when not ---------------------------------------------------------------------------------------------------------


def test_a_run_that_is_not_rehearsed_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forge_plugins.rehearse.second_process.can_fork", lambda: False)
    caplog.set_level(logging.INFO, "forge")
    live(tmp_path, TinyTask())
    assert "not rehearsed: a process cannot be copied on this system. forge verify-resume tells." in caplog.text
    assert resume_of(tmp_path) == "not rehearsed: a process cannot be copied on this system"


def test_a_run_that_ends_first_says_so_in_its_card_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forge")
    live(tmp_path, TinyTask(), max_updates=5)
    assert resume_of(tmp_path) == "not rehearsed: the run ended first"
    assert "rehearsed" not in caplog.text


def test_switched_off_it_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_REHEARSE", "off")
    live(tmp_path, InAttribute())
    assert RunFolder(tmp_path).card["resume"] is None
    assert not (tmp_path / ".rehearsal").exists()


def test_a_second_process_that_fails_is_quoted(tmp_path: Path) -> None:
    live(tmp_path, OnlyHere())
    assert resume_of(tmp_path) == "not rehearsed: the second process failed: RuntimeError: only here"


class OnlyHere(TinyTask):
    """Cannot run in another process."""

    def __init__(self) -> None:
        super().__init__()
        self.process = os.getpid()

    def training_step(self, batch: Any) -> Any:
        if os.getpid() != self.process:
            raise RuntimeError("only here")
        return super().training_step(batch)


def test_a_resume_that_would_be_refused_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"This run cannot be resumed: .*does not fit Refuses: not again"):
        live(tmp_path, Refuses())
    assert resume_of(tmp_path).startswith("refused: ")


class Refuses(TinyTask):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.on_load)

    def on_load(self, *_: Any) -> None:
        raise RuntimeError("not again")


# -- the command line -------------------------------------------------------------------------------------------------

TASK = """
import forge
from forge.testing import TinyTask, tiny_batches

class Mine(TinyTask): ...

def data():
    return forge.data.Splits(train=tiny_batches())
"""


def test_from_the_command_line_too(tmp_path: Path, run_forge: Any) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    words = ["trainer.max_updates=8", "checkpoint.every=4 updates", "rehearse.strict=true"]
    done = run_forge("fit", f"{tmp_path / 'mine.py'}:Mine", "--run-dir", str(tmp_path / "run"), *words)
    said = json.loads((tmp_path / "run" / "card.json").read_text())["resume"]
    assert (done.returncode, said) == (0, "rehearsed, exact")


# -- the verdict ------------------------------------------------------------------------------------------------------


def test_a_value_that_two_rehearsals_have_differently_is_no_cause() -> None:
    def marks(weights: str, **unsaved: str) -> dict[str, Any]:
        record = Record()
        for name, value in unsaved.items():
            record.mark(name, value, 6, UNSAVED, aside=True)
        record.mark("w", weights, 6, WEIGHTS)
        return {"marks": record.marks}

    own = Record.of(marks("a", count="5", time="1")["marks"])
    assert judged(own, [marks("b", count="1", time="2")]) is None  # another one must tell
    found = judged(own, [marks("b", count="1", time="2"), marks("b", count="1", time="3")])
    assert str(found) == "differs: at update 6, in a value outside the task's state (count)"
    assert str(judged(own, [marks("a", count="5", time="2"), marks("a", count="5", time="3")])) == "rehearsed, exact"
