"""A LightningModule's run that was cut goes on as if it had not been, with callbacks and manual optimization too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge_plugins import Checkpoint

L = pytest.importorskip("lightning.pytorch")
pytest.importorskip("torchmetrics")

from lightning.pytorch.callbacks import EarlyStopping  # noqa: E402

from tests.forge_lightning.both import Subject, forge_trainer, lightning_trainer, loader  # noqa: E402
from tests.forge_lightning.manual_scenarios import Scheduled, Shared  # noqa: E402
from tests.forge_lightning.scenarios import Metrics, scheduled  # noqa: E402
from tests.support.profiles import some  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Logs(Subject):
    """Reductions over an epoch that a checkpoint must hold, a count that its own hooks keep, and loaders of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(10, seed=1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.count = checkpoint["count"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        self.log("count", self.count)
        self.log("largest", batch[0].max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("whole", batch[0].sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def plateau() -> type[Any]:
    make = lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5)  # noqa: E731
    return scheduled(make, monitor="val_loss", interval="step", frequency=3, strict=False)


@pytest.mark.parametrize("kind", some([Shared, Logs, plateau(), Scheduled, Metrics], quick=2))
def test_a_cut_run_goes_on_bit_for_bit(kind: type[Any], tmp_path: Path) -> None:
    @forge.on("step_end")
    def power_cut(step: forge.Step) -> None:
        if step.index == 7:
            raise RuntimeError("power cut")

    def run(folder: str, *more: Any, **options: Any) -> tuple[Any, EarlyStopping]:
        torch.manual_seed(0)
        module, stop = kind(), EarlyStopping("val_loss", patience=5, strict=False)
        trainer = forge_trainer(plugins=[Checkpoint("2 updates"), *more], run_dir=tmp_path / folder, **options)
        loaders = () if kind is Logs else (loader(), loader(10, seed=1))
        trainer.fit(forge.LightningAdapter(module, callbacks=[stop]), *loaders)
        return module, stop

    whole, patience = run("whole")
    with pytest.raises(RuntimeError, match="power cut"):
        run("cut", power_cut)
    again, waited = run("cut", resume="auto")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in whole.state_dict().items())
    assert again.final == whole.final
    assert again.heard[-1] == whole.heard[-1]  # epoch and global_step at the end
    assert waited.state_dict() == patience.state_dict()


class Steady(Subject):
    """Without random numbers, which Lightning does not restore."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Identity()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", some([2, 1]))
def test_a_resumed_run_counts_as_under_lightning(epochs: int, tmp_path: Path) -> None:
    def make() -> Steady:
        torch.manual_seed(0)
        return Steady()

    first = lightning_trainer(max_epochs=epochs)
    first.fit(make(), loader(), loader(10, seed=1))
    first.save_checkpoint(tmp_path / "theirs.ckpt")
    theirs, ours = make(), make()
    checkpoint = tmp_path / "theirs.ckpt"
    lightning_trainer(max_epochs=4).fit(theirs, loader(), loader(10, seed=1), ckpt_path=checkpoint)
    for module, until in ((make(), epochs), (ours, 4)):
        trainer = forge_trainer(max_epochs=until, plugins=[Checkpoint()], run_dir=tmp_path / "run", resume="auto")
        trainer.fit(forge.LightningAdapter(module), loader(), loader(10, seed=1))
    assert ours.heard == theirs.heard
    assert ours.rates == theirs.rates
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in theirs.state_dict().items())


def test_a_checkpoint_of_the_stand_in_is_read_by_lightning(tmp_path: Path) -> None:
    callback = L.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss")
    module = Steady()
    trainer = forge_trainer(max_epochs=2)
    trainer.fit(forge.LightningAdapter(module, callbacks=callback), loader(), loader(10, seed=1))
    read = Steady.load_from_checkpoint(callback.best_model_path)
    best = torch.load(callback.best_model_path, weights_only=False)
    assert best["global_step"] == 5 * (best["epoch"] + 1)
    assert all(torch.equal(read.state_dict()[name], value) for name, value in best["state_dict"].items())
    assert best["optimizer_states"][0]["state"]
