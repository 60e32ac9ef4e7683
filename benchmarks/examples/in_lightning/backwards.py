import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler

PAD, START, END = 0, 1, 2


class Backwards(L.LightningModule):
    def __init__(self, width: int = 64, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.letters, self.places = nn.Embedding(29, width, padding_idx=PAD), nn.Embedding(16, width)
        self.net = nn.Transformer(width, 4, 2, 2, 2 * width, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, 29)

    def forward(self, source, target):
        def embed(tokens):
            return self.letters(tokens) + self.places.weight[: tokens.shape[1]]

        later = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).to(source.device)
        masks = {"src_key_padding_mask": source == PAD, "memory_key_padding_mask": source == PAD, "tgt_mask": later}
        hidden = self.net(embed(source), embed(target), **masks)
        return self.out(hidden)

    def step(self, batch, stage):
        source, target = batch["source"], batch["target"]
        logits, wanted = self(source, target[:, :-1]), target[:, 1:]
        self.shown, real = source[:4], wanted != PAD
        right = (logits.argmax(2) == wanted)[real].float().mean()
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD)
        self.log_dict({f"{stage}/loss": loss, f"{stage}/accuracy": right}, batch_size=int(real.sum()))
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def on_validation_epoch_end(self):
        written = torch.full((len(self.shown), 1), START, device=self.device)
        for _ in range(self.shown.shape[1]):
            written = torch.cat([written, self(self.shown, written)[:, -1:].argmax(2)], dim=1)
        text = "\n".join(f"- {word(a)} → {word(b)}" for a, b in zip(self.shown, written))
        self.logger.experiment.add_text("val/samples", text, self.global_step)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def word(tokens):
    return "".join(chr(94 + token) for token in tokens.tolist() if token > END)


def samples(count, seed):
    rng = torch.Generator().manual_seed(seed)
    for length in torch.randint(3, 11, (count,), generator=rng).tolist():
        letters = torch.randint(3, 29, (length,), generator=rng).tolist()
        yield {"source": letters, "target": [START, *reversed(letters), END]}


def collate(rows):
    fields = {name: [torch.tensor(row[name]) for row in rows] for name in ("source", "target")}
    return {name: pad_sequence(field, batch_first=True, padding_value=PAD) for name, field in fields.items()}


train, val = list(samples(1024, seed=0)), list(samples(128, seed=1))
lengths = [len(sample["source"]) for sample in train]
sampler = LengthGroupedSampler(64, lengths=lengths)
train_loader = DataLoader(train, batch_size=64, sampler=sampler, collate_fn=collate)
val_loader = DataLoader(val, batch_size=64, collate_fn=collate)
L.seed_everything(0)
trainer = L.Trainer(max_epochs=2, default_root_dir="runs/backwards")
trainer.fit(Backwards(), train_loader, val_loader)
