from importlib.resources import files
from pathlib import Path

import lightning as L
import numpy as np
import torch
from digits_module import Digits
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


def data(fold: int = 0, folds: int = 5):
    arrays = np.load(files("forge_recipes").joinpath("digits.npz").open("rb"))
    images, labels = torch.from_numpy(arrays["images"]).float() / 16, torch.from_numpy(arrays["labels"]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # the same in every run
    val, train = order[fold::folds], order[torch.arange(len(order)) % folds != fold]
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size=64, shuffle=True),
        DataLoader(TensorDataset(images[val], labels[val]), batch_size=256),
    )


found = []
for fold in range(5):
    L.seed_everything(0)
    folder = Path(f"runs/folds/fold-{fold}")
    saves, last = ModelCheckpoint(folder, save_last=True), folder / "last.ckpt"
    trainer = L.Trainer(max_epochs=5, callbacks=[saves], default_root_dir=folder)
    module, (train, val) = Digits(), data(fold)
    trainer.fit(module, train, val, ckpt_path=last if last.exists() else None)
    found += [{name: float(value) for name, value in trainer.validate(module, val)[0].items()}]
for name in found[0]:
    values = torch.tensor([metrics[name] for metrics in found])
    print(f"{name}  {values.mean():.4f} ± {values.std():.4f}")
