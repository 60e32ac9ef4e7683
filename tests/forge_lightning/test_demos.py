"""The LightningModules and data that ship with Lightning go through the adapter as they are, and weights both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import forge
from forge.errors import TaskError

pytest.importorskip("lightning.pytorch")

from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset
from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2

from tests.forge_lightning.both import forge_trainer, lightning_trainer, made

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def words(empty_folder: Path) -> WikiText2:
    """A small text where theirs would be downloaded to."""
    generator = torch.Generator().manual_seed(0)
    lines = torch.randint(40, (12, 20), generator=generator).tolist()
    (empty_folder / "data").mkdir()
    (empty_folder / "data/wikitext-2.txt").write_text("\n".join(" ".join(f"w{i}" for i in line) for line in lines))
    return WikiText2()


def test_their_own_data_and_setup_are_used_without_a_loader(words: WikiText2) -> None:
    task = forge.LightningAdapter(LightningTransformer(words.vocab_size))
    loader = task.train_loader()  # prepare_data finds the text, train_dataloader reads it
    assert len(loader) == len(words)
    data = forge.LightningAdapter(BoringModel(), BoringDataModule())
    result = forge.Trainer(max_updates=3, plugins=[], run_dir=False).fit(data, data.train_loader(), data.val_loader())
    assert result.updates == 3
    assert forge.Trainer(plugins=[]).test(data, data.test_loader()).keys() == {"test/y"}
    assert len(forge.Trainer(plugins=[]).predict(data, data.predict_loader())) == 64


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_weights_go_both_ways_and_a_run_can_be_continued(tmp_path: Path) -> None:
    train: Any = DataLoader(RandomDataset(32, 16), batch_size=4)
    module = made(BoringModel)
    trainer = lightning_trainer(max_epochs=1)
    trainer.fit(module, train)
    trainer.save_checkpoint(tmp_path / "theirs.ckpt", weights_only=True)
    task = forge.LightningAdapter(BoringModel())
    assert forge.load_weights(task, tmp_path / "theirs.ckpt").complete
    assert equal(task.module.state_dict(), module.state_dict())
    from safetensors.torch import load_file

    forge_trainer(run_dir=tmp_path / "run", max_epochs=1).fit(forge.LightningAdapter(task.module), train)
    other = BoringModel()
    other.load_state_dict(load_file(tmp_path / "run/weights.safetensors"))
    again = forge.LightningAdapter.from_checkpoint(tmp_path / "run", module=BoringModel())
    assert equal(other.state_dict(), task.module.state_dict())
    assert equal(again.module.state_dict(), other.state_dict())
    with pytest.raises(TaskError, match="does not hold module"):
        forge.LightningAdapter.from_checkpoint(tmp_path / "run")
