"""LightningModules with Lightning's callbacks on several ranks, and loaders that the adapter makes before the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import forge
from forge_cluster.zero import Zero
from forge_plugins import DDP, FSDP
from tests.support.lasting_ranks import ranks

L = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint  # noqa: E402

from tests.forge_lightning.both import Subject, loader  # noqa: E402
from tests.support.profiles import some  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Watched(Subject):
    """A module with its own loaders and callbacks."""

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(10, seed=1)

    def configure_callbacks(self) -> list[Any]:
        keep = ModelCheckpoint(monitor="val_loss", save_top_k=1, save_last=True)
        return [EarlyStopping("val_loss", patience=5), LearningRateMonitor(), keep]


def fit(folder: Path, *plugins: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    task = forge.LightningAdapter(Watched())
    trainer = forge.Trainer(max_epochs=2, seed=7, device="cpu", run_dir=folder, plugins=list(plugins), **options)
    trainer.fit(task, task.train_loader(), task.val_loader())
    return task


def read_last(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("last.ckpt")
    return torch.load(path, map_location="cpu", weights_only=False)


@pytest.mark.slow
def test_callbacks_are_set_up_inside_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    stops = {}
    for every in ("1 epoch", "2 updates"):
        task = fit(tmp_path / every, validate_every=every)
        stops[every] = task.callbacks.all[0]._check_on_train_epoch_end
        assert read_last(tmp_path / every)["epoch"] == 1  # each run has its own files
    assert stops == {"1 epoch": True, "2 updates": False}
    assert {path.name for path in tmp_path.iterdir()} == set(stops)


def fit_on(folder: str, kind: type[Any]) -> None:
    fit(Path(folder), kind())


@pytest.mark.slow
@pytest.mark.parametrize("kind", some([DDP, FSDP, Zero]))
def test_model_checkpoint_writes_whole_weights_on_ranks(kind: type[Any], tmp_path: Path) -> None:
    ranks(2)(fit_on, str(tmp_path), kind)
    last, weights = read_last(tmp_path), load_file(tmp_path / "weights.safetensors")
    assert last["state_dict"].keys() == weights.keys()
    assert all(
        type(value) is torch.Tensor and torch.equal(value, weights[name]) for name, value in last["state_dict"].items()
    )
    if kind is Zero:  # each rank has a part: Lightning refuses a file without states, rather than begin with some
        assert "optimizer_states" not in last
        return
    (states,) = last["optimizer_states"]
    moments = [states["state"][index]["exp_avg"] for index in range(len(weights))]
    assert [(type(moment), moment.shape) for moment in moments] == [
        (torch.Tensor, value.shape) for value in last["state_dict"].values()
    ]
