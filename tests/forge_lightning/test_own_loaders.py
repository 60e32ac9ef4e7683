"""`fit(adapter)` without loaders: those of the module or the datamodule, made inside the run, as by Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forge
from forge_plugins import Accumulate

L = pytest.importorskip("lightning.pytorch")
pytest.importorskip("torchmetrics")

from tests.forge_lightning.both import Subject, forge_trainer, lightning_trainer, loader, made  # noqa: E402

ASKED = ("max_epochs", "max_steps", "world_size", "global_rank", "num_devices", "accumulate_grad_batches")


class Loaders:
    """Loaders that ask the Trainer."""

    heard: list[Any]

    def note(self: Any, name: str, *more: str) -> None:
        self.heard.append((name, *(getattr(self.trainer, asked) for asked in (*ASKED, *more))))

    def train_dataloader(self: Any) -> Any:
        self.note("train")
        return loader(4 * self.trainer.max_epochs * self.trainer.world_size)

    def val_dataloader(self: Any) -> Any:
        self.note(
            "val", *(("estimated_stepping_batches", "num_training_batches") if self.trainer.state.fn == "fit" else ())
        )
        return [loader(10, seed=1), loader(6, seed=2)]

    def test_dataloader(self: Any) -> Any:
        self.note("test")
        return loader(8, seed=3)

    def predict_dataloader(self: Any) -> Any:
        self.note("predict")
        return loader(8, seed=4)


class Owns(Loaders, Subject):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


class Data(Loaders, L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.heard = []


class Steps(Owns):
    """The steps alone: its own loaders must not be asked where a datamodule has them."""

    def train_dataloader(self) -> Any:
        raise AssertionError

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def ours(module: Any, data: Any = None, **options: Any) -> tuple[forge.Trainer, forge.LightningAdapter]:
    return forge_trainer(**options), forge.LightningAdapter(module, data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("has_datamodule", [False, True])
def test_every_verb_makes_the_loaders_in_the_run_as_lightning_does(has_datamodule: bool, window: int) -> None:
    kind = Steps if has_datamodule else Owns
    theirs, data = made(kind), Data() if has_datamodule else None
    trainer = lightning_trainer(accumulate_grad_batches=window)
    L.seed_everything(7, verbose=False)
    trainer.fit(theirs, datamodule=data)
    for verb in (trainer.validate, trainer.test, trainer.predict):
        verb(theirs, datamodule=data, **({} if verb == trainer.predict else {"verbose": False}))

    module, own = made(kind), Data() if has_datamodule else None
    run, task = ours(module, own, plugins=[Accumulate(window=window)] if window > 1 else [])
    result = run.fit(task)
    assert {"val/0/loss", "val/1/loss"} <= result.metrics.keys()
    for name, value in theirs.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    run.validate(task)
    run.test(task)
    assert len(run.predict(task)) == 2

    def asked(source: Any) -> list[Any]:
        return [call for call in source.heard if call[0] in ("train", "val", "test", "predict")]

    found, expected = asked(own or module), asked(data or theirs)
    assert found == expected
    assert [call[0] for call in found] == ["train", "val", "val", "test", "predict"]


@pytest.mark.filterwarnings("ignore")
def test_a_loader_that_is_given_is_taken_and_the_others_are_made() -> None:
    module = made(Owns)
    run, task = ours(module)
    result = run.fit(task, loader(8))
    assert result.updates == 6
    assert [call[0] for call in module.heard if call[0] in ("train", "val")] == ["val"]
    assert run.given_loaders["val"].keys() == {"0", "1"}


def test_a_module_without_a_validation_step_or_loader_is_not_validated() -> None:
    class Trains(Subject):
        validation_step = L.LightningModule.validation_step

        def train_dataloader(self) -> Any:
            return loader()

        def val_dataloader(self) -> Any:
            raise AssertionError

    class NoLoader(Subject):
        def train_dataloader(self) -> Any:
            return loader()

    for kind in (Trains, NoLoader):
        run, task = ours(made(kind))
        assert not [name for name in run.fit(task).metrics if name.startswith("val/")]
