"""Weights out of everything that holds them, and tasks made again from what was saved with them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import forge
from forge.checkpoint import load_weights, save_weights
from forge.testing import assert_same
from tests.support.tasks import Classifier
from tests.support.weights_kit import Wider, as_lightning, prefixed


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


# -- whatever holds weights -------------------------------------------------------------------------------------------


def as_safetensors(task: nn.Module, file: Path) -> None:
    save_weights(task, file.with_suffix(".safetensors"))


def as_pt(task: nn.Module, file: Path) -> None:
    torch.save(task.state_dict(), file.with_suffix(".pt"))


def as_old_pth(task: nn.Module, file: Path) -> None:
    torch.save(task.state_dict(), file.with_suffix(".pth"), _use_new_zipfile_serialization=False)


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
    assert_same(fresh, task)
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
    assert_same(fresh, holder)


def test_a_part_of_a_task_can_be_filled(tmp_path: Path) -> None:
    task, fresh = Classifier(), Classifier()
    torch.save(task.net.state_dict(), tmp_path / "w.pt")
    load_weights(fresh.net, tmp_path / "w.pt")
    assert_same(fresh, task)


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


def test_a_strict_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    save_weights(Classifier(), tmp_path / "w.safetensors")
    for task in (Wider(), nn.Sequential(nn.Linear(8, 8))):
        before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
        with pytest.raises(forge.TaskError, match="does not fit"):
            load_weights(task, tmp_path / "w.safetensors")
        assert_same(task, before)


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
    assert_same(task, before)


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
    assert_same(fresh, task)


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
