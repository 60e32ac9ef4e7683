"""Weights and tasks from a run folder: which checkpoint it stands for, and the averages in it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import forge
from forge.checkpoint import Checkpoints, StoredCheckpoint, load_weights, save_weights, tensors
from forge.checkpoint.weights import find_weights, noted_as_average, read_weights
from forge.testing import TinyTask, assert_same, first_difference, fit_tiny
from forge_plugins.checkpoint import Checkpoint
from tests.support.tasks import Classifier
from tests.support.weights_kit import Wider, as_lightning

# -- what a run folder stands for -------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with checkpoints after 5 and 10 updates."""
    fit_tiny([Checkpoint()], run_dir=tmp_path / "run")
    return tmp_path / "run"


def test_a_finished_run_stands_for_its_weights_file(run: Path) -> None:
    assert find_weights(run) == run / "weights.safetensors"


def test_a_continued_run_stands_for_its_newest_checkpoint(run: Path) -> None:
    old = (run / "weights.safetensors").read_bytes()
    fit_tiny([Checkpoint()], run_dir=run, max_epochs=3, resume="auto")
    assert find_weights(run) == run / "weights.safetensors"
    (run / "weights.safetensors").write_bytes(old)  # as if it had been killed before the end
    assert find_weights(run).name == "update-00000015"


def test_damaged_checkpoints_leave_the_weights_file_in_its_place(run: Path) -> None:
    old = (run / "weights.safetensors").read_bytes()
    fit_tiny([Checkpoint(keep=3)], run_dir=run, max_epochs=3, resume="auto")
    (run / "weights.safetensors").write_bytes(old)  # after 10 updates
    folder = Checkpoints(run / "checkpoints")
    (folder.path(15) / "model.safetensors").write_bytes(b"")
    folder.remove(folder.path(10))
    assert [path.name for path in folder.all()] == ["update-00000005", "update-00000015"]
    assert find_weights(run) == run / "weights.safetensors"


def test_an_unfinished_run_stands_for_its_newest_checkpoint(run: Path) -> None:
    (run / "weights.safetensors").unlink()
    assert find_weights(run).name == "update-00000010"
    assert find_weights(run / "checkpoints").name == "update-00000010"
    (Checkpoints(run / "checkpoints").path(10) / "model.safetensors").write_bytes(b"")
    assert find_weights(run).name == "update-00000005"


def test_foreign_weights_stand_before_checkpoints(run: Path) -> None:
    save_file(TinyTask().state_dict(), run / "weights.safetensors")
    assert find_weights(run) == run / "weights.safetensors"


def test_a_checkpoint_and_a_pointer_to_it_stand_for_themselves(run: Path) -> None:
    at_5, at_10 = TinyTask(seed=7), TinyTask(seed=7)
    load_weights(at_5, run / "checkpoints" / "update-00000005")
    load_weights(at_10, run / "checkpoints" / "latest")
    assert first_difference(at_5, at_10)
    finished = TinyTask(seed=7)
    load_weights(finished, run)
    assert_same(at_10, finished)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The tensors that are read from now on, by file."""
    found: dict[str, list[str]] = {}
    read_tensors = tensors.read_tensors

    def watched(stream: Any, header: Any, what: str) -> Any:
        found.setdefault(Path(what).name, []).extend(header.entries)
        return read_tensors(stream, header, what)

    monkeypatch.setattr(tensors, "read_tensors", watched)
    return found


def test_the_optimizers_state_is_not_loaded_for_the_weights(run: Path, read: dict[str, list[str]]) -> None:
    task = TinyTask(seed=7)
    load_weights(task, run / "checkpoints" / "update-00000010")
    assert list(read) == ["model.safetensors"]
    assert_same(task, TinyTask.from_checkpoint(run))


def test_a_run_stands_for_its_best_checkpoint_where_that_is_asked_for(tmp_path: Path) -> None:
    best = Checkpoint(every="1 update", best={"monitor": "train/loss", "mode": "max", "keep": 1})  # not the last one
    fit_tiny([best], max_updates=4, run_dir=tmp_path)
    kept = StoredCheckpoint((tmp_path / "checkpoints" / "best").resolve())
    for path, weights in ((tmp_path, "best"), (f"{tmp_path}:best", None), (f"{tmp_path}:best", "best")):
        task = TinyTask(seed=7)
        assert forge.load_weights(task, path, weights=weights).source == kept.path
        assert_same(task, kept.weights())
    assert_same(forge.load(f"{tmp_path}:best", TinyTask), kept.weights())


def test_a_run_without_a_best_checkpoint_says_how_to_keep_one(run: Path) -> None:
    with pytest.raises(forge.TaskError, match=r"no best checkpoint. Train with checkpoint.best="):
        forge.load_weights(TinyTask(), run, weights="best")
    with pytest.raises(forge.TaskError, match="no run folder"):
        forge.load_weights(TinyTask(), run / "nothing:best")


# -- from_checkpoint --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "weights.safetensors", "checkpoints", "checkpoints/latest"])
def test_a_task_is_made_again_as_it_was(tmp_path: Path, place: str) -> None:
    task, _ = fit_tiny([Checkpoint()], task=TinyTask(seed=3, dropout=0.4, lr=0.01), run_dir=tmp_path)
    again = TinyTask.from_checkpoint(tmp_path / place)
    assert_same(again, task)
    assert again.init_args == {"seed": 3, "dropout": 0.4, "lr": 0.01}


def test_overrides_win_over_what_was_saved(run: Path) -> None:
    assert TinyTask.from_checkpoint(run, lr=0.5).init_args == {"seed": 0, "dropout": 0.2, "lr": 0.5}
    with pytest.raises(forge.TaskError, match=r"TinyTask takes no argument 'dropot'\. Did you mean 'dropout'"):
        TinyTask.from_checkpoint(run, dropot=0.5)


def test_the_random_numbers_of_the_caller_are_left_alone(run: Path) -> None:
    class Draws(TinyTask):
        def __init__(self, seed: int = 0, dropout: float = 0.2, lr: float = 0.1):
            super().__init__(seed, dropout, lr)
            self.drawn = (torch.rand(1), np.random.rand(), random.random())

    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), np.random.rand(), random.random()

    for expected in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        if not expected:
            Draws.from_checkpoint(run)
            first = draw()
        else:
            assert draw() == first  # pyright: ignore[reportPossiblyUnboundVariable]


class Odd(forge.TaskModule):
    """Arguments of every kind."""

    def __init__(self, first: int, /, shape: tuple[int, ...], *sizes: int, layer: Any = None, flag: bool, **more: Any):
        super().__init__()
        self.layer = nn.Linear(first, 2)


@pytest.mark.parametrize("sizes", [(), (7, 8)])
def test_arguments_of_every_kind_are_given_as_they_were(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    task = Odd(3, (4, 5), *sizes, flag=True, other="x")
    save_weights(task, tmp_path / "w.safetensors")
    again = Odd.from_checkpoint(tmp_path / "w.safetensors")
    assert again.init_args == task.init_args
    assert_same(again, task)


def test_arguments_that_are_not_plain_data_are_asked_for_by_name(tmp_path: Path) -> None:
    save_weights(Odd(3, (4,), layer=nn.ReLU(), flag=False), tmp_path / "w.safetensors")
    with pytest.raises(forge.TaskError, match=r"does not hold layer of Odd.*from_checkpoint\(path, layer=\.\.\.\)"):
        Odd.from_checkpoint(tmp_path / "w.safetensors")
    layer = nn.Tanh()
    assert Odd.from_checkpoint(tmp_path / "w.safetensors", layer=layer).init_args["layer"] is layer


def test_a_subclass_or_a_renamed_class_may_load_the_weights(run: Path) -> None:
    class Renamed(TinyTask):
        pass

    assert_same(Renamed.from_checkpoint(run), TinyTask.from_checkpoint(run))


def test_another_classs_checkpoint_is_refused_by_both_names(tmp_path: Path) -> None:
    class Other(Wider):
        def __init__(self, hidden: int = 8, lr: float = 0.1):
            super().__init__()

    save_weights(Classifier(), tmp_path / "w.safetensors")
    with pytest.raises(forge.TaskError, match=r"does not fit Other.*saved by the task Classifier"):
        Other.from_checkpoint(tmp_path / "w.safetensors")
    with pytest.raises(forge.TaskError, match=r"saved by a Classifier made with hidden=8, which Wider does not take"):
        Wider.from_checkpoint(tmp_path / "w.safetensors")
    partly = Other.from_checkpoint(tmp_path / "w.safetensors", strict=False)
    assert partly.net[2].out_features == 5


def test_a_foreign_file_leaves_the_arguments_to_the_caller(tmp_path: Path) -> None:
    task = Classifier(hidden=5)
    as_lightning(task, tmp_path / "w")
    assert_same(Classifier.from_checkpoint(tmp_path / "w.ckpt", hidden=5), task)


def test_the_base_class_makes_no_task(run: Path) -> None:
    with pytest.raises(forge.TaskError, match="call it on the class that was saved"):
        forge.TaskModule.from_checkpoint(run)


def test_a_task_is_made_on_the_cpu_despite_the_default_device(run: Path) -> None:
    with torch.device("meta"):
        task = TinyTask.from_checkpoint(run)
    assert {tensor.device.type for tensor in task.state_dict().values()} == {"cpu"}
    assert_same(task, TinyTask.from_checkpoint(run))


def test_state_that_is_no_tensor_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    class Counting(TinyTask):
        def __init__(self, start: int = 0):
            super().__init__()
            self.count = start

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    with pytest.warns(UserWarning, match="omits the extra state"):
        task, _ = fit_tiny([Checkpoint()], task=Counting(5), run_dir=tmp_path)
    again = Counting.from_checkpoint(tmp_path / "checkpoints" / "latest", start=0)
    assert again.count == 5
    assert torch.equal(again.net[0].weight, task.state_dict()["net.0.weight"])


# -- averages ---------------------------------------------------------------------------------------------------------


class KeepsWeights(forge.Plugin):
    """A third party's average, of one layer: it knows nothing but the convention."""

    def __init__(self, state: dict[str, Any]):
        super().__init__()
        self.name, self.state = "polyak", state

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return self.state

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None: ...


def saved_with(folder: Path, state: dict[str, Any]) -> tuple[Path, forge.TaskModule]:
    task, _ = fit_tiny([KeepsWeights(state), Checkpoint()], run_dir=folder)
    return folder / "checkpoints" / "latest", task


def test_an_average_is_offered_by_the_tasks_names(tmp_path: Path) -> None:
    halves = torch.full((8, 6), 0.5, dtype=torch.float64)
    checkpoint, task = saved_with(tmp_path, {"weights": {"net.0.weight": halves}, "more": 1})
    loaded = TinyTask(seed=7)
    load_weights(loaded, checkpoint, weights="polyak")
    expected = {**task.state_dict(), "net.0.weight": halves.float()}
    assert_same(loaded, expected)
    assert_same(TinyTask.from_checkpoint(tmp_path, weights="polyak"), expected)


@pytest.mark.parametrize(
    "weights",
    [
        {"classes": torch.ones(3)},
        {"net.0.weight": torch.ones(8, 6), "classes": torch.ones(3)},
        {"net.0.weight": 0.5},
        [torch.ones(3)],
        0.5,
    ],
)
def test_weights_of_another_kind_are_no_average(tmp_path: Path, weights: Any) -> None:
    checkpoint, task = saved_with(tmp_path, {"weights": weights})
    with pytest.raises(forge.CheckpointError, match=r"holds no average called 'polyak'\. No plugin"):
        load_weights(TinyTask(), checkpoint, weights="polyak")
    assert_same(TinyTask.from_checkpoint(checkpoint), task)


def test_complex_weights_are_averaged_as_what_they_are(tmp_path: Path) -> None:
    class Spectral(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def training_step(self, batch: Any) -> Any:
            metrics = super().training_step(batch)
            return {**metrics, "loss": metrics["loss"] + self.filter.abs().square().sum()}

        validation_step = TinyTask.training_step

    mean = torch.tensor([1 + 2j, 0, 3j, 4])
    task, _ = fit_tiny(
        [KeepsWeights({"weights": {"filter": mean}}), Checkpoint()], task=Spectral(), run_dir=tmp_path / "run"
    )
    loaded = Spectral()
    load_weights(loaded, tmp_path / "run" / "checkpoints" / "latest", weights="polyak")
    assert torch.equal(loaded.filter, mean.to(torch.complex64))
    assert torch.equal(loaded.net[0].weight, task.state_dict()["net.0.weight"])


def test_only_the_average_is_read_out_of_a_checkpoints_state(tmp_path: Path, read: dict[str, list[str]]) -> None:
    checkpoint, _ = saved_with(tmp_path, {"weights": {"net.0.weight": torch.ones(8, 6)}})
    load_weights(TinyTask(), checkpoint, weights="polyak")
    assert read["state.safetensors"] == ["plugins.polyak.weights.net.0.weight"]


def test_a_weights_file_says_whose_average_it_is(tmp_path: Path) -> None:
    task = TinyTask()
    with noted_as_average("polyak"):
        save_weights(task, tmp_path / "average.safetensors")
    save_weights(task, tmp_path / "plain.safetensors")
    assert read_weights(tmp_path / "average.safetensors").average == "polyak"
    assert read_weights(tmp_path / "average.safetensors", "polyak").average == "polyak"
    assert read_weights(tmp_path / "plain.safetensors", "raw").average is None
    with pytest.raises(forge.TaskError, match=r"average\.safetensors holds the average of the plugin 'polyak'"):
        read_weights(tmp_path / "average.safetensors", "raw")
    with pytest.raises(forge.TaskError, match=r"plain\.safetensors holds the trained weights.*average 'ema'"):
        read_weights(tmp_path / "plain.safetensors", "ema")


def test_a_foreign_file_is_what_was_trained(tmp_path: Path) -> None:
    torch.save(TinyTask().state_dict(), tmp_path / "w.pt")
    load_weights(TinyTask(seed=7), tmp_path / "w.pt", weights="raw")
    with pytest.raises(forge.TaskError, match=r"w\.pt holds the trained weights"):
        load_weights(TinyTask(), tmp_path / "w.pt", weights="ema")


def test_a_task_with_an_argument_called_weights_is_made_again(tmp_path: Path) -> None:
    class Pretrained(TinyTask):
        def __init__(self, weights: str = "imagenet"):
            super().__init__()
            self.weights = weights

    save_weights(Pretrained("none"), tmp_path / "w.safetensors")
    assert Pretrained.from_checkpoint(tmp_path / "w.safetensors").weights == "none"
