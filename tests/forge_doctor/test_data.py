"""forge data: a look at a batch, of recipes and of a stranger's file; nothing is trained, no run is written."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge.cli import main
from forge_doctor.batch_look import as_pictures, look_at

TASK = """
from dataclasses import dataclass
import torch
from torch.utils.data import DataLoader, Dataset
import forge
from forge.data import Splits

class Pictures(Dataset):
    classes = ["cat", "dog"]
    def __len__(self): return 12
    def __getitem__(self, i):
        x = torch.full((3, 8, 8), float(i))
        x[0, 0, 0] = float("nan")
        return {"image": x, "label": i % 2, "name": f"picture {i}"}

class Task(forge.TaskModule):
    def __init__(self):
        super().__init__()
        raise AssertionError("nothing here needs the task")

class Writer(forge.TaskModule):
    def decode(self, tokens): return "".join(chr(97 + t) for t in tokens)
    def training_step(self, batch): raise AssertionError("nothing is trained")
    def configure_optimizers(self): raise AssertionError("nothing is trained")

def data(): return Splits(train=DataLoader(Pictures(), batch_size=4), val={"a": DataLoader(Pictures(), batch_size=2)})

def text(): return Splits(train=[(torch.arange(6).reshape(2, 3), torch.tensor([[1, -100, 2], [0, 1, 2]]))])

def empty(): return Splits(train=DataLoader([], batch_size=2))
"""


@pytest.fixture
def file(empty_folder: Path) -> str:
    path = Path(f"task_{empty_folder.name}.py")
    path.write_text(TASK)
    return str(path)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["data", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["data", *words]) == 2
    return capsys.readouterr().err


def test_numbers_are_those_of_torch(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(shown(capsys, f"{file}:Task", "--json", "--batches", "2"))["train"]
    image, label, name = facts["leaves"]
    every = torch.arange(8.0).reshape(8, 1, 1, 1).expand(8, 3, 8, 8).clone()
    every[:, 0, 0, 0] = float("nan")
    assert facts["batches"] == 3
    assert (image["shapes"], image["dtype"]) == ([[4, 3, 8, 8]] * 2, "float32")
    assert (image["min"], image["max"]) == (0.0, 7.0)
    assert image["mean"] == pytest.approx(every.nanmean().item())
    assert image["nan_share"] == pytest.approx(every.isnan().float().mean().item())
    assert label["labels"] == {"0": 4, "1": 4}
    assert name["texts"] == [f"picture {i}" for i in range(8)]
    assert [path.name for path in Path.cwd().iterdir() if path.suffix == ".png" or path.name == "runs"] == []


def test_a_strangers_pictures_are_drawn_with_their_classes(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    out = shown(capsys, f"{file}:Task", "--split", "all", "--out", "seen.png")
    assert "train  first batch of 3" in out
    assert "val/a  first batch of 6" in out
    assert "label counts  0: 2  1: 2" in out
    assert "'picture 1'" in out or "picture 1" in out
    assert {path.name for path in Path.cwd().glob("*.png")} == {"seen-train.png", "seen-val-a.png"}
    assert Image.open("seen-train.png").width > 4 * 64
    assert not Path("runs").exists()


def test_tokens_are_decoded_and_ignored_labels_left_out(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, f"{file}:Writer", "--data", f"{file}:text")
    assert "[0][1]  'def'" in out
    assert "[1][0]  'bc'" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--split", "test"], "no test split (they have train, val): return forge.data.Splits(test=...)"),
        (["--out", "a.jpg"], "Name the file a.png"),
        (["--batches", "0"], "1 batch or more"),
    ],
)
def test_mistakes_name_the_fix(file: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, f"{file}:Task", *words)


def test_an_empty_split_is_named(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "empty" in refused(capsys, f"{file}:Task", "--data", f"{file}:empty")


def test_containers_of_all_kinds_are_searched() -> None:
    class Graph:
        def __init__(self) -> None:
            self.x, self.edges = torch.ones(3, 2), torch.zeros(2, 4, dtype=torch.long)

    class Output(dict[str, Any]):
        pass

    batch = (Output(ids=torch.arange(6).reshape(2, 3), mask=torch.ones(2, 3)), [Graph()], {"y": np.ones(3)}, "note", 3)
    found = {leaf.name: leaf for leaf in look_at([batch])}
    assert list(found) == ["[0].ids", "[0].mask", "[1][0].x", "[1][0].edges", "[2].y", "[3]", "[4]"]
    assert not found["[0].mask"].labels
    assert found["[2].y"].dtype == "float64"
    assert found["[3]"].texts == ["note"]
    assert found["[4]"].mean == 3


def test_columns_of_zeros_and_ones_are_counted() -> None:
    targets = torch.tensor([[1.0, 0, 1], [0, 0, 1]])
    (leaf,) = look_at([targets])
    assert leaf.labels == Counter({0: 1, 1: 0, 2: 2})


@pytest.mark.parametrize(
    ("shape", "drawn"), [((2, 8, 8, 3), (2, 3, 8, 8)), ((2, 8, 8), (2, 1, 8, 8)), ((2, 9, 8), None), ((2, 5), None)]
)
def test_what_looks_like_pictures_is_taken(shape: tuple[int, ...], drawn: tuple[int, ...] | None) -> None:
    found = as_pictures(torch.linspace(-2, 2, torch.Size(shape).numel()).reshape(shape))
    assert (None if found is None else tuple(found.shape)) == drawn
    assert found is None or (found.min() == 0 and found.max() == 1)
