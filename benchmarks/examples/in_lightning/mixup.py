import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

to_tensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
blend = v2.RandomChoice([v2.MixUp(alpha=0.4, num_classes=3), v2.CutMix(alpha=1.0, num_classes=3)])


def mixed(samples):
    return blend(*default_collate(samples))  # labels become shares: (batch, classes)


class Stripes(L.LightningModule):
    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in ((3, 16), (16, 32))]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 8 * 8, 3))

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, shares = batch
        loss = F.cross_entropy(self(images), shares)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        self.log_dict({"val/loss": F.cross_entropy(logits, labels), "val/accuracy": accuracy})

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class StripesData(L.LightningDataModule):
    def __init__(self, folder: str = "stripes", batch_size: int = 32, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters()

    def loader(self, split, **options):
        options |= {"batch_size": self.hparams.batch_size, "num_workers": self.hparams.num_workers}
        return DataLoader(ImageFolder(f"{self.hparams.folder}/{split}", to_tensor), **options)

    def train_dataloader(self):
        return self.loader("train", shuffle=True, collate_fn=mixed)

    def val_dataloader(self):
        return self.loader("val")


L.seed_everything(0)
trainer = L.Trainer(max_epochs=8, default_root_dir="runs/mixup")
trainer.fit(Stripes(), StripesData())
