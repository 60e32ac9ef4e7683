import lightning as L
import torch
import torch.nn.functional as F
from digits_module import Digits, loaders
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Distillation(L.LightningModule):
    def __init__(
        self, teacher: str = "runs/teacher.ckpt", hidden: int = 16, temperature: float = 3.0, lr: float = 1e-2
    ):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.teacher = Digits.load_from_checkpoint(teacher).requires_grad_(False)

    def forward(self, images):
        return self.net(images)

    def on_train_epoch_start(self):
        self.teacher.eval()  # fit() calls train() on all modules

    def on_save_checkpoint(self, checkpoint):
        for name in [name for name in checkpoint["state_dict"] if name.startswith("teacher.")]:
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"].update({f"teacher.{name}": x for name, x in self.teacher.state_dict().items()})

    def training_step(self, batch, batch_idx):
        images, labels, *cached = batch
        with torch.no_grad():
            told = cached[0] if cached else self.teacher(images)
        logits = self(images)
        soft = (F.log_softmax(x / self.hparams.temperature, 1) for x in (logits, told))
        copied = F.kl_div(*soft, reduction="batchmean", log_target=True) * self.hparams.temperature**2
        loss = (F.cross_entropy(logits, labels) + copied) / 2
        self.log_dict({"train/loss": loss, "train/copied": copied})
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val/accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=self.hparams.lr)


def data(cached: bool = False, teacher: str = "runs/teacher.ckpt"):
    train, val = loaders()
    if not cached:
        return train, val
    images, labels = train.dataset.tensors
    with torch.no_grad():
        told = Digits.load_from_checkpoint(teacher).eval()(images)
    return DataLoader(TensorDataset(images, labels, told), batch_size=64, shuffle=True), val


L.seed_everything(0)
trainer = L.Trainer(max_epochs=8, default_root_dir="runs/teacher")
trainer.fit(Digits(), *loaders())
trainer.save_checkpoint("runs/teacher.ckpt")

L.seed_everything(0)
trainer = L.Trainer(max_epochs=8, default_root_dir="runs/student")
trainer.fit(Distillation(), *data())
