import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel


class Writer(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=64))

    def forward(self, input_ids):
        return self.model(input_ids).logits

    def step(self, batch, stage):
        loss = self.model(**batch).loss
        self.log(f"{stage}/loss", loss, batch_size=int((batch["labels"][:, 1:] != -100).sum()))
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def predict_step(self, batch, batch_idx):
        return self(batch["input_ids"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


tokens = torch.randint(0, 96, (64, 16))
batches = DataLoader([{"input_ids": part, "labels": part} for part in tokens.split(8)], batch_size=None)
task = Writer()
trainer = L.Trainer(max_epochs=2)
trainer.fit(task, batches, batches)
