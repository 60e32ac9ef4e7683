import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LETTERS, PROMPT = 12, 4


class Writer(L.LightningModule):
    """A small language model, trained on the letters themselves."""

    def __init__(self, width: int = 32, lr: float = 5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(LETTERS, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, LETTERS)

    def forward(self, letters):
        return self.head(self.rnn(self.embed(letters))[0])

    def training_step(self, batch, batch_idx):
        (letters,) = batch
        loss = F.cross_entropy(self(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def log_likelihood(model, letters):
    """The log probability of each answer after its prompt."""
    made = model(letters[:, :-1]).log_softmax(2).gather(2, letters[:, 1:, None]).squeeze(2)
    return made[:, PROMPT - 1 :].sum(1)


class DPO(L.LightningModule):
    def __init__(self, start: str = "runs/writer.ckpt", beta: float = 0.2, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.policy = Writer.load_from_checkpoint(start)
        self.reference = Writer.load_from_checkpoint(start).requires_grad_(False)

    def forward(self, letters):
        return self.policy(letters)

    def on_train_epoch_start(self):
        self.reference.eval()  # fit() calls train() on all modules

    def on_save_checkpoint(self, checkpoint):
        for name in [name for name in checkpoint["state_dict"] if name.startswith("reference.")]:
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"].update({f"reference.{name}": x for name, x in self.reference.state_dict().items()})

    def step(self, batch, stage):
        liked, disliked = batch
        margin = self.gain(liked) - self.gain(disliked)
        loss, right = -F.logsigmoid(self.hparams.beta * margin).mean(), (margin > 0).float().mean()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/right": right})
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def gain(self, letters):
        """How much likelier the policy makes an answer than the reference does."""
        return log_likelihood(self.policy, letters) - log_likelihood(self.reference, letters)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.policy.parameters(), lr=self.hparams.lr)


def answers(seed: int, count: int):
    prompts = torch.randint(LETTERS, (count, PROMPT), generator=torch.Generator().manual_seed(seed))
    return torch.cat([prompts, prompts], 1), torch.cat([prompts, prompts.flip(1)], 1)


def data():
    train, val = (TensorDataset(*answers(seed, 512)) for seed in (0, 1))
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(val, batch_size=64)


both = DataLoader(TensorDataset(torch.cat(answers(2, 512))), batch_size=64, shuffle=True)
L.seed_everything(0)
trainer = L.Trainer(max_epochs=4, default_root_dir="runs/writer")
trainer.fit(Writer(), both)
trainer.save_checkpoint("runs/writer.ckpt")

L.seed_everything(0)
trainer = L.Trainer(max_epochs=10, default_root_dir="runs/dpo")
trainer.fit(DPO(), *data())
