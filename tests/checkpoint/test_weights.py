"""Weights out of everything that holds them, and tasks made again from what was saved with them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import forge
from forge.checkpoint import Checkpoints, load_weights, save_weights, tensors
from forge.checkpoint.weights import find_weights, noted_as_average, read_weights
from forge.testing import TinyTask, assert_same_weights, first_difference, fit_tiny
from forge_plugins.checkpoint import Checkpoint
from tests.support.tasks import Classifier


def prefixed(task: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in task.state_dict().items()}


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


# -- whatever holds weights -------------------------------------------------------------------------------------------


def as_safetensors(task: nn.Module, file: Path) -> None:
    save_weights(task, file.with_suffix(".safetensors"))


def as_pt(task: nn.Module, file: Path) -> None:
    torch.save(task.state_dict(), file.with_suffix(".pt"))


def as_old_pth(task: nn.Module, file: Path) -> None:
    torch.save(task.state_dict(), file.with_suffix(".pth"), _use_new_zipfile_serialization=False)


def as_lightning(task: nn.Module, file: Path) -> None:
    content = {
        "epoch": 3,
        "global_step": 100,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": prefixed(task, "model."),
        "optimizer_states": [torch.optim.Adam(task.parameters()).state_dict()],
        "hyper_parameters": {"hidden": 8},
    }
    torch.save(content, file.with_suffix(".ckpt"))


def as_ddp_of_compiled(task: nn.Module, file: Path) -> None:
    torch.save(
        {"model_state_dict": prefixed(task, "module._orig_mod."), "step": torch.tensor(3)}, file.with_suffix(".bin")
    )


@pytest.mark.parametrize("write", [as_safetensors, as_pt, as_old_pth, as_lightning, as_ddp_of_compiled])
def test_weights_are_read_from_every_kind_of_file(tmp_path: Path, write: Callable[[nn.Module, Path], None]) -> None:
    task, fresh = Classifier(), Classifier()
    write(task, tmp_path / "file")
    (file,) = tmp_path.iterdir()
    report = load_weights(fresh, file)
    assert_same_weights(fresh, task)
    assert report.complete
    assert sorted(report.loaded) == sorted(task.state_dict())


def test_names_that_wrappers_made_are_taken_off_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="forge")
    as_ddp_of_compiled(Classifier(), tmp_path / "file")
    report = load_weights(Classifier(), tmp_path / "file.bin")
    assert report.taken_off == ("_orig_mod.", "module.")
    assert "names read without _orig_mod., module." in said(caplog)


def test_names_that_the_task_has_itself_stay(tmp_path: Path) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)

    holder, fresh = Holder(), Holder()
    torch.save(holder.state_dict(), tmp_path / "w.pt")
    assert load_weights(fresh, tmp_path / "w.pt").taken_off == ()
    assert_same_weights(fresh, holder)


def test_a_part_of_a_task_can_be_filled(tmp_path: Path) -> None:
    task, fresh = Classifier(), Classifier()
    torch.save(task.net.state_dict(), tmp_path / "w.pt")
    load_weights(fresh.net, tmp_path / "w.pt")
    assert_same_weights(fresh, task)


def test_equal_weights_give_equal_files(tmp_path: Path) -> None:
    task = Classifier()
    for i in range(8):
        save_weights(task, tmp_path / f"{i}.safetensors")
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1


def test_the_bytes_are_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        done.append(("replace", str(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    save_weights(Classifier(), tmp_path / "w.safetensors")
    (first, file), (second, source), (third, folder) = done
    assert (first, second, third) == ("sync", "replace", "sync")
    assert Path(file) == Path(source)
    assert Path(folder) == tmp_path


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left, others = ".w.safetensors.tmp-999999999-0123456789ab", ".v.safetensors.tmp-999999999-0123456789ab"
    for name in (left, others):
        (tmp_path / name).write_bytes(b"torn")
    save_weights(Classifier(), tmp_path / "w.safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == [others, "w.safetensors"]


# -- what does not fit ------------------------------------------------------------------------------------------------


class Wider(Classifier):
    """As Classifier, with another head and one layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Linear(8, 5)
        self.extra = nn.Linear(2, 2)


def test_a_strict_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    save_weights(Classifier(), tmp_path / "w.safetensors")
    for task in (Wider(), nn.Sequential(nn.Linear(8, 8))):
        before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
        with pytest.raises(forge.TaskError, match="does not fit"):
            load_weights(task, tmp_path / "w.safetensors")
        assert_same_weights(task, before)


class Picky(nn.Linear):
    """Takes its weights, and then refuses them."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super()._load_from_state_dict(state_dict, prefix, *others)
        if (state_dict[f"{prefix}bias"] == 7).all():
            others[-1].append("seven is no bias")


def test_a_module_that_refuses_its_weights_leaves_all_as_it_was(tmp_path: Path) -> None:
    task = nn.Sequential(nn.Linear(2, 2), Picky(2, 2))
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    torch.save({name: torch.full_like(tensor, 7) for name, tensor in before.items()}, tmp_path / "w.pt")
    with pytest.raises(forge.TaskError, match="seven is no bias"):
        load_weights(task, tmp_path / "w.pt")
    assert_same_weights(task, before)


def test_the_error_names_missing_unexpected_and_misshapen(tmp_path: Path) -> None:
    torch.save({**Classifier().state_dict(), "old.bias": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(forge.TaskError) as error:
        load_weights(Wider(), tmp_path / "w.pt")
    for text in (
        "it lacks extra.weight, extra.bias",
        "it has old.bias, which the task lacks",
        "net.2.weight is (3, 8) in the file and (5, 8) in the task",
        "strict=False) loads what matches",
    ):
        assert text in str(error.value)


def test_what_fits_is_loaded_and_the_rest_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, task = Classifier(), Wider()
    torch.save({**source.state_dict(), "old.bias": torch.zeros(1)}, tmp_path / "w.pt")
    head = task.net[2].weight.clone()
    report = load_weights(task, tmp_path / "w.pt", strict=False)
    assert torch.equal(task.net[0].weight, source.net[0].weight)
    assert torch.equal(task.net[2].weight, head)
    assert report.loaded == ("net.0.weight", "net.0.bias")
    assert report.missing == ("extra.weight", "extra.bias")
    assert report.unexpected == ("old.bias",)
    assert report.mismatched == {"net.2.weight": ((3, 8), (5, 8)), "net.2.bias": ((3,), (5,))}
    assert not report.complete
    assert said(caplog) == str(report)
    assert "missing in the file (2):\n    extra.weight\n    extra.bias" in said(caplog)


def test_a_long_report_is_cut(tmp_path: Path) -> None:
    torch.save({f"old.{i}": torch.zeros(1) for i in range(33)}, tmp_path / "w.pt")
    report = load_weights(Classifier(), tmp_path / "w.pt", strict=False)
    assert len(report.unexpected) == 33
    assert "and 13 more" in str(report)


# -- rename -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "rename"),
    [
        ("backbone.net.", {"backbone.": ""}),
        ("backbone.", {"backbone.": "net."}),
        ("", {"": "net."}),
        ("encoder_", {r"^encoder_(\d+)\.": r"net.\1."}),
        ("encoder_", {re.compile(r"^.*_"): "net."}),
        ("a.b.", {"a.": "", "b.": "net."}),
    ],
)
def test_names_are_mapped_by_prefix_or_regular_expression(tmp_path: Path, written: str, rename: Any) -> None:
    task, fresh = Classifier(), Classifier()
    torch.save(prefixed(task.net, written), tmp_path / "w.pt")
    assert load_weights(fresh, tmp_path / "w.pt", rename=rename).complete
    assert_same_weights(fresh, task)


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"modle.": ""}, r"no name in .*w.pt matches 'modle.'. It has net.0.weight"),
        ({r"^net\.\d\.": "net."}, r"net.0.weight and net.2.weight of .* would both become net.weight"),
        ({"^net(": ""}, r"'\^net\(' to '' is not a valid regular expression"),
        ({r"^net": r"\3"}, "not a valid regular expression"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(tmp_path: Path, rename: Any, message: str) -> None:
    torch.save(Classifier().state_dict(), tmp_path / "w.pt")
    with pytest.raises(forge.TaskError, match=message):
        load_weights(Classifier(), tmp_path / "w.pt", strict=False, rename=rename)


@given(
    st.dictionaries(st.sampled_from(["a.", "b.", "a.b.", "^a", "^.", ""]), st.sampled_from(["", "a.", "c"]), max_size=3)
)
def test_renaming_never_loses_a_tensor(rename: dict[str, str]) -> None:
    from forge.checkpoint.foreign import renamed

    names = ["".join(parts) for parts in itertools.product(["a.", "b."], ["a.", "b.", ""], ["x", "y"])]
    try:
        mapped = renamed(names, rename, "file")
    except forge.TaskError:
        return
    assert list(mapped) == names
    assert len(set(mapped.values())) == len(names)


# -- files that must not be trusted -----------------------------------------------------------------------------------


class Runs:
    """What runs when it is unpickled the careless way."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.file}",))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path: Path, zipped: bool) -> None:
    proof = tmp_path / "ran"
    content = {"state_dict": Classifier().state_dict(), "callbacks": Runs(proof)}
    torch.save(content, tmp_path / "w.ckpt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(forge.CheckpointError, match=r"holds more than weights.*posix.system.*save the weights alone"):
        load_weights(Classifier(), tmp_path / "w.ckpt")
    assert not proof.exists()
    pickle.loads(pickle.dumps(Runs(proof)))  # the bait works
    assert proof.exists()


def test_the_environment_cannot_switch_the_safety_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"state_dict": {}, "x": Runs(tmp_path / "ran")}, tmp_path / "w.pt")
    with pytest.raises(forge.CheckpointError, match="holds more than weights"):
        load_weights(Classifier(), tmp_path / "w.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.pt", b"", "or it is damaged"),
        ("w.pt", b"garbage", "not a file of torch.save"),
        ("w.pt", b"PK\x03\x04 not a zip", "not a complete file of torch.save"),
        ("w.safetensors", b"garbage", "not a safetensors file, or it is damaged"),
        ("w.safetensors", b"\xff" * 64, "not a safetensors file, or it is damaged"),
        ("w.unknown", b"garbage", "recognised by their suffix: .pt, .pth, .ckpt, .bin"),
    ],
)
def test_what_is_no_weights_file_is_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(forge.CheckpointError, match=rf"{name}.*{message}"):
        load_weights(Classifier(), tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list, not weights by name"),
        ({"epoch": 3, "config": {"a": 1}}, "It has epoch, config"),
        ({}, "It has nothing"),
    ],
)
def test_a_file_without_weights_says_what_it_has(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(forge.CheckpointError, match=message):
        load_weights(Classifier(), tmp_path / "w.pt")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(forge.TaskError, match=r"no weights file at .*nowhere.pt"):
        load_weights(Classifier(), tmp_path / "nowhere.pt")
    with pytest.raises(forge.TaskError, match="no valid checkpoint beside it"):
        load_weights(Classifier(), tmp_path)


@given(st.data())
def test_a_changed_byte_never_crashes_the_process(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder, write = tmp_path_factory.mktemp("w"), data.draw(st.sampled_from([as_safetensors, as_pt, as_old_pth]))
    write(Classifier(), folder / "file")
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes(content[: data.draw(st.integers(1, len(content)))]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(forge.CheckpointError, forge.TaskError):
            load_weights(Classifier(), file, strict=False)


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
    assert_same_weights(at_10, finished)


def test_the_optimizers_state_is_not_loaded_for_the_weights(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    read_tensors = tensors.read_tensors

    def watched(stream: Any, header: Any, what: str) -> Any:
        read.append(Path(what).name)
        return read_tensors(stream, header, what)

    monkeypatch.setattr(tensors, "read_tensors", watched)
    task = TinyTask(seed=7)
    load_weights(task, run / "checkpoints" / "update-00000010")
    assert set(read) == {"model.safetensors"}
    assert_same_weights(task, TinyTask.from_checkpoint(run))


# -- from_checkpoint --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "weights.safetensors", "checkpoints", "checkpoints/latest"])
def test_a_task_is_made_again_as_it_was(tmp_path: Path, place: str) -> None:
    task, _ = fit_tiny([Checkpoint()], task=TinyTask(seed=3, dropout=0.4, lr=0.01), run_dir=tmp_path)
    again = TinyTask.from_checkpoint(tmp_path / place)
    assert_same_weights(again, task)
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
    assert_same_weights(again, task)


def test_arguments_that_are_not_plain_data_are_asked_for_by_name(tmp_path: Path) -> None:
    save_weights(Odd(3, (4,), layer=nn.ReLU(), flag=False), tmp_path / "w.safetensors")
    with pytest.raises(forge.TaskError, match=r"does not hold layer of Odd.*from_checkpoint\(path, layer=\.\.\.\)"):
        Odd.from_checkpoint(tmp_path / "w.safetensors")
    layer = nn.Tanh()
    assert Odd.from_checkpoint(tmp_path / "w.safetensors", layer=layer).init_args["layer"] is layer


def test_a_subclass_or_a_renamed_class_may_load_the_weights(run: Path) -> None:
    class Renamed(TinyTask):
        pass

    assert_same_weights(Renamed.from_checkpoint(run), TinyTask.from_checkpoint(run))


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
    assert_same_weights(Classifier.from_checkpoint(tmp_path / "w.ckpt", hidden=5), task)


def test_the_base_class_makes_no_task(run: Path) -> None:
    with pytest.raises(forge.TaskError, match="call it on the class that was saved"):
        forge.TaskModule.from_checkpoint(run)


def test_a_task_is_made_on_the_cpu_despite_the_default_device(run: Path) -> None:
    with torch.device("meta"):
        task = TinyTask.from_checkpoint(run)
    assert {tensor.device.type for tensor in task.state_dict().values()} == {"cpu"}
    assert_same_weights(task, TinyTask.from_checkpoint(run))


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
    assert_same_weights(loaded, expected)
    assert_same_weights(TinyTask.from_checkpoint(tmp_path, weights="polyak"), expected)


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
    assert_same_weights(TinyTask.from_checkpoint(checkpoint), task)


def test_an_average_of_another_shape_is_a_misfit_by_name(tmp_path: Path) -> None:
    checkpoint, _ = saved_with(tmp_path, {"weights": {"net.0.weight": torch.ones(2, 2)}})
    with pytest.raises(forge.TaskError, match=r"net\.0\.weight is \(2, 2\) in the file"):
        load_weights(TinyTask(), checkpoint, weights="polyak")


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


def test_only_the_average_is_read_out_of_a_checkpoints_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, _ = saved_with(tmp_path, {"weights": {"net.0.weight": torch.ones(8, 6)}})
    read: list[str] = []
    read_tensors = tensors.read_tensors

    def watched(stream: Any, header: Any, what: str) -> Any:
        read.extend(name for name in header.entries if Path(what).name == "state.safetensors")
        return read_tensors(stream, header, what)

    monkeypatch.setattr(tensors, "read_tensors", watched)
    load_weights(TinyTask(), checkpoint, weights="polyak")
    assert read == ["plugins.polyak.weights.net.0.weight"]


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
