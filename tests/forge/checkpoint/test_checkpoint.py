"""One checkpoint directory: what it consists of, who may read it, and that writing it is atomic at every instant."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forge.checkpoint import Checkpoints, StoredCheckpoint, manifest, temp_names, write_checkpoint
from forge.errors import CheckpointError
from tests.conftest import PROFILE
from tests.forge.checkpoint.test_tree import same
from tests.support import forked

FILES = {"manifest.json", "state.json", "model.safetensors", "state.safetensors"}
CALLS = ("write", "rename", "replace", "mkdir", "unlink", "rmdir", "symlink")
"""The functions of `os` before which a writer is killed: those that change what is there, or what is in it."""
if PROFILE == "full":
    CALLS = (*CALLS, "open", "fsync", "chmod", "fchmod", "close")


def tree_of(number: int) -> dict[str, Any]:
    """A small tree that differs for every number."""
    return {
        "model": {"w": torch.full((3, 2), float(number)), "b": torch.arange(5, dtype=torch.bfloat16)},
        "optimizers": {"state": {"w": {"exp_avg": torch.full((3, 2), number / 7)}}},
        "progress": {"update": number},
    }


def test_a_checkpoint_is_four_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "update-00000001", tree_of(1))
    assert {path.name for path in (tmp_path / "update-00000001").iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000001"]


def test_the_manifest_gives_size_and_sha256_of_every_other_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "it", tree_of(1))
    content = json.loads((tmp_path / "it" / "manifest.json").read_text())
    assert (content["format"], content["version"]) == ("forge-checkpoint", 1)
    for name in FILES - {"manifest.json"}:
        data = (tmp_path / "it" / name).read_bytes()
        assert content["files"][name] == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_the_safetensors_library_reads_the_model(tmp_path: Path) -> None:
    tree = {"model": {"a.w": torch.randn(2, 3).t(), "b": torch.tensor(2.5, dtype=torch.float16), "e": torch.empty(0)}}
    write_checkpoint(tmp_path / "it", tree)
    assert same(dict(sorted(load_file(tmp_path / "it" / "model.safetensors").items())), tree["model"])


def test_weights_are_the_models_tensors_by_name(tmp_path: Path) -> None:
    weight = torch.randn(4)
    model = {"w": weight, "tied": weight, "_extra_state": {"a": 1}}
    write_checkpoint(tmp_path / "it", {"model": model, "state": {"other": torch.zeros(3)}})
    assert same(StoredCheckpoint(tmp_path / "it").weights(), {"w": weight, "tied": weight})


def test_weights_without_a_model_say_so(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "it", {"progress": 1})
    with pytest.raises(CheckpointError, match="holds no model"):
        StoredCheckpoint(tmp_path / "it").weights()


def test_the_update_is_the_number_in_the_name() -> None:
    assert StoredCheckpoint("run/update-00000042").update == 42
    assert StoredCheckpoint("run/update-123456789").update == 123_456_789
    with pytest.raises(CheckpointError, match="not named"):
        _ = StoredCheckpoint("run/mine").update


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        StoredCheckpoint(tmp_path / "update-00000001").verify()


def test_a_newer_format_is_refused_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "VERSION", 7)
        write_checkpoint(tmp_path / "it", tree_of(1))
    with pytest.raises(CheckpointError, match="format version 7"):
        StoredCheckpoint(tmp_path / "it").load()


@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_only_the_owner_can_look_inside_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    old = os.umask(umask)
    try:
        write_checkpoint(tmp_path / "it", tree_of(1))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "it").stat().st_mode) == 0o700
    assert {stat.S_IMODE((tmp_path / "it" / name).stat().st_mode) for name in FILES} == {0o600}


def test_the_folder_is_made_and_is_the_owners_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run" / "checkpoints" / "update-00000001", tree_of(1))
    assert stat.S_IMODE((tmp_path / "run" / "checkpoints").stat().st_mode) == 0o700


# -- errors while writing ---------------------------------------------------------------------------------------------


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, call: int, code: int) -> None:
    """Let the `call`-th use of an os function fail with an error code."""
    real, count = getattr(os, name), iter(range(1, 1_000_000))

    def function(*arguments: Any, **options: Any) -> Any:
        if next(count) == call:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, function)


@pytest.mark.parametrize(
    ("name", "call"),
    [*(("write", n) for n in range(1, 7)), *(("fsync", n) for n in range(1, 7)), ("open", 1), ("mkdir", 1)],
)
@pytest.mark.parametrize("replace", [False, True], ids=["new", "replace"])
def test_a_full_disk_leaves_the_earlier_ones_alone(
    name: str, call: int, replace: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "update-00000001", tree_of(1))
    target = tmp_path / ("update-00000001" if replace else "update-00000002")
    with monkeypatch.context() as patch:
        fail_at(patch, name, call, errno.ENOSPC)
        with pytest.raises(CheckpointError, match=r"No space left on device; [\d,]+ MiB are free") as caught:
            write_checkpoint(target, tree_of(2))
    assert str(target) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000001"]
    assert same(StoredCheckpoint(tmp_path / "update-00000001").load(), tree_of(1))


@pytest.mark.parametrize("call", [1, 2])
def test_a_rename_that_fails_leaves_the_old_one_in_its_place(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "update-00000001", tree_of(1))
    with monkeypatch.context() as patch:
        fail_at(patch, "rename", call, errno.EIO)
        with pytest.raises(CheckpointError, match="Input/output error"):
            write_checkpoint(tmp_path / "update-00000001", tree_of(2))
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000001"]
    assert same(StoredCheckpoint(tmp_path / "update-00000001").load(), tree_of(1))


def test_an_interrupt_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(tmp_path / "update-00000001", tree_of(1))
    assert not list(tmp_path.iterdir())


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
        write_checkpoint(tmp_path / "it", tree_of(3))
    assert same(StoredCheckpoint(tmp_path / "it").load(), tree_of(3))


# -- killed at every system call --------------------------------------------------------------------------------------


def killed_at(call: int, action: Callable[[], None]) -> bool:
    """Run `action` in a child that kills itself before its `call`-th system call; False if it lived to the end.

    A write is cut in half first, so that the file is torn and not just missing.
    """
    child = forked.fork()
    if child == 0:
        gc.disable()  # a collection would copy all memory
        try:
            _die_at(call)
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _die_at(call: int) -> None:
    left = iter(range(call - 1, -1, -1))

    def deadly(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def function(*arguments: Any, **options: Any) -> Any:
            if next(left, -1) == 0:
                if name == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return function

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name), name))


def check_folder(folder: Path) -> None:
    """After a sweep: nothing but checkpoints and links, and each checkpoint is whole."""
    Checkpoints(folder).sweep()
    for path in folder.iterdir():
        assert path.is_symlink() or path in Checkpoints(folder).all(), f"{path.name} was left behind"
    for path in Checkpoints(folder).all():
        StoredCheckpoint(path).verify()


def newest_of(folder: Path) -> dict[str, Any]:
    """What the newest valid checkpoint holds."""
    newest = Checkpoints(folder).newest_valid()
    assert newest is not None
    return newest.load()


def every_kill(tmp_path: Path, prepare: Callable[[Path], Any], action: Callable[[Path], Any]) -> list[Path]:
    """One folder per system call of `action`, as the kill before that call left it; the last one saw no kill."""
    folders: list[Path] = []
    killed = True
    while killed:
        folder = tmp_path / str(len(folders) + 1)
        folder.mkdir()
        prepare(folder)
        folders.append(folder)
        killed = killed_at(len(folders), lambda folder=folder: action(folder))
    assert len(folders) > 3
    return folders


def test_a_new_checkpoint_killed_anywhere_is_there_or_not(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        write_checkpoint(folder / "update-00000001", tree_of(1))

    for folder in every_kill(
        tmp_path, prepare, lambda folder: write_checkpoint(folder / "update-00000002", tree_of(2))
    ):
        published = (folder / "update-00000002").exists()
        check_folder(folder)
        assert same(newest_of(folder), tree_of(2 if published else 1))


def test_a_replacement_killed_anywhere_is_the_old_or_the_new(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        write_checkpoint(folder / "update-00000001", tree_of(1))
        write_checkpoint(folder / "update-00000002", tree_of(2))

    seen = set()
    for folder in every_kill(
        tmp_path, prepare, lambda folder: write_checkpoint(folder / "update-00000002", tree_of(3))
    ):
        check_folder(folder)
        tree = newest_of(folder)
        assert same(tree, tree_of(2)) or same(tree, tree_of(3))
        seen.add(tree["progress"]["update"])
    assert seen == {2, 3}


def test_a_sweep_killed_at_any_system_call_loses_nothing(tmp_path: Path) -> None:
    dead = forked.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)

    def prepare(folder: Path) -> None:
        """As a kill between the two renames of a replacement leaves it."""
        write_checkpoint(folder / "update-00000001", tree_of(1))
        write_checkpoint(folder / f".update-00000002.old-{dead}-{'0' * 12}", tree_of(2))
        write_checkpoint(folder / f".update-00000002.tmp-{dead}-{'0' * 12}", tree_of(3))

    for folder in every_kill(tmp_path, prepare, lambda folder: Checkpoints(folder).sweep()):
        check_folder(folder)
        assert same(newest_of(folder), tree_of(3))


def test_a_removal_killed_anywhere_leaves_all_or_nothing(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        write_checkpoint(folder / "update-00000001", tree_of(1))
        write_checkpoint(folder / "update-00000002", tree_of(2))

    for folder in every_kill(tmp_path, prepare, lambda folder: Checkpoints(folder).remove(folder / "update-00000001")):
        check_folder(folder)
        assert same(newest_of(folder), tree_of(2))


def test_a_pointer_killed_anywhere_points_to_a_checkpoint(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        for number in (1, 2):
            write_checkpoint(folder / f"update-0000000{number}", tree_of(number))
        Checkpoints(folder).point("latest", folder / "update-00000001")

    def action(folder: Path) -> None:
        Checkpoints(folder).point("latest", folder / "update-00000002")
        temp_names.remove(folder / "nothing")  # one system call after the last that counts

    for folder in every_kill(tmp_path, prepare, action):
        check_folder(folder)
        assert StoredCheckpoint.find(folder / "latest").load()["progress"]["update"] in (1, 2)
