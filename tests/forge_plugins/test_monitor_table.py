"""monitor: the table of the model, what sinks show of it, and its options."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.errors import RecipeError
from forge.testing import fit_tiny
from forge_plugins import Accumulate, Checkpoint, Monitor
from tests.support.monitor_kit import Spy, made, table
from tests.support.tasks import fit, make_batches

# ---------------------------------------------------------------------------------------------------------------------
# The table


class Stacked(forge.TaskModule):
    """Twelve equal blocks, a frozen layer, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) + 0 * self.unused.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


class TestTable:
    def test_the_table_has_shapes_and_memory_and_folds_equals(self, caplog: pytest.LogCaptureFixture) -> None:
        lines = [line.split("  ") for line in table(made(Stacked), caplog, make_batches(1))]
        rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
        assert rows[0] == ["module", "class", "output", "parameters", "weights", "activations"]
        assert rows[1:-1] == [
            ["Stacked", "Stacked", "4×3", "3,465 (144 frozen)", "13.5 KiB", "48 B"],
            ["stem", "Linear", "4×16", "144 frozen", "576 B", "256 B"],
            ["blocks", "ModuleList", "–", "3,264", "12.8 KiB", "–"],
            ["0 to 11", "Sequential ×12", "4×16", "272", "1.06 KiB", "256 B"],
            ["0", "Linear", "4×16", "272", "1.06 KiB", "256 B"],
            ["1", "ReLU", "4×16", "–", "–", "256 B"],
            ["unused", "Linear", "–", "6", "24 B", "–"],
            ["head", "Linear", "4×3", "51", "204 B", "48 B"],
        ]
        activations = 256 + 12 * 512 + 48
        assert " ".join(rows[-1]) == (
            "3,465 parameters, 3,321 of them trained. Weights and buffers take 13.5 KiB, activations "
            f"{activations / 1024:.3g} KiB for one micro-batch."
        )

    def test_the_table_takes_no_forward_of_its_own(self) -> None:
        task = Spy()
        fit(task, make_batches(4), plugins=[Monitor("1000 updates"), Accumulate(2)])
        assert len(task.seen) == 4
        assert task.seen[-1] == 0

    def test_a_resumed_run_does_not_show_it_again(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        for updates in (2, 4):
            saves = Checkpoint(every="2 updates", background=False)
            fit_tiny([Monitor(), saves], max_updates=updates, run_dir=tmp_path, resume="auto")
        assert caplog.text.count("monitor: the model") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": "often"}, r"monitor\.every: 'often' is not an interval"),
        ({"depth": 0}, r"monitor\.depth is 0; it must be at least 1"),
        ({"vanishing": 0.0}, r"monitor\.vanishing is 0; it must be between 0 and 1"),
        ({"exploding": -1.0}, r"monitor\.exploding is -1; it must be above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Monitor(**options)
