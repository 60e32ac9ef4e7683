import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORDS, DOCUMENTS = 400, 300


class Tower(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(WORDS, width), nn.Linear(width, width)

    def forward(self, words):
        return F.normalize(self.out(self.words(words)), dim=1)


class Retrieval(L.LightningModule):
    def __init__(self, width: int = 64, temperature: float = 0.1, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.query, self.document = Tower(width), Tower(width)
        self.register_buffer("catalogue", documents(), persistent=False)

    def forward(self, words):
        return self.query(words)

    def training_step(self, batch, batch_idx):
        words, wanted = batch
        scores = self.query(words) @ self.document(self.catalogue[wanted]).T / self.hparams.temperature
        own = torch.arange(len(words), device=words.device)
        loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
        self.log_dict({"train/loss": loss, "train/accuracy": (scores.argmax(1) == own).float().mean()})
        return loss

    def validation_step(self, batch, batch_idx):
        words, wanted = batch
        best = (self.query(words) @ self.document(self.catalogue).T).topk(10).indices
        hit = best == wanted[:, None]
        self.log_dict({"val/recall@1": hit[:, 0].float().mean(), "val/recall@10": hit.any(1).float().mean()})

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class OneOfEach:
    """Batches of rows in which no document occurs twice, each document `passes` times in an epoch."""

    def __init__(self, wanted, batch_size: int, passes: int):
        self.rows = [(wanted == document).nonzero().flatten() for document in range(DOCUMENTS)]
        self.batch_size, self.passes = batch_size, passes

    def __len__(self):
        return self.passes * -(-DOCUMENTS // self.batch_size)

    def __iter__(self):
        for _ in range(self.passes):
            for batch in torch.randperm(DOCUMENTS).split(self.batch_size):
                yield [int(self.rows[d][torch.randint(len(self.rows[d]), ())]) for d in batch]


def documents():
    return torch.randint(WORDS, (DOCUMENTS, 10), generator=torch.Generator().manual_seed(0))


def queries(per_document: int, seed: int):
    """Five words of a document, and the document's number."""
    rng = torch.Generator().manual_seed(seed)
    wanted = torch.arange(DOCUMENTS).repeat_interleave(per_document)
    places = torch.randint(10, (len(wanted), 5), generator=rng)
    return TensorDataset(documents()[wanted].gather(1, places), wanted)


class Queries(L.LightningDataModule):
    def __init__(self, batch_size: int = 50, passes: int = 4):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        train = queries(8, seed=1)
        sampler = OneOfEach(train.tensors[1], self.hparams.batch_size, self.hparams.passes)
        return DataLoader(train, batch_sampler=sampler)

    def val_dataloader(self):
        return DataLoader(queries(2, seed=2), batch_size=100)


L.seed_everything(0)
trainer = L.Trainer(max_epochs=6, default_root_dir="runs/retrieval")
trainer.fit(Retrieval(), Queries())
