"""Fits in notebooks: a page in the cell's output, the stop button as an end that returns, results one can read."""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.util.notebook import notebook_shell
from forge_plugins import Progress
from tests.support.patience import PATIENCE

CELL = """
import os, signal
import torch, forge
from torch import nn

class Task(forge.TaskModule):
    stops_at = None
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
    def training_step(self, batch):
        if self.trainer.progress.update == self.stops_at:
            os.kill(os.getpid(), signal.SIGINT)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def validation_step(self, batch):
        right = self.net(batch[0]).argmax(1) == batch[1]
        return {"loss": self.training_step(batch), "accuracy": right.float().mean()}
    def evaluation_end(self, stage):
        return {"picture": forge.Image(torch.rand(3, 8, 8))}
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
data = [(a, a[:, :3].argmax(1)) for a in x.split(16)]
forge.Trainer(max_epochs=3, seed=0, device="cpu").fit(Task(), data, data)
"""


class Cell:
    """The output of a cell, as IPython's `display` gives a handle on it."""

    shown: list[str]

    def __init__(self) -> None:
        self.shown = []
        self.formatters: dict[str, Any] = {"text/html": self}
        self.by_type: dict[type, Any] = {}
        self.display_formatter, self.kernel = self, object()

    def for_type_by_name(self, module: str, name: str, function: Any) -> None:
        self.by_type[getattr(importlib.import_module(module), name)] = function

    def display(self, page: str, display_id: bool) -> Cell:
        assert display_id
        self.update(page)
        return self

    def update(self, page: str) -> None:
        self.shown.append(page)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    made = Cell()
    display = types.SimpleNamespace(HTML=str, display=made.display)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: made, display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return made


class Small(forge.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def training_step(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def data(count: int = 4) -> list[Any]:
    x = torch.randn(16 * count, 4, generator=torch.Generator().manual_seed(0))
    return [(part, part[:, :3].argmax(1)) for part in x.split(16)]


def fit(**options: Any) -> forge.FitResult:
    trainer = forge.Trainer(max_epochs=3, seed=0, device="cpu", plugins=[Progress()], run_dir=False, **options)
    return trainer.fit(Small(), data(), data())


def test_without_a_kernel_there_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook_shell() is None
    terminal = types.SimpleNamespace(get_ipython=object)
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    assert notebook_shell() is None


def test_a_page_has_bar_table_and_curves(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit()
    last = cell.shown[-1]
    assert "done · epoch 3/3 · update 12/12" in last
    assert re.search(r"train/loss</td><td[^>]*>\d\.\d+</td>", last)
    assert last.count("<svg") == 2  # train/loss and val/loss; the rate stays the same
    assert [float(x) for x in re.findall(r"(\d+\.\d),\d+\.\d", last.split("<svg")[1])][-1] == 240.0
    assert capsys.readouterr() == ("", "")
    shown = cell.by_type[forge.FitResult](result)
    assert ">max_epochs<" in shown
    assert ">12<" in shown


def test_a_failed_fit_says_so_on_its_page(cell: Cell) -> None:
    class Bad(Small):
        def training_step(self, batch: Any) -> Any:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        forge.Trainer(max_epochs=1, device="cpu", plugins=[Progress()], run_dir=False).fit(Bad(), data())
    assert "failed · " in cell.shown[-1]


@pytest.mark.slow
def test_a_real_notebook_from_its_first_cell_to_its_last(empty_folder: Path) -> None:
    nbclient: Any = pytest.importorskip("nbclient")
    nbformat: Any = pytest.importorskip("nbformat")
    cells = [
        CELL,
        "Task.stops_at = 5\nstopped = forge.Trainer(max_epochs=3, device='cpu').fit(Task(), data, data)\nstopped",
        "Task.stops_at = None\n"
        "again = forge.Trainer(max_epochs=3, device='cpu', run_dir=stopped.run_dir, resume='auto')\n"
        "again.fit(Task(), data, data).updates",
        "forge.Trainer(device='cpu').test(Task(), data).keys()",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbclient.NotebookClient(book, timeout=PATIENCE, kernel_name="python3").execute()
    first, second, third, fourth = (list(cell.outputs) for cell in book.cells)
    pages = [output.data["text/html"] for output in first if output.output_type == "display_data"]
    assert len(pages) == 1
    assert "update 12/12" in pages[0]
    assert pages[0].count("<svg") >= 3
    assert first[-1].data["text/html"].startswith("<table")
    assert not [output for output in second if output.output_type == "error"]
    assert "interrupted" in "".join(str(output) for output in second)
    assert not any("To exit" in str(output) for output in second)
    assert third[-1].data["text/plain"] == "12"
    assert "picture" not in fourth[-1].data["text/plain"]
