"""monitor: the table of the model, what sinks show of it, and its options."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import forge
from forge.env import Env
from forge.errors import RecipeError
from forge.testing import TinyGAN, TinyTask, fit_tiny, tiny_batches
from forge_plugins import JSONL, Accumulate, Checkpoint, Clip, Monitor, Progress
from forge_plugins.monitor.shapes import ModuleRow, folded
from tests.support.monitor_kit import Keep, Net, Spy, hooks_on, made, mlp, table, vectors, watched
from tests.support.tasks import fit, make_batches, second_rank

# ---------------------------------------------------------------------------------------------------------------------
# The table


class Stacked(forge.TaskModule):
    """Twelve equal blocks, a frozen layer, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12))
        self.chain = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())])
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.chain(x))

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
            ["Stacked", "Stacked", "4×3", "4,553 (144 frozen)", "17.8 KiB", "48 B"],
            ["stem", "Linear", "4×16", "144 frozen", "576 B", "256 B"],
            ["blocks", "ModuleList", "–", "3,264", "12.8 KiB", "–"],
            ["0 to 11", "Sequential ×12", "4×16", "272", "1.06 KiB", "256 B"],
            ["0", "Linear", "4×16", "272", "1.06 KiB", "256 B"],
            ["1", "ReLU", "4×16", "–", "–", "256 B"],
            ["chain", "Sequential", "4×16", "1,088", "4.25 KiB", "256 B"],
            ["0", "Linear", "4×16", "272", "1.06 KiB", "256 B"],
            ["1", "Tanh", "4×16", "–", "–", "256 B"],
            ["2 to 7", "the same ×3", "–", "–", "–", "–"],
            ["unused", "Linear", "–", "6", "24 B", "–"],
            ["head", "Linear", "4×3", "51", "204 B", "48 B"],
        ]
        activations = 256 + 12 * 512 + 4 * 512 + 48
        assert " ".join(rows[-1]) == (
            "4,553 parameters, 4,409 of them trained. Weights and buffers take 17.8 KiB, activations "
            f"{activations / 1024:.3g} KiB for one micro-batch."
        )

    def test_it_goes_as_deep_as_it_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        names = [line.split()[0] for line in table(made(Stacked), caplog, depth=1)[1:-1]]
        assert names == ["Stacked", "stem", "blocks", "chain", "unused", "head"]

    def test_several_outputs_are_listed(self, caplog: pytest.LogCaptureFixture) -> None:
        class Lstm(forge.TaskModule):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(8, 5)

            def training_step(self, batch: Any) -> Any:
                return self.lstm(batch[0])[0].sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        assert "4×5, 1×5, …" in table(Lstm(), caplog)[2]

    def test_tensorboard_gets_it_as_markdown(self) -> None:
        keep = Keep()
        fit(made(), make_batches(3), plugins=[Monitor(), keep])
        (text,) = [value for metrics in keep.logged.values() for name, value in metrics.items() if name == "model"]
        assert isinstance(text, forge.Text)
        assert text.text.splitlines()[0] == "| module | class | output | parameters | weights | activations |"
        assert "| &nbsp;&nbsp;&nbsp;&nbsp;net | Sequential | 4×3 | 99 | 396 B | 48 B |" in text.text.splitlines()

    def test_the_table_takes_no_forward_of_its_own(self) -> None:
        task = Spy()
        fit(task, make_batches(4), plugins=[Monitor("1000 updates"), Accumulate(2)])
        assert len(task.seen) == 4
        assert task.seen[-1] == 0

    def test_it_shows_what_any_turn_of_several_optimizers_runs(self, caplog: pytest.LogCaptureFixture) -> None:
        class Apart(TinyGAN):
            def training_step(self, batch: Any, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
                net = self.generator if name == "generator" else self.discriminator
                return net(torch.ones(2, 4 if name == "generator" else 6)).sum()

        lines = table(Apart(), caplog, tiny_batches())
        assert not [line for line in lines if "Linear" in line and "–" in line]

    def test_a_resumed_run_does_not_show_it_again(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        for updates in (2, 4):
            saves = Checkpoint(every="2 updates", background=False)
            fit_tiny([Monitor(), saves], max_updates=updates, run_dir=tmp_path, resume="auto")
        assert caplog.text.count("monitor: the model") == 1

    @given(st.lists(st.sampled_from("abc"), max_size=12))
    def test_folding_loses_no_row(self, kinds: list[str]) -> None:
        rows = folded([ModuleRow(str(i), kind) for i, kind in enumerate(kinds)])
        unfolded: list[str] = []
        for row in rows:
            if row.kind.startswith("the same"):
                first, last = (int(name) for name in row.name.split(" to "))
                period = (last - first + 1) // int(row.kind.rpartition("×")[2])
                for _ in range(first, last + 1):
                    unfolded.append(unfolded[-period])
            else:
                unfolded += [row.kind] * row.times
        assert unfolded == kinds


# ---------------------------------------------------------------------------------------------------------------------
# Beside the sinks


def test_progress_lists_no_layers_and_takes_no_look(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(made(), make_batches(4), plugins=[Monitor("1 updates", histograms=True), Progress("1 h"), Clip()])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["cpu", "epoch", "done"]
    assert "grad_norm/before" in lines[1]
    assert "monitor" not in "".join(lines)


def test_jsonl_has_the_numbers_and_leaves_the_rest_out(tmp_path: Path) -> None:
    fit(made(), make_batches(2), plugins=[Monitor("1 updates", histograms=True), JSONL()], run_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "monitor/grad_norm" in line] == [1, 2]
    assert not [name for line in lines for name in line if "histogram" in name or name == "model"]


# ---------------------------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": "often"}, r"monitor\.every: 'often' is not an interval"),
        ({"histograms": "often"}, r"monitor\.histograms: 'often' is not an interval"),
        ({"depth": 0}, r"monitor\.depth is 0; it must be at least 1"),
        ({"vanishing": 0.0}, r"monitor\.vanishing is 0; it must be between 0 and 1"),
        ({"exploding": -1.0}, r"monitor\.exploding is -1; it must be above 0"),
        ({"small": 0.0}, r"monitor\.small is 0; it must be between 0 and 1"),
        ({"dead": 1.0}, r"monitor\.dead is 1; it must be between 0 and 1"),
        ({"saturated": 2.0}, r"monitor\.saturated is 2; it must be between 0 and 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Monitor(**options)


def test_one_plugin_serves_several_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plugin = Monitor("2 updates")
    for _ in range(2):
        keep = watched(made(), make_batches(2), monitor=plugin)
        assert keep.updates == [2]
    assert caplog.text.count("monitor: the model") == 2


def test_another_process_looks_but_does_not_talk(caplog: pytest.LogCaptureFixture) -> None:
    class SecondRank(forge.Plugin):
        @forge.hookimpl
        def forge_setup_env(self) -> Env:
            return second_rank()

    caplog.set_level(logging.INFO)
    fit(
        Net(mlp(nn.Sigmoid, 12)),
        vectors(),
        plugins=[Monitor("15 updates"), SecondRank()],
        max_epochs=None,
        max_updates=15,
    )
    assert caplog.text == ""


def test_tiny_task_is_left_as_it_was() -> None:
    task = TinyTask()
    fit_tiny([Monitor("1 updates", histograms=True)], task=task)
    assert hooks_on(task) == 0
    assert all(p.grad is None for p in task.parameters())
