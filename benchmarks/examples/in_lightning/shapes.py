import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.utils import make_grid

NAMES = ["circle", "square", "triangle"]
to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
augment = v2.Compose([v2.RandomResizedCrop(32, (0.7, 1)), v2.RandomHorizontalFlip(), v2.ColorJitter(0.3), *to_tensor])
plain = v2.Compose([v2.Resize((32, 32)), *to_tensor])


class Shapes(L.LightningModule):
    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in ((3, 16), (16, 32), (32, 64))]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, len(NAMES)))

    def forward(self, images):
        return self.net(images)

    def step(self, batch, stage):
        images, labels = batch
        logits = self(images)
        loss, accuracy = F.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/accuracy": accuracy})
        self.shown = images, labels, logits.argmax(1)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def on_validation_epoch_end(self):
        images, labels, said = (tensor[:16] for tensor in self.shown)
        captions = [f"- {NAMES[b]}" if a == b else f"- {NAMES[b]}, not {NAMES[a]}" for a, b in zip(labels, said)]
        self.logger.experiment.add_image("val/predictions", make_grid(images), self.global_step)
        self.logger.experiment.add_text("val/predictions", "\n".join(captions), self.global_step)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class ShapesData(L.LightningDataModule):
    def __init__(self, folder: str = "shapes", batch_size: int = 32, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters()

    def loader(self, split, transform):
        options = {"batch_size": self.hparams.batch_size, "num_workers": self.hparams.num_workers}
        return DataLoader(ImageFolder(f"{self.hparams.folder}/{split}", transform), shuffle=True, **options)

    def train_dataloader(self):
        return self.loader("train", augment)

    def val_dataloader(self):
        return self.loader("val", plain)


L.seed_everything(0)
trainer = L.Trainer(max_epochs=4, default_root_dir="runs/shapes")
trainer.fit(Shapes(), ShapesData())
