"""The folder of a run's checkpoints: what counts as one, which is the newest valid, and how a user names one."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from forge.checkpoint import Checkpoints, StoredCheckpoint, temp_names, write_checkpoint
from forge.errors import CheckpointError
from tests.forge.checkpoint.test_checkpoint import tree_of
from tests.forge.checkpoint.test_tree import same
from tests.support import forked


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """A run with three checkpoints."""
    found = Checkpoints(tmp_path / "run" / "checkpoints")
    for number in (2, 10, 1):
        write_checkpoint(found.path(number), tree_of(number))
    return found


@pytest.fixture
def dead_pid() -> int:
    """The number of a process that is gone."""
    child = forked.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def damage(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


def test_all_are_listed_oldest_first(checkpoints: Checkpoints) -> None:
    assert [path.name for path in checkpoints.all()] == ["update-00000001", "update-00000002", "update-00000010"]


def test_numbers_beyond_eight_digits_sort_as_numbers(tmp_path: Path) -> None:
    for name in ("update-100000000", "update-99999999"):
        (tmp_path / name).mkdir()
    assert [path.name for path in Checkpoints(tmp_path).all()] == ["update-99999999", "update-100000000"]
    assert Checkpoints(tmp_path).path(100_000_000).name == "update-100000000"


def test_only_real_directories_with_the_very_name_count(checkpoints: Checkpoints) -> None:
    folder = checkpoints.folder
    for name in (
        "update-1",
        "update-000000001",
        "update-0000001x",
        "update-00000003 ",
        "xupdate-00000003",
        "best",
        "٣",
    ):
        (folder / name).mkdir()
    (folder / "update-00000077").write_text("a file")
    (folder / "update-00000088").symlink_to("update-00000001")
    assert [StoredCheckpoint(path).update for path in checkpoints.all()] == [1, 2, 10]


def test_a_folder_that_is_not_there_has_none(tmp_path: Path) -> None:
    nothing = Checkpoints(tmp_path / "checkpoints")
    nothing.sweep()
    assert nothing.all() == []
    assert nothing.newest_valid() is None
    assert not (tmp_path / "checkpoints").exists()


def test_the_newest_valid_one_is_found_and_the_others_are_named(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    damage(checkpoints.path(10))
    (checkpoints.path(2) / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING, "forge"):
        newest = checkpoints.newest_valid()
    assert newest is not None
    assert newest.update == 1
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert "update-00000010" in warnings[0]
    assert "sha256" in warnings[0]
    assert "update-00000002" in warnings[1]
    assert "no manifest.json" in warnings[1]


def test_a_removed_checkpoint_is_gone_and_the_others_stay(checkpoints: Checkpoints) -> None:
    checkpoints.remove(checkpoints.path(2))
    checkpoints.remove(checkpoints.path(2))
    assert [StoredCheckpoint(path).update for path in checkpoints.all()] == [1, 10]


def calls_made(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """The names of these functions of `os`, in the order in which they are called from now on."""
    made: list[str] = []
    for name in names:
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, _name=name, _real=real, **kw: (made.append(_name), _real(*args, **kw))[1]
        )
    return made


def test_a_new_name_is_flushed_before_files_are_removed(
    checkpoints: Checkpoints, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calls_made(monkeypatch, "rename", "fsync", "unlink")
    checkpoints.remove(checkpoints.path(2))
    assert made == ["rename", "fsync", *["unlink"] * 4]
    checkpoints.path(10).rename(checkpoints.folder / f".update-00000010.tmp-{dead_pid}-{'a' * 12}")
    made.clear()
    checkpoints.sweep()
    assert made == ["fsync", *["unlink"] * 4]


def test_a_sweep_of_a_folder_that_cannot_be_flushed_waits(
    checkpoints: Checkpoints, dead_pid: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = checkpoints.folder / f".update-00000003.tmp-{dead_pid}-{'a' * 12}"
    left.mkdir()

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    checkpoints.sweep()
    assert left.exists()
    assert f"Input/output error: '{checkpoints.folder}'" in caplog.text


@pytest.mark.parametrize("name", ["..", "../run", "best", "../other/update-00000001", "."])
def test_only_a_checkpoint_of_this_folder_is_removed(name: str, checkpoints: Checkpoints) -> None:
    write_checkpoint(checkpoints.folder.parent / "other" / "update-00000001", tree_of(1))
    with pytest.raises(CheckpointError, match="not a checkpoint in"):
        checkpoints.remove(checkpoints.folder / name)
    assert (checkpoints.folder.parent / "other" / "update-00000001").exists()


# -- sweeping ---------------------------------------------------------------------------------------------------------


def test_a_sweep_removes_what_the_dead_left(checkpoints: Checkpoints, dead_pid: int) -> None:
    folder, end = checkpoints.folder, f"{dead_pid}-{'a' * 12}"
    (folder / f".update-00000003.tmp-{end}").mkdir()
    (folder / f".update-00000003.tmp-{end}" / "model.safetensors").write_bytes(b"torn")
    (folder / f".latest.tmp-{end}").symlink_to("update-00000001")
    checkpoints.sweep()
    assert sorted(path.name for path in folder.iterdir()) == [path.name for path in checkpoints.all()]


def test_a_sweep_leaves_alone_what_it_does_not_know(checkpoints: Checkpoints) -> None:
    (checkpoints.folder / ".notes").write_text("mine")
    (checkpoints.folder / ".update-00000003.tmp-what").mkdir()
    checkpoints.sweep()
    assert (checkpoints.folder / ".notes").exists()
    assert (checkpoints.folder / ".update-00000003.tmp-what").exists()


def test_a_sweep_leaves_alone_what_a_living_process_writes(checkpoints: Checkpoints) -> None:
    others = checkpoints.folder / f".update-00000003.tmp-{os.getppid()}-{'a' * 12}"
    others.mkdir()
    with temp_names.temporary(checkpoints.path(4)) as (own, _):
        own.mkdir()
        checkpoints.sweep()
        assert own.exists()
    assert others.exists()


def test_a_sweep_removes_what_an_equal_pid_left(checkpoints: Checkpoints) -> None:
    torn = checkpoints.folder / f".update-00000003.tmp-{os.getpid()}-{'a' * 12}"
    torn.mkdir()
    checkpoints.sweep()
    assert not torn.exists()


def test_a_sweep_does_not_follow_links(checkpoints: Checkpoints, dead_pid: int, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    (checkpoints.folder / f".update-00000003.tmp-{dead_pid}-{'a' * 12}").symlink_to(tmp_path / "precious")
    checkpoints.sweep()
    assert (tmp_path / "precious" / "file").exists()
    assert len(list(checkpoints.folder.iterdir())) == 3


def test_a_sweep_finishes_a_replacement_whose_new_one_is_whole(checkpoints: Checkpoints, dead_pid: int) -> None:
    folder, end = checkpoints.folder, f"{dead_pid}-{'a' * 12}"
    checkpoints.path(10).rename(folder / f".update-00000010.old-{end}")
    write_checkpoint(folder / f".update-00000010.tmp-{end}", tree_of(11))
    checkpoints.sweep()
    assert same(StoredCheckpoint(checkpoints.path(10)).load(), tree_of(11))
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("torn", ["missing", "torn"])
def test_a_sweep_undoes_a_replacement_whose_new_one_is_not(torn: str, checkpoints: Checkpoints, dead_pid: int) -> None:
    folder, end = checkpoints.folder, f"{dead_pid}-{'a' * 12}"
    checkpoints.path(10).rename(folder / f".update-00000010.old-{end}")
    if torn == "torn":
        write_checkpoint(folder / f".update-00000010.tmp-{end}", tree_of(11))
        damage(folder / f".update-00000010.tmp-{end}")
    checkpoints.sweep()
    assert same(StoredCheckpoint(checkpoints.path(10)).load(), tree_of(10))
    assert len(list(folder.iterdir())) == 3


def test_a_sweep_restores_the_old_one_if_the_new_is_damaged(checkpoints: Checkpoints, dead_pid: int) -> None:
    write_checkpoint(checkpoints.folder / f".update-00000010.old-{dead_pid}-{'a' * 12}", tree_of(9))
    damage(checkpoints.path(10))
    checkpoints.sweep()
    assert same(StoredCheckpoint(checkpoints.path(10)).load(), tree_of(9))


def test_a_sweep_throws_nothing_away_that_it_cannot_judge(checkpoints: Checkpoints, dead_pid: int) -> None:
    damage(checkpoints.path(10))
    checkpoints.path(10).rename(checkpoints.folder / f".update-00000010.old-{dead_pid}-{'a' * 12}")
    checkpoints.sweep()
    assert checkpoints.path(10).exists()


# -- pointers and what a user may name --------------------------------------------------------------------------------


def test_a_pointer_is_a_relative_link_that_moves(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for number in (1, 10):
        checkpoints.point("latest", checkpoints.path(number))
    assert os.readlink(checkpoints.folder / "latest") == "update-00000010"
    (tmp_path / "run").rename(tmp_path / "moved")
    assert same(StoredCheckpoint.find(tmp_path / "moved" / "checkpoints" / "latest").load(), tree_of(10))


def test_a_pointer_is_skipped_where_there_are_no_links(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "symlink", impossible)
    checkpoints.point("latest", checkpoints.path(10))
    assert len(list(checkpoints.folder.iterdir())) == 3


def test_a_pointer_does_not_replace_a_directory(checkpoints: Checkpoints) -> None:
    (checkpoints.folder / "best").mkdir()
    checkpoints.point("best", checkpoints.path(10))
    assert not (checkpoints.folder / "best").is_symlink()
    assert len(list(checkpoints.folder.iterdir())) == 4


@pytest.mark.parametrize("name", ["../latest", "", ".", "a/b", "update-00000001"])
def test_a_pointer_has_a_simple_name(name: str, checkpoints: Checkpoints) -> None:
    with pytest.raises(CheckpointError, match="cannot name a link"):
        checkpoints.point(name, checkpoints.path(1))


@pytest.mark.parametrize(
    ("given", "update"),
    [(".", 10), ("checkpoints", 10), ("checkpoints/update-00000002", 2), ("checkpoints/best", 1), ("link", 10)],
)
def test_a_user_may_name_run_folder_link_or_checkpoint(given: str, update: int, checkpoints: Checkpoints) -> None:
    run = checkpoints.folder.parent
    checkpoints.point("best", checkpoints.path(1))
    (run / "link").symlink_to(run)
    assert StoredCheckpoint.find(run / given).update == update
    assert StoredCheckpoint.find(str(run / given)).update == update


def test_a_checkpoint_under_another_name_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "mine", tree_of(1))
    assert same(StoredCheckpoint.find(tmp_path / "mine").load(), tree_of(1))


def test_a_run_is_found_by_its_newest_valid_one(checkpoints: Checkpoints) -> None:
    damage(checkpoints.path(10))
    assert StoredCheckpoint.find(checkpoints.folder.parent).update == 2


def test_a_link_itself_is_not_opened(checkpoints: Checkpoints) -> None:
    checkpoints.point("latest", checkpoints.path(1))
    with pytest.raises(CheckpointError, match=r"StoredCheckpoint\.find"):
        StoredCheckpoint(checkpoints.folder / "latest").load()


def test_what_leads_nowhere_is_explained(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.point("best", checkpoints.path(1))
    checkpoints.remove(checkpoints.path(1))
    with pytest.raises(CheckpointError, match="no longer exists"):
        StoredCheckpoint.find(checkpoints.folder / "best")
    with pytest.raises(CheckpointError, match="does not exist"):
        StoredCheckpoint.find(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="it holds no checkpoint"):
        StoredCheckpoint.find(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="is a file"):
        StoredCheckpoint.find(checkpoints.path(2) / "model.safetensors")
    for path in checkpoints.all():
        damage(path)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints there is valid"):
        StoredCheckpoint.find(checkpoints.folder.parent)
