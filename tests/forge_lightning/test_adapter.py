"""LightningAdapter without Lightning: names, forms, hooks and refusals, on modules that only look like Lightning's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import forge
from forge.cli import main
from forge.data import TensorLoader
from forge.errors import TaskError
from forge_lightning.names import short
from forge_lightning.optimizer_config import read
from forge_plugins import SAM
from tests.support.ranks import Pair, launch
from tests.support.tasks import make_batches


class Module(nn.Module):
    """A LightningModule by its methods alone."""

    log: Any
    trainer: Any

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        self.log("train/index", batch_idx, on_epoch=True)
        return {"loss": loss, "double": 2 * loss.detach(), "rows": batch[0]}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        self.log("loader", float(dataloader_idx), batch_size=1, add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


def fit(module: nn.Module, val: Any = None, **options: Any) -> forge.FitResult:
    settings = {"max_epochs": 2, "seed": 0, "plugins": [], "run_dir": False, "device": "cpu", **options}
    return forge.Trainer(**settings).fit(forge.LightningAdapter(module), make_batches(), val)


# ---------------------------------------------------------------------------------------------------------------------
# Names


@pytest.mark.parametrize(
    ("name", "stage", "expected"),
    [
        ("val_loss", "val", "loss"),
        ("val/loss", "val", "loss"),
        ("validation-f1", "val", "f1"),
        ("loss", "val", "loss"),
        ("value", "val", "value"),
        ("train_acc", "val", "train_acc"),
        ("train_acc", "train", "acc"),
    ],
)
def test_the_stage_is_taken_off_a_name_that_begins_with_it(name: str, stage: str, expected: str) -> None:
    assert short(name, stage) == expected


def test_logs_are_called_by_stage_and_the_loss_has_one_curve() -> None:
    result = fit(Module(), {"a": make_batches(1), "b": make_batches(2)})
    assert {name for name in result.metrics if name.startswith(("train/", "val/"))} == {
        "train/loss",
        "train/double",
        "train/index",
        "train/index_epoch",
        "val/a/loss",
        "val/b/loss",
        "val/loader",
    }
    assert result.metrics["train/index_epoch"] == 1.5  # batches 0 to 3
    assert result.metrics["val/loader"] == pytest.approx(2 / 3)  # one batch of the first loader, two of the second


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"value": torch.ones(2)}, "shape"),
        ({"value": "high"}, "str"),
        ({"value": 1.0, "reduce_fx": torch.median}, "torchmetrics"),
    ],
)
def test_what_cannot_be_logged_is_refused_with_what_to_do(options: dict[str, Any], said: str) -> None:
    class Logs(Module):
        def training_step(self, batch: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            self.log("odd", **options)
            return self.net(batch[0]).sum()

    with pytest.raises(TaskError, match=rf"Logs: self.log\('odd'.*{said}"):
        fit(Logs())


# ---------------------------------------------------------------------------------------------------------------------
# What is returned


def test_optimizers_and_schedules_come_in_all_forms() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = StepLR(optimizer, 1)
    for returned, count in (
        (optimizer, 0),
        ([optimizer], 0),
        (([optimizer], [schedule]), 1),
        (([optimizer], schedule), 1),
        (([optimizer], [{"scheduler": schedule}, schedule]), 2),
        ({"optimizer": optimizer}, 0),
        ({"optimizer": optimizer, "lr_scheduler": schedule}, 1),
        ([{"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}], 1),
    ):
        found, configs = read(returned, "M.configure_optimizers")
        assert len(found) == 1
        assert found[0] is optimizer
        assert [config.scheduler for config in configs] == [schedule] * count


class Foreign:
    """Not a scheduler of torch's, but with its state."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda o: [o, o], "returned 2 optimizers"),
        (lambda o: (o, StepLR(o, 1)), "tuple"),
        (lambda o: 3, "int"),
        (lambda o: {"lr_scheduler": 1}, "without an optimizer"),
        (lambda o: {"optimizer": o, "lr_scheduler": {"every": 2}}, "no 'scheduler'"),
        (lambda o: ([o], [StepLR(SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 1)]), "drives an optimizer that is not"),
        (lambda o: ([o], [Foreign(o)]), "Foreign is not a scheduler of torch's"),
        (lambda o: {"optimizer": o, "lr_scheduler": ReduceLROnPlateau(o)}, "no 'monitor'"),
    ],
)
def test_other_forms_are_refused_by_name(make: Any, said: str) -> None:
    class Odd(Module):
        def configure_optimizers(self) -> Any:
            return make(SGD(self.parameters(), lr=1.0))

    with pytest.raises(TaskError, match=f"Odd.configure_optimizers.*{said}"):
        fit(Odd(), make_batches())


# ---------------------------------------------------------------------------------------------------------------------
# Hooks and the Trainer's stand-in


def test_a_step_run_twice_has_its_hooks_and_logs_once() -> None:
    class Counts(Module):
        starts = ends = calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.calls += 1
            self.log("call", self.calls)
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.starts += 1

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.ends += 1

    module = Counts()
    metrics = fit(module, plugins=[SAM()]).metrics
    assert metrics["train/index_epoch"] == 1.5
    assert metrics["train/call"] == (9 + 11 + 13 + 15) / 4  # the first of two runs, in the second epoch
    assert (module.starts, module.ends) == (8, 8)


def test_what_the_trainer_has_not_is_named_with_what_it_has() -> None:
    class Asks(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.tuner.lr_find()
            return self.net(batch[0]).sum()

    with pytest.raises(TaskError, match=r"self.trainer.tuner: .* has no tuner. It has .*current_epoch"):
        fit(Asks())


def test_a_module_can_stop_the_run_and_is_left_as_it_was() -> None:
    class Stops(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = self.trainer.global_step == 3

    module = Stops()
    assert fit(module).updates == 3
    assert "log" not in vars(module)
    assert module.trainer is None


# ---------------------------------------------------------------------------------------------------------------------
# Where it is met: forge fit, and runs/

FILE = """
import torch
from like_lightning import LightningModule
from torch import nn

import forge
from forge.data import Splits, TensorLoader


class Line(LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0][:, : self.net.in_features]) - batch[1]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FitLine(forge.LightningAdapter):
    def __init__(self, width: int = 2):
        super().__init__(Line(width))


def data():
    train, val = (TensorLoader(torch.ones(8, 4), torch.ones(8, 1), batch_size=4) for _ in range(2))
    return Splits(train=train, val=val)
"""


def write_file(name: str, text: str) -> None:
    """A file that imports something of Lightning's name."""
    Path("like_lightning.py").write_text("from torch import nn\n\nclass LightningModule(nn.Module):\n    pass\n")
    Path(name).write_text(text)


def test_forge_fit_runs_a_subclass_with_its_options(capsys: Any) -> None:
    write_file("line.py", FILE)
    quick = ["trainer.max_updates=2", "-p", "no:tensorboard"]
    assert main(["fit", "line.py:FitLine", "task.width=3", *quick]) == 0
    (run,) = Path("runs/fit_line").iterdir()
    assert json.loads((run / "card.json").read_text())["task"]["options"] == {"width": 3}
    assert main(["validate", "line.py:FitLine", "task.width=3", "--weights", str(run)]) == 0
    assert "val/loss" in capsys.readouterr().out
    assert main(["validate", "line.py:FitLine", "--weights", str(run)]) == 2
    assert "was trained with task.width=3. Use the same options: " in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks


def _gather_on(rank: int, store: Any, folder: str) -> None:
    adapter = forge.LightningAdapter(Module())
    adapter.trainer = forge.Trainer(plugins=[], max_epochs=1, device="cpu")
    adapter.trainer.env = Pair("cpu")
    both = adapter._module_all_gather({"a": torch.full((2,), float(rank)), "b": rank, "name": "same"})
    assert both["name"] == "same"
    with pytest.raises(TaskError) as refused:
        adapter._module_all_gather([torch.zeros(2), torch.zeros(3 - rank, 4)])
    told = {"a": both["a"].tolist(), "b": both["b"].tolist(), "refused": str(refused.value)}
    Path(folder, f"{rank}.json").write_text(json.dumps(told))


def test_all_gather_stacks_and_refuses_unequal_shares(tmp_path: Path) -> None:
    assert launch(2, _gather_on, str(tmp_path)) == [0, 0]
    for rank in (0, 1):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (told["a"], told["b"]) == ([[0.0, 0.0], [1.0, 1.0]], [0, 1])
        assert "rank 0 has float32 (2,), float32 (3, 4); rank 1 has float32 (2,), float32 (2, 4)" in told["refused"]
        assert "a sum and a count, or tensors padded to one shape" in told["refused"]


def test_the_doctor_examines_a_module_as_it_does_a_task() -> None:
    class Sums(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("train_loss", loss := nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1)

    class Unread(Sums):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((torch.zeros_like(batch[0]), batch[1]), batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step((torch.zeros_like(batch[0]), batch[1]), batch_idx)

    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    train, val = (
        TensorLoader(part, (part.sum(1) > 0).long(), batch_size=8, shuffle=shuffle)
        for part, shuffle in zip(x.split(32), (True, False), strict=True)
    )
    healthy, ill = (
        forge.doctor(forge.LightningAdapter(make()), train, val, seed=0, max_epochs=2) for make in (Sums, Unread)
    )
    assert not healthy.skipped
    assert not healthy.findings
    assert "tensor_ignored" in {finding.name for finding in ill.findings}
