import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.utils import make_grid

from forge_recipes.digits import digits


class VAE(L.LightningModule):
    def __init__(self, latent: int = 8, beta: float = 1.0, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 64), nn.Unflatten(1, (8, 8)))

    def forward(self, images):
        mean, log_var = self.encoder(images).chunk(2, dim=1)
        return self.decoder(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean, log_var

    def step(self, batch, stage):
        images, _ = batch
        made, mean, log_var = self(images)
        self.shown = images[:8], made[:8].sigmoid()
        pixels = F.binary_cross_entropy_with_logits(made, images, reduction="sum") / len(images)
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
        loss = pixels + self.hparams.beta * kl
        self.log_dict({f"{stage}/loss": loss, f"{stage}/pixels": pixels, f"{stage}/kl": kl})
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def on_validation_epoch_end(self):
        images, made = self.shown
        drawn = self.decoder(torch.randn(8, self.hparams.latent, device=self.device)).sigmoid()
        picture = make_grid(torch.cat([images, made, drawn]).unsqueeze(1))
        self.logger.experiment.add_image("val/digits", picture, self.global_step)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


data = digits()
train = DataLoader(TensorDataset(*data.train.tensors), batch_size=64, shuffle=True)
val = DataLoader(TensorDataset(*data.val.tensors), batch_size=256)
L.seed_everything(0)
trainer = L.Trainer(max_epochs=4, default_root_dir="runs/vae")
trainer.fit(VAE(), train, val)
