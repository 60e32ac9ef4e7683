"""Tensors come back from a checkpoint with the strides that they had, and hostile strides are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.checkpoint import StoredCheckpoint, write_checkpoint
from forge.checkpoint.strides import check_strides, row_major, with_strides
from forge.checkpoint.writer import BackgroundWriter
from forge.errors import CheckpointError

LAYOUTS = {
    "column-major": lambda: torch.randn(5, 7).t(),
    "channels-last": lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "channels-last of 1 × 1": lambda: torch.empty_strided((4, 3, 1, 1), (3, 1, 3, 3)).normal_(),
    "with gaps": lambda: torch.randn(6, 8)[:, ::2],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "complex": lambda: torch.randn(4, 6, dtype=torch.complex64).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "of one entry": lambda: torch.ones(1, 2, dtype=torch.float64)[:, 0],
}


def loaded(folder: Path, tree: dict[str, Any]) -> Any:
    write_checkpoint(folder / "it", tree)
    return StoredCheckpoint(folder / "it").load()


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("place", ["model", "state"])
def test_strides_come_back_as_they_were(tmp_path: Path, kind: str, place: str) -> None:
    tensor = LAYOUTS[kind]()
    found = loaded(tmp_path, {place: {"w": tensor}})[place]["w"]
    assert found.stride() == tensor.stride()
    assert torch.equal(found, tensor)


def test_large_gaps_are_dropped_and_the_order_stays(tmp_path: Path) -> None:
    tensor = torch.randn(50, 40, 3).permute(1, 0, 2)[:2, :, 0]  # 100 entries in 6,000
    found = loaded(tmp_path, {"state": tensor})["state"]
    assert found.stride() == torch.empty_like(tensor).stride() == (1, 2)
    assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    "tensor", [torch.arange(10.0).unfold(0, 4, 1), torch.ones(0, 2)[:, 0]], ids=["windows", "empty"]
)
def test_what_overlaps_or_is_empty_keeps_its_values(tmp_path: Path, tensor: Tensor) -> None:
    assert torch.equal(loaded(tmp_path, {"state": tensor})["state"], tensor)


def test_tied_tensors_are_tied_again_with_their_strides(tmp_path: Path) -> None:
    tensor = torch.randn(5, 7).t()
    found = loaded(tmp_path, {"model": {"a": tensor, "b": tensor}, "state": [tensor]})
    assert found["model"]["a"] is found["model"]["b"] is found["state"][0]
    assert found["state"][0].stride() == (1, 7)


def test_the_background_writer_notes_strides_too(tmp_path: Path) -> None:
    tensor, writer = torch.randn(5, 7).t(), BackgroundWriter()
    writer.submit(tmp_path / "it", {"state": {"q": tensor}})
    writer.close()
    assert StoredCheckpoint(tmp_path / "it").load()["state"]["q"].stride() == (1, 7)


def test_a_tree_of_odd_keys_notes_strides_too(tmp_path: Path) -> None:
    found = loaded(tmp_path, {1: torch.randn(5, 7).t(), "$odd": torch.randn(2, 3).t()})  # pyright: ignore[reportArgumentType]
    assert [value.stride() for value in found.values()] == [(1, 7), (1, 3)]


@pytest.mark.parametrize(
    "strides",
    [[1], [1, -1], ["1", 1], [1, 10**15], [2**70, 1], [1, 1], None, {"a": 1}, [1.0, 3]],
    ids=str,
)
def test_hostile_strides_are_refused(strides: Any) -> None:
    with pytest.raises(CheckpointError, match="do not fit"):
        check_strides((3, 3), strides, "w")


@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (2, 1, 3), (), (5,)])
def test_row_major_strides_are_those_of_a_new_tensor(shape: tuple[int, ...]) -> None:
    assert row_major(shape) == torch.empty(shape).stride()


def test_a_copy_with_strides_has_its_own_memory() -> None:
    tensor: Tensor = torch.randn(3, 4)
    made = with_strides(tensor, (1, 3))
    made.add_(1)
    assert made.stride() == (1, 3)
    assert not torch.equal(made, tensor)
