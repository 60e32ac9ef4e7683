import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, LearningRateMonitor
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import shufflenet_v2_x0_5

from forge_recipes.digits import digits


class Staged(L.LightningModule):
    def __init__(self, weights: str | None = None, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = shufflenet_v2_x0_5(weights=weights)  # "DEFAULT" downloads those of ImageNet
        self.backbone.fc = nn.Identity()
        self.head = nn.Linear(1024, 10)

    def forward(self, images):
        return self.head(self.backbone(F.interpolate(images.unsqueeze(1), 32).expand(-1, 3, -1, -1)))

    def step(self, batch, stage):
        images, labels = batch
        logits = self(images)
        loss, accuracy = F.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/accuracy": accuracy})
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=self.hparams.lr)


stages = BackboneFinetuning(2, lambda_func=lambda epoch: 1.0, backbone_initial_ratio_lr=0.1)
data = digits()
train = DataLoader(TensorDataset(*data.train.tensors), batch_size=128, shuffle=True)
val = DataLoader(TensorDataset(*data.val.tensors), batch_size=256)
L.seed_everything(0)
trainer = L.Trainer(max_epochs=4, callbacks=[stages, LearningRateMonitor()], default_root_dir="runs/staged")
trainer.fit(Staged(), train, val)
