"""What a task takes and returns is seen in its validation, whatever its structure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge_ship.engine import ExportError
from forge_ship.interface import SeenCall, dynamic_axes, observe
from forge_ship.open_engine import open_engine
from forge_ship.verify import ExportMismatch
from tests.support.ships import Classifier, batches


def export(task: forge.TaskModule, data: Any, folder: Path, **options: Any) -> Any:
    return forge.export(task, to="torchscript", out=folder, data=data, **options)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None
    note: str = ""


class Texts(Classifier):
    """Takes a dict of tensors by name, as tokenizers give them, and returns a structure."""

    def forward(self, ids: Tensor, mask: Tensor, scale: float = 1.0) -> Output:  # pyright: ignore
        words = F.one_hot(ids, 4).float() * mask.unsqueeze(2)
        hidden = words.sum(1) * scale
        return Output(super().forward(hidden), hidden, "no tensor")

    def validation_step(self, batch: dict[str, Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        labels = batch.pop("labels")
        found = self(**batch, scale=0.5)
        return F.cross_entropy(found.logits, labels)


def texts(*lengths: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    rows = range(4)
    return [
        {
            "ids": torch.randint(0, 4, (len(rows), length), generator=draw),
            "mask": torch.ones(len(rows), length),
            "labels": torch.arange(len(rows)) % 3,
        }
        for length in lengths
    ]


@pytest.mark.slow
def test_named_inputs_and_a_structure_come_out_by_name(tmp_path: Path) -> None:
    made = export(Texts(), texts(5, 7, 6), tmp_path)
    assert [(port["name"], port["shape"]) for port in made.card["inputs"]] == [
        ("ids", ["batch", "ids_1"]),
        ("mask", ["batch", "ids_1"]),
    ]
    assert made.card["inputs"][0]["seen"] == {"batch": [4, 4], "ids_1": [5, 7]}
    assert [port["name"] for port in made.card["outputs"]] == ["logits", "hidden"]
    assert "note (str)" in made.notes[0]
    assert made.card["verification"]["metrics_after"].keys() == {"val/loss"}
    engine = open_engine(made.path)
    found = engine({"ids": torch.tensor([[1, 2, 3]]), "mask": torch.ones(1, 3)})
    assert found["hidden"].tolist() == [[0.0, 0.5, 0.5, 0.5]]


class Encodes(Classifier):
    export_method = "encode"

    def encode(self, images: Tensor) -> Tensor:
        return self.first(images)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.encode(images).relu())


def test_the_method_that_the_task_names_is_exported(tmp_path: Path) -> None:
    made = export(Encodes(), batches(), tmp_path)
    assert made.card["outputs"][0]["shape"] == ["batch", 6]
    assert made.card["verification"]["metrics_after"].keys() == {"val/loss", "val/accuracy"}
    Encodes.export_method = "nothing"
    try:
        with pytest.raises(ExportError, match="no such method"):
            export(Encodes(), batches(), tmp_path / "other")
    finally:
        Encodes.export_method = "encode"


class Scale(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.float() / 255


class Preprocessed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.preprocess = Scale()

    def training_step(self, batch: Any) -> Any:
        return super().training_step((self.preprocess(batch[0]), batch[1]))

    validation_step = training_step


def test_preprocess_goes_along(tmp_path: Path) -> None:
    data = [(torch.randint(0, 256, (n, 4), dtype=torch.uint8), torch.arange(n) % 3) for n in (8, 5)]
    task = Preprocessed()
    made = export(task, data, tmp_path)
    assert made.card["inputs"][0]["dtype"] == "uint8"
    found = open_engine(made.path)({"images": data[0][0]})["output"]
    assert torch.equal(found, task.eval()(data[0][0] / 255))


def test_a_preprocess_that_no_step_calls_is_refused(tmp_path: Path) -> None:
    task = Classifier()
    task.preprocess = Scale()
    with pytest.raises(ExportError, match="preprocess"):
        export(task, batches(), tmp_path)


class Counting(Classifier):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images)[torch.arange(len(images))]


def test_a_size_that_a_trace_has_baked_in_is_found(tmp_path: Path) -> None:
    with pytest.raises(ExportMismatch, match=r"fails on images of \d × 4|shape"):
        export(Counting(), batches(), tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- dynamic axes -----------------------------------------------------------------------------------------------------


def calls(*shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> list[SeenCall]:
    return [SeenCall({"x": torch.zeros(a), "y": torch.zeros(b)}, {}) for a, b in shapes]


@pytest.mark.parametrize(
    ("dynamic", "expected"),
    [
        ("auto", {"x": {0: "batch", 1: "x_1"}, "y": {0: "batch", 2: "x_1"}}),
        ("batch", {"x": {0: "batch"}, "y": {0: "batch"}}),
        ("none", {}),
        (["batch", "y:1"], {"x": {0: "batch"}, "y": {0: "batch", 1: "y_1"}}),
    ],
)
def test_axes_are_dynamic_as_the_data_vary_or_as_asked(dynamic: Any, expected: Any) -> None:
    seen = calls(((2, 5, 3), (2, 4, 5)), ((2, 7, 3), (2, 4, 7)))
    assert dynamic_axes(seen, dynamic) == expected


def test_an_axis_that_is_missing_in_some_batches_is_refused() -> None:
    with pytest.raises(ExportError, match="axes"):
        dynamic_axes(calls(((2, 5), (2,)), ((2,), (2,))))


# -- structure --------------------------------------------------------------------------------------------------------


def test_the_task_is_left_as_it_was() -> None:
    task = Classifier().train()
    task.eval()
    before = dict(vars(task))
    observe(task, batches(), "cpu")
    assert vars(task).keys() - {"trainer"} == before.keys() - {"trainer"}
    assert "forward" not in vars(task)
