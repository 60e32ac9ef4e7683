"""Damage on the disk: every flipped bit, cut, zeroed range, deletion and swap is found before anything is used.

The seed is printed with each failure; `FORGE_SEED=... pytest tests/forge/checkpoint/test_corruption.py` plays it again.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forge.checkpoint import StoredCheckpoint, manifest, tensors, tree, write_checkpoint
from forge.errors import CheckpointError
from tests.conftest import PROFILE
from tests.forge.checkpoint.test_checkpoint import newest_of
from tests.forge.checkpoint.test_tree import same
from tests.support.sharded_kit import write_in_threads

SEED = int(os.environ.get("FORGE_SEED") or (random.randrange(2**32) if PROFILE == "full" else 0))


def tree_of(number: int) -> dict[str, object]:
    """State like a small run's: a few tensors of different sizes, text and numbers."""
    generator = torch.Generator().manual_seed(number)
    shapes = {"w": (37, 11), "v": (11, 37), "b": (11,), "steps": (), "none": (0, 4)}  # each rank has some
    return {
        "model": {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        "optimizers": {name: {"exp_avg": torch.randn(shape, generator=generator)} for name, shape in shapes.items()},
        "progress": {"update": number, "epoch": 0, "loss": 0.1 * number},
        "recipe": "trainer: {seed: 1}\n" * 5,
    }


def flip_a_bit(folder: Path, dice: random.Random) -> str:
    path = folder / dice.choice(files(folder))
    data = bytearray(path.read_bytes())
    bit = dice.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"bit {bit} of {path.name} flipped"


def cut(folder: Path, dice: random.Random) -> str:
    path = folder / dice.choice(files(folder))
    size = dice.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} cut to {size} bytes"


def lengthen(folder: Path, dice: random.Random) -> str:
    path = folder / dice.choice(files(folder))
    with path.open("ab") as file:
        file.write(dice.randbytes(dice.randrange(1, 100)))
    return f"{path.name} lengthened"


def zero(folder: Path, dice: random.Random) -> str:
    path = folder / dice.choice(files(folder))
    data = bytearray(path.read_bytes())
    start = dice.choice([i for i, byte in enumerate(data) if byte])
    length = dice.randrange(1, 600)
    data[start : start + length] = bytes(len(data[start : start + length]))
    path.write_bytes(data)
    return f"{length} bytes of {path.name} zeroed from {start}"


def delete(folder: Path, dice: random.Random) -> str:
    path = folder / dice.choice(files(folder))
    path.unlink()
    return f"{path.name} deleted"


def swap(folder: Path, dice: random.Random) -> str:
    """A file of the checkpoint before, or two files of this one exchanged."""
    name, other = dice.sample(files(folder), 2)
    if dice.random() < 0.5:
        shutil.copy(folder.with_name("update-00000001") / name, folder / name)
        return f"{name} taken from another checkpoint"
    (folder / name).rename(folder / "aside")
    (folder / other).rename(folder / name)
    (folder / "aside").rename(folder / other)
    return f"{name} and {other} exchanged"


DAMAGES: list[Callable[[Path, random.Random], str]] = [flip_a_bit, flip_a_bit, cut, lengthen, zero, delete, swap]


@pytest.fixture(scope="module", params=[1, 2], ids=["of one process", "of two ranks"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for number in (1, 2):
        target = folder / f"update-0000000{number}"
        if request.param == 1:
            write_checkpoint(target, tree_of(number))
        else:
            write_in_threads(target, tree_of(number))
    return folder


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(use: Callable[[StoredCheckpoint], object], path: Path) -> str | None:
    try:
        use(StoredCheckpoint(path))
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_damage_is_found_before_use(
    count: int, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_early(*_: object) -> None:
        pytest.fail("parsed before it was verified")

    for case in range(count):
        dice = random.Random(f"{SEED}-{case}")
        folder = tmp_path / "checkpoints"
        shutil.copytree(pristine, folder)
        damaged = folder / "update-00000002"
        what = f"FORGE_SEED={SEED}, case {case}: {dice.choice(DAMAGES)(damaged, dice)}"
        with monkeypatch.context() as patch:
            patch.setattr(tree, "join", too_early)
            patch.setattr(tensors, "read_header", too_early)
            for use in (StoredCheckpoint.verify, StoredCheckpoint.load, StoredCheckpoint.weights):
                message = refusal(use, damaged)
                assert message is not None, f"{what}: not found by {use.__name__}"
                assert "update-00000002" in message, what
        assert same(newest_of(folder), tree_of(1)), what
        shutil.rmtree(folder)


def test_every_bit_of_the_manifest_counts(pristine: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(pristine / "update-00000002", tmp_path / "it")
    data = (folder / manifest.NAME).read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError):
            manifest.decode(bytes(flipped), "manifest.json")


def test_a_file_that_changes_after_its_check_does_no_harm(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(pristine / "update-00000002", tmp_path / "it")
    real = tensors.read_tensors

    def cut_first(*arguments: object) -> object:
        os.truncate(next(folder.glob("model*")), 100)
        return real(*arguments)  # pyright: ignore

    monkeypatch.setattr(tensors, "read_tensors", cut_first)
    with pytest.raises(CheckpointError, match="ends too early"):
        StoredCheckpoint(folder).load()
