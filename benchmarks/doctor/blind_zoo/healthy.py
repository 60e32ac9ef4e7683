"""Sixty healthy tasks of many kinds: MODELS maps a name to a function that gives (task, splits)."""

import copy
import math
from collections import OrderedDict
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import forge

MODELS = {}


def entry(function):
    MODELS[function.__name__] = function
    return function


def gen(seed):
    return torch.Generator().manual_seed(seed)


def split(*tensors, val=96, batch=24, shuffle=True, drop_last=False):
    train = TensorDataset(*(t[:-val] for t in tensors))
    held_out = TensorDataset(*(t[-val:] for t in tensors))
    return SimpleNamespace(
        train=DataLoader(train, batch_size=batch, shuffle=shuffle, drop_last=drop_last),
        val=DataLoader(held_out, batch_size=batch),
    )


def clusters(n=576, features=12, classes=4, seed=0, scale=1.3):
    g = gen(seed)
    y = torch.randint(classes, (n,), generator=g)
    x = scale * torch.randn(classes, features, generator=g)[y] + torch.randn(n, features, generator=g)
    return (x - x.mean(0)) / x.std(0), y


def surface(n=576, features=8, seed=0, noise=0.1):
    g = gen(seed)
    x = torch.randn(n, features, generator=g)
    y = torch.tanh(x @ torch.randn(features, generator=g) / 2) + 0.5 * x[:, 0] * x[:, 1]
    y = (y - y.mean()) / y.std()
    return x, y + noise * torch.randn(n, generator=g)


def chains(n=480, length=13, vocabulary=24, seed=0, sharp=2.5):
    g = gen(seed)
    table = torch.softmax(sharp * torch.randn(vocabulary, vocabulary, generator=g), -1)
    text = torch.zeros(n, length, dtype=torch.long)
    text[:, 0] = torch.randint(vocabulary, (n,), generator=g)
    for t in range(1, length):
        text[:, t] = torch.multinomial(table[text[:, t - 1]], 1, generator=g)[:, 0]
    return text


def pictures(n=480, classes=4, size=12, noise=0.8, seed=0):
    g = gen(seed)
    y = torch.randint(classes, (n,), generator=g)
    forms = F.interpolate(torch.randn(classes, 1, 4, 4, generator=g), size=size, mode="bilinear")
    x = forms[y] + noise * torch.randn(n, 1, size, size, generator=g)
    return (x - x.mean()) / x.std(), y


def hits(logits, y):
    return (logits.argmax(-1) == y).float().mean()


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for i, (a, b) in enumerate(zip(sizes, sizes[1:])):
        layers.append(nn.Linear(a, b))
        if i < len(sizes) - 2:
            layers.append(act())
    return nn.Sequential(*layers)


# ---------------------------------------------------------------- language and sequences


class TiedLM(forge.TaskModule):
    def __init__(self, vocabulary=24, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocabulary)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.gru(self.embed(tokens))[0])

    def training_step(self, batch):
        (text,) = batch
        logits = self(text[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def tied_gru_language_model():
    return TiedLM(), split(chains(seed=1), val=80, batch=20)


class CausalBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5
        later = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class CausalLM(forge.TaskModule):
    def __init__(self, vocabulary=24, length=12, dim=32):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, dim)
        self.pos = nn.Embedding(length, dim)
        self.blocks = nn.Sequential(CausalBlock(dim, 4), CausalBlock(dim, 4))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        for emb in (self.tok, self.pos):
            nn.init.normal_(emb.weight, std=0.02)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tok(tokens) + self.pos(places))))

    def training_step(self, batch):
        (text,) = batch
        logits = self(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        return {"loss": loss, "accuracy": hits(logits, text[:, 1:])}

    validation_step = training_step

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim >= 2]
        rest = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


@entry
def causal_transformer():
    return CausalLM(), split(chains(seed=2), val=80, batch=20)


class PackedLSTM(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, batch_first=True)
        self.out = nn.Linear(24, 3)

    def forward(self, tokens, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (h, _) = self.lstm(packed)
        return self.out(h[-1])

    def training_step(self, batch):
        tokens, lengths, y = batch
        logits = self(tokens, lengths)
        return {"loss": F.cross_entropy(logits, y), "accuracy": hits(logits, y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def packed_lstm():
    g = gen(3)
    n = 480
    y = torch.randint(3, (n,), generator=g)
    lengths = torch.randint(4, 13, (n,), generator=g)
    common = torch.randint(1, 15, (n, 12), generator=g)
    own = 15 + 5 * y[:, None] + torch.randint(5, (n, 12), generator=g)
    tokens = torch.where(torch.rand(n, 12, generator=g) < 0.35, own, common)
    tokens = tokens * (torch.arange(12) < lengths[:, None])
    return PackedLSTM(), split(tokens, lengths, y, val=96)


class MaskedPool(forge.TaskModule):
    """Mean of the word vectors, without the padding, and a head that starts at zero."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16, padding_idx=0)
        self.head = nn.Linear(16, 4)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, words):
        mask = (words != 0).float()[..., None]
        return self.head((self.embed(words) * mask).sum(1) / mask.sum(1).clamp(min=1))

    def training_step(self, batch):
        words, y = batch
        logits = self(words)
        return {"loss": F.cross_entropy(logits, y), "accuracy": hits(logits, y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-2)


@entry
def masked_bag_of_words():
    g = gen(4)
    n = 480
    y = torch.randint(4, (n,), generator=g)
    lengths = torch.randint(5, 16, (n,), generator=g)
    common = torch.randint(1, 20, (n, 15), generator=g)
    own = 20 + 5 * y[:, None] + torch.randint(5, (n, 15), generator=g)
    words = torch.where(torch.rand(n, 15, generator=g) < 0.4, own, common) * (torch.arange(15) < lengths[:, None])
    return MaskedPool(), split(words, y)


class MaskedLM(forge.TaskModule):
    def __init__(self, vocabulary=25, length=12, dim=32):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(length, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens):
        return self.head(self.encoder(self.tok(tokens) + self.pos))

    def training_step(self, batch):
        (tokens,) = batch
        hidden = torch.rand(tokens.shape, device=tokens.device) < 0.25
        hidden[:, 0] = True
        labels = tokens.masked_fill(~hidden, -100)
        logits = self(tokens.masked_fill(hidden, 0))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)}

    def validation_step(self, batch):
        (tokens,) = batch
        hidden = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) % 4 == 2
        logits = self(tokens.masked_fill(hidden, 0))
        return {"loss": F.cross_entropy(logits[hidden], tokens[hidden]), "accuracy": hits(logits[hidden], tokens[hidden])}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


@entry
def masked_language_model():
    return MaskedLM(), split(chains(n=640, length=12, seed=5, sharp=8.0) + 1, val=80, batch=20)


class Seq2Seq(forge.TaskModule):
    """Reverse a string of digits: GRU encoder, GRU decoder with attention, teacher forcing."""

    BOS = 10

    def __init__(self, dim=32):
        super().__init__()
        self.source = nn.Embedding(10, dim)
        self.target = nn.Embedding(11, dim)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.GRU(dim, dim, batch_first=True)
        self.query = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(2 * dim, 10)

    def forward(self, source, target):
        memory, state = self.encoder(self.source(source))
        begin = torch.full_like(target[:, :1], self.BOS)
        inputs = torch.cat([begin, target[:, :-1]], 1)
        states, _ = self.decoder(self.target(inputs), state)
        weights = (self.query(states) @ memory.transpose(1, 2) / memory.shape[-1] ** 0.5).softmax(-1)
        return self.out(torch.cat([states, weights @ memory], -1))

    def training_step(self, batch):
        source, target = batch
        logits = self(source, target)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), target.flatten()), "accuracy": hits(logits, target)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def attention_seq2seq():
    source = torch.randint(10, (600, 5), generator=gen(6))
    return Seq2Seq(), split(source, source.flip(1), val=96)


class CTC(forge.TaskModule):
    def __init__(self, symbols=5):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(8, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, symbols + 1, 1))

    def forward(self, frames):
        return self.net(frames).permute(2, 0, 1).log_softmax(-1)

    def training_step(self, batch):
        frames, symbols, lengths = batch
        log_probs = self(frames)
        steps = torch.full_like(lengths, log_probs.shape[0])
        return {"loss": F.ctc_loss(log_probs, symbols, steps, lengths, blank=0, zero_infinity=True)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@entry
def ctc_of_variable_length():
    g = gen(7)
    sounds = torch.randn(6, 8, generator=g)
    n = 400
    lengths = torch.randint(2, 5, (n,), generator=g)
    symbols = torch.randint(1, 6, (n, 4), generator=g)
    frames = 0.3 * torch.randn(n, 8, 16, generator=g)
    for i in range(n):
        for k in range(int(lengths[i])):
            frames[i, :, 4 * k : 4 * k + 2] += sounds[symbols[i, k]][:, None]
    symbols = symbols * (torch.arange(4) < lengths[:, None])
    return CTC(), split(frames, symbols, lengths, val=80, batch=20)


class CRF(forge.TaskModule):
    def __init__(self, words=20, tags=4):
        super().__init__()
        self.embed = nn.Embedding(words, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.emit = nn.Linear(16, tags)
        self.start = nn.Parameter(torch.zeros(tags))
        self.move = nn.Parameter(torch.zeros(tags, tags))

    def emissions(self, words):
        return self.emit(torch.relu(self.conv(self.embed(words).transpose(1, 2))).transpose(1, 2))

    def log_partition(self, e):
        alpha = self.start + e[:, 0]
        for t in range(1, e.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.move, 1) + e[:, t]
        return torch.logsumexp(alpha, 1)

    def score(self, e, tags):
        path = self.start[tags[:, 0]] + e.gather(2, tags[..., None]).squeeze(-1).sum(1)
        return path + self.move[tags[:, :-1], tags[:, 1:]].sum(1)

    def training_step(self, batch):
        words, tags = batch
        e = self.emissions(words)
        return {"loss": (self.log_partition(e) - self.score(e, tags)).mean()}

    def validation_step(self, batch):
        words, tags = batch
        e = self.emissions(words)
        best, back = self.start + e[:, 0], []
        for t in range(1, e.shape[1]):
            total, where = (best[:, :, None] + self.move).max(1)
            best = total + e[:, t]
            back.append(where)
        path = [best.argmax(1)]
        for where in reversed(back):
            path.append(where.gather(1, path[-1][:, None]).squeeze(1))
        guess = torch.stack(path[::-1], 1)
        return {
            "loss": (self.log_partition(e) - self.score(e, tags)).mean(),
            "accuracy": (guess == tags).float().mean(),
        }

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@entry
def crf_tagger():
    g = gen(8)
    tags = chains(n=480, length=8, vocabulary=4, seed=8, sharp=1.5)
    words = 5 * tags + torch.randint(5, tags.shape, generator=g)
    noise = torch.randint(20, tags.shape, generator=g)
    words = torch.where(torch.rand(tags.shape, generator=g) < 0.3, noise, words)
    return CRF(), split(words, tags)


class StatefulRNN(forge.TaskModule):
    """Ten parallel streams, read in order: the state goes on from batch to batch, without its graph."""

    def __init__(self, streams=10, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)
        self.register_buffer("state", torch.zeros(1, streams, hidden))

    def training_step(self, batch):
        x, y, first = batch
        state = torch.zeros_like(self.state) if bool(first.any()) else self.state.clone()
        out, last = self.rnn(x, state)
        self.state.copy_(last.detach())
        return {"loss": F.mse_loss(self.out(out), y)}

    def validation_step(self, batch):
        x, y, _ = batch
        out, _ = self.rnn(x)
        return {"loss": F.mse_loss(self.out(out)[:, 6:], y[:, 6:])}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def stateful_streams():
    g = gen(9)
    streams, steps, window = 10, 320, 12
    x = torch.randn(streams, steps + 1, generator=g)
    y = torch.zeros_like(x)
    for t in range(1, steps + 1):
        y[:, t] = 0.8 * y[:, t - 1] + 0.5 * x[:, t]
    chunks = []
    for start in range(0, steps - window, window):
        part = slice(start, start + window)
        for s in range(streams):
            chunks.append((x[s, part, None], y[s, part, None], torch.tensor(start == 0)))
    cut = 20 * streams
    return StatefulRNN(), SimpleNamespace(
        train=DataLoader(chunks[:cut], batch_size=streams), val=DataLoader(chunks[cut:], batch_size=streams)
    )


class CausalConv(nn.Module):
    def __init__(self, a, b, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(a, b, 3, dilation=dilation))

    def forward(self, x):
        return torch.relu(self.conv(F.pad(x, (self.pad, 0))))


class TCN(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(CausalConv(1, 16, 1), CausalConv(16, 16, 2), CausalConv(16, 16, 4))
        self.out = nn.Conv1d(16, 1, 1)

    def training_step(self, batch):
        (series,) = batch
        guess = self.out(self.body(series[:, None, :-1])).squeeze(1)
        return {"loss": F.mse_loss(guess[:, 8:], series[:, 9:])}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@entry
def temporal_convolutions():
    g = gen(10)
    t = torch.arange(40.0)
    f = 0.2 + 0.6 * torch.rand(400, 1, generator=g)
    series = torch.sin(f * t + 6.28 * torch.rand(400, 1, generator=g)) + 0.1 * torch.randn(400, 40, generator=g)
    return TCN(), split(series, val=80, batch=20)


# ---------------------------------------------------------------- transfer, teachers, averages


class FrozenFeatures(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(64, 4)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            h = self.backbone(x)
        return self.head(h)

    def training_step(self, batch):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": hits(logits, y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.head.parameters(), lr=5e-3)


@entry
def frozen_backbone():
    return FrozenFeatures(), split(*clusters(seed=11))


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


class LoRA(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            LoRALinear(nn.Linear(12, 48)), nn.ReLU(), LoRALinear(nn.Linear(48, 48)), nn.ReLU(), nn.Linear(48, 4)
        )

    def training_step(self, batch):
        x, y = batch
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": hits(logits, y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=5e-3)


@entry
def lora_adapters():
    return LoRA(), split(*clusters(seed=12))


class BYOL(forge.TaskModule):
    def __init__(self, decay=0.97):
        super().__init__()
        self.decay = decay
        self.online = nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 16))
        self.predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    @staticmethod
    def view(x):
        return x * (1 + 0.1 * torch.randn_like(x)) + 0.3 * torch.randn_like(x)

    def loss(self, a, b):
        guess = F.normalize(self.predictor(self.online(a)), dim=1)
        with torch.no_grad():
            wanted = F.normalize(self.target(b), dim=1)
        return 2 - 2 * (guess * wanted).sum(1).mean()

    def training_step(self, batch):
        (x,) = batch
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.online.parameters()):
                old.lerp_(new, 1 - self.decay)
        a, b = self.view(x), self.view(x)
        return {"loss": 0.5 * (self.loss(a, b) + self.loss(b, a))}

    def validation_step(self, batch):
        (x,) = batch
        z = F.normalize(self.online(x), dim=1)
        return {"loss": self.loss(self.view(x), self.view(x)), "spread": z.std(0).mean()}

    def configure_optimizers(self):
        return torch.optim.Adam([*self.online.parameters(), *self.predictor.parameters()], lr=3e-3)


@entry
def byol_with_moving_target():
    x, _ = clusters(n=640, features=16, classes=8, seed=13)
    return BYOL(), split(x, val=128, batch=32)


class MeanTeacher(forge.TaskModule):
    def __init__(self, decay=0.9):
        super().__init__()
        self.decay = decay
        self.student = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 4))
        self.teacher = copy.deepcopy(self.student)
        for p in self.teacher.parameters():
            p.requires_grad = False

    def training_step(self, batch):
        x, y, known = batch
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.student.parameters()):
                t.mul_(self.decay).add_(s, alpha=1 - self.decay)
            self.teacher.eval()
            wanted = self.teacher(x).softmax(1)
        logits = self.student(x + 0.1 * torch.randn_like(x))
        supervised = (F.cross_entropy(logits, y, reduction="none") * known).sum() / known.sum().clamp(min=1)
        return {"loss": supervised + 0.5 * F.mse_loss(logits.softmax(1), wanted), "supervised": supervised.detach()}

    def validation_step(self, batch):
        x, y, _ = batch
        logits = self.teacher(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": hits(logits, y)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.student.parameters(), lr=5e-3)


@entry
def mean_teacher():
    x, y = clusters(n=640, seed=14)
    known = (torch.rand(640, generator=gen(14)) < 0.4).float()
    return MeanTeacher(), split(x, y, known, val=128, batch=32)


class Distil(forge.TaskModule):
    def __init__(self, teacher, t=3.0, mix=0.7):
        super().__init__()
        self.teacher = teacher.requires_grad_(False).eval()
        self.student = mlp(12, 16, 4)
        self.t, self.mix = t, mix

    def training_step(self, batch):
        x, y = batch
        with torch.no_grad():
            wanted = (self.teacher(x) / self.t).log_softmax(1)
        logits = self.student(x)
        soft = F.kl_div((logits / self.t).log_softmax(1), wanted, reduction="batchmean", log_target=True) * self.t**2
        return {"loss": self.mix * soft + (1 - self.mix) * F.cross_entropy(logits, y), "soft": soft.detach()}

    def validation_step(self, batch):
        x, y = batch
        logits = self.student(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": hits(logits, y)}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.student.parameters(), lr=5e-3)


class Centroids(nn.Module):
    def __init__(self, x, y):
        super().__init__()
        self.register_buffer("centres", torch.stack([x[y == k].mean(0) for k in range(4)]))

    def forward(self, x):
        return -0.5 * torch.cdist(x, self.centres) ** 2


@entry
def distillation():
    x, y = clusters(seed=15)
    return Distil(Centroids(x[:480], y[:480])), split(x, y)


class WeightAverage(forge.TaskModule):
    """Validates the running average of the weights, as SWA does."""

    def __init__(self):
        super().__init__()
        self.net = mlp(8, 48, 48, 1)
        self.average = AveragedModel(self.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95))

    def training_step(self, batch):
        x, y = batch
        self.average.update_parameters(self.net)
        return {"loss": F.mse_loss(self.net(x).squeeze(1), y)}

    def validation_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self.average(x).squeeze(1), y)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)


@entry
def averaged_weights():
    return WeightAverage(), split(*surface(seed=16))


class RunningNorm(nn.Module):
    """Standardises its inputs with statistics gathered over training, kept in buffers."""

    def __init__(self, size, rate=0.05):
        super().__init__()
        self.rate = rate
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                rate = torch.where(self.ready, self.rate, 1.0)
                self.mean.lerp_(x.mean(0), rate)
                self.var.lerp_(x.var(0), rate)
                self.ready.fill_(True)
        return (x - self.mean) / (self.var + 1e-5).sqrt()


class InputNorm(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.norm = RunningNorm(8)
        self.net = mlp(8, 48, 1)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.mse_loss(self.net(self.norm(x)).squeeze(1), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def running_input_normalisation():
    x, y = surface(seed=17)
    scale = torch.tensor([1.0, 50.0, 0.1, 1000.0, 5.0, 2.0, 0.01, 300.0])
    return InputNorm(), split(x * scale + 2 * scale, y)


# ---------------------------------------------------------------- generative


class RingGAN(forge.TaskModule):
    def __init__(self, noise=4):
        super().__init__()
        self.noise = noise
        self.generator = mlp(noise, 48, 48, 2)
        self.discriminator = mlp(2, 48, 48, 1, act=lambda: nn.LeakyReLU(0.2))

    def fake(self, real):
        return self.generator(torch.randn(len(real), self.noise, device=real.device))

    def training_step(self, batch, name):
        (real,) = batch
        if name == "discriminator":
            yes, no = self.discriminator(real), self.discriminator(self.fake(real).detach())
            return {"loss": F.softplus(-yes).mean() + F.softplus(no).mean()}
        return {"loss": F.softplus(-self.discriminator(self.fake(real))).mean()}

    def validation_step(self, batch):
        (real,) = batch
        return {"radius_error": (self.fake(real).norm(dim=1) - 1).abs().mean()}

    def configure_optimizers(self):
        return {
            "discriminator": torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99)),
            "generator": torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.99)),
        }


def ring(n, seed):
    g = gen(seed)
    a = 2 * math.pi * torch.rand(n, generator=g)
    return torch.stack([a.cos(), a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)


@entry
def gan_on_a_ring():
    return RingGAN(), split(ring(640, 18), val=128, batch=32)


class WassersteinGAN(RingGAN):
    def training_step(self, batch, name):
        (real,) = batch
        if name == "generator":
            return {"loss": -self.discriminator(self.fake(real)).mean()}
        fake = self.fake(real).detach()
        mix = torch.rand(len(real), 1, device=real.device)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        gap = self.discriminator(real).mean() - self.discriminator(fake).mean()
        return {"loss": 2 * penalty - gap, "gap": gap.detach(), "penalty": penalty.detach()}

    def configure_optimizers(self):
        return {
            "discriminator": torch.optim.Adam(self.discriminator.parameters(), lr=3e-3, betas=(0.5, 0.9)),
            "generator": torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        }


@entry
def wasserstein_gradient_penalty():
    return WassersteinGAN(), split(ring(640, 19), val=128, batch=32)


class VAE(forge.TaskModule):
    def __init__(self, latent=3, anneal=60):
        super().__init__()
        self.anneal = anneal
        self.encoder, self.decoder = mlp(24, 48, 2 * latent), mlp(latent, 48, 24)
        self.register_buffer("step", torch.zeros(()))

    def terms(self, x):
        mean, log_var = self.encoder(x).chunk(2, 1)
        z = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        reconstruction = 0.5 * (self.decoder(z) - x).square().sum(1).mean() / 0.1
        kl = 0.5 * (mean.square() + log_var.exp() - log_var - 1).sum(1).mean()
        return reconstruction, kl

    def training_step(self, batch):
        self.step += 1
        reconstruction, kl = self.terms(batch[0])
        beta = (self.step / self.anneal).clamp(max=1)
        return {"loss": reconstruction + beta * kl, "kl": kl.detach()}

    def validation_step(self, batch):
        reconstruction, kl = self.terms(batch[0])
        return {"loss": reconstruction + kl}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def manifold(n=576, dims=3, features=24, seed=0):
    g = gen(seed)
    x = torch.tanh(torch.randn(n, dims, generator=g) @ torch.randn(dims, features, generator=g))
    return (x + 0.1 * torch.randn(n, features, generator=g)) / x.std()


@entry
def annealed_vae():
    return VAE(), split(manifold(seed=20))


class VQ(forge.TaskModule):
    def __init__(self, codes=24, dim=6, decay=0.9):
        super().__init__()
        self.decay = decay
        self.encoder, self.decoder = mlp(24, 48, dim), mlp(dim, 48, 24)
        self.register_buffer("book", 0.3 * torch.randn(codes, dim))

    def quantise(self, z):
        index = torch.cdist(z.detach(), self.book).argmin(1)
        q = self.book[index]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(index, len(self.book)).to(z)
                used = hot.sum(0)
                mean = hot.T @ z / used.clamp(min=1)[:, None]
                moved = self.decay * self.book + (1 - self.decay) * mean
                self.book.copy_(torch.where(used[:, None] > 0, moved, self.book))
        return z + (q - z).detach(), F.mse_loss(z, q)

    def training_step(self, batch):
        (x,) = batch
        q, commitment = self.quantise(self.encoder(x))
        reconstruction = F.mse_loss(self.decoder(q), x)
        return {"loss": reconstruction + 0.25 * commitment, "reconstruction": reconstruction.detach()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@entry
def vector_quantised_autoencoder():
    x, _ = clusters(features=24, classes=10, seed=21, scale=2.0)
    return VQ(), split(x)


class BinaryCodes(forge.TaskModule):
    def __init__(self, bits=12):
        super().__init__()
        self.encoder, self.decoder = mlp(24, 48, bits), mlp(bits, 48, 24)

    def forward(self, x):
        soft = torch.tanh(self.encoder(x))
        code = soft + (torch.where(soft > 0, 1.0, -1.0) - soft).detach()
        return self.decoder(code)

    def training_step(self, batch):
        return {"loss": F.mse_loss(self(batch[0]), batch[0])}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@entry
def straight_through_codes():
    return BinaryCodes(), split(manifold(seed=22))


class GumbelAutoencoder(forge.TaskModule):
    def __init__(self, groups=6, ways=4):
        super().__init__()
        self.groups, self.ways = groups, ways
        self.encoder, self.decoder = mlp(24, 48, groups * ways), mlp(groups * ways, 48, 24)
        self.register_buffer("temperature", torch.tensor(1.5))

    def training_step(self, batch):
        (x,) = batch
        self.temperature.mul_(0.998).clamp_(min=0.5)
        logits = self.encoder(x).view(-1, self.groups, self.ways)
        code = F.gumbel_softmax(logits, tau=self.temperature, hard=True)
        return {"loss": F.mse_loss(self.decoder(code.flatten(1)), x)}

    def validation_step(self, batch):
        (x,) = batch
        logits = self.encoder(x).view(-1, self.groups, self.ways)
        code = F.one_hot(logits.argmax(-1), self.ways).to(x)
        return {"loss": F.mse_loss(self.decoder(code.flatten(1)), x)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@entry
def gumbel_softmax_codes():
    return GumbelAutoencoder(), split(manifold(seed=23))


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = mlp(1, 24, 24, 2, act=nn.Tanh)
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        scale, shift = self.net(a).chunk(2, 1)
        scale = torch.tanh(scale)
        b = b * scale.exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], 1), scale.sum(1)


class Flow(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(bool(i % 2)) for i in range(6))

    def training_step(self, batch):
        (x,) = batch
        total = 0.0
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        log_prob = -0.5 * x.square().sum(1) - math.log(2 * math.pi) + total
        return {"loss": -log_prob.mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def coupling_flow():
    return Flow(), split(1.5 * ring(640, 24), val=128, batch=32)


class Diffusion(forge.TaskModule):
    def __init__(self, steps=50):
        super().__init__()
        self.steps = steps
        self.net = mlp(2 + 8, 64, 64, 2, act=nn.SiLU)
        beta = torch.linspace(1e-3, 0.2, steps)
        self.register_buffer("signal", torch.cumprod(1 - beta, 0))

    def forward(self, x, t):
        angle = (t[:, None] / self.steps) * 2.0 ** torch.arange(4, device=x.device) * math.pi
        return self.net(torch.cat([x, angle.sin(), angle.cos()], 1))

    def training_step(self, batch):
        (x,) = batch
        t = torch.randint(self.steps, (len(x),), device=x.device)
        noise = torch.randn_like(x)
        keep = self.signal[t][:, None]
        guess = self(keep.sqrt() * x + (1 - keep).sqrt() * noise, t)
        return {"loss": F.mse_loss(guess, noise)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@entry
def toy_diffusion():
    return Diffusion(), split(1.4 * ring(800, 25), val=160, batch=40)


class SparseAutoencoder(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(24, 64), nn.Linear(64, 24)

    def training_step(self, batch):
        (x,) = batch
        code = torch.relu(self.encoder(x))
        reconstruction = F.mse_loss(self.decoder(code), x)
        return {"loss": reconstruction + 0.01 * code.abs().mean(), "reconstruction": reconstruction.detach()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@entry
def sparse_autoencoder():
    return SparseAutoencoder(), split(manifold(seed=26))


# ---------------------------------------------------------------- classification, and how its data comes


class Classifier(forge.TaskModule):
    def __init__(self, net, lr=3e-3, smoothing=0.0):
        super().__init__()
        self.net, self.lr, self.smoothing = net, lr, smoothing

    def training_step(self, batch):
        x, y = batch
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y, label_smoothing=self.smoothing), "accuracy": hits(logits, y)}

    def validation_step(self, batch):
        x, y = batch
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": hits(logits, y)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@entry
def batch_norm_with_batches_of_four():
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64, 4),
    )
    return Classifier(net, lr=2e-3), split(*pictures(n=256, seed=27), val=64, batch=4)


@entry
def easy_samples_first():
    g = gen(28)
    y = torch.randint(4, (576,), generator=g)
    centres = 1.2 * torch.randn(4, 12, generator=g)
    noise = 0.4 + 1.2 * torch.rand(576, 1, generator=g)
    x = centres[y] + noise * torch.randn(576, 12, generator=g)
    order = torch.cat([noise[:480, 0].argsort(), torch.arange(480, 576)])
    return Classifier(mlp(12, 48, 4)), split(x[order], y[order], shuffle=False)


@entry
def label_smoothing():
    return Classifier(mlp(12, 64, 4, act=nn.GELU), smoothing=0.1), split(*clusters(seed=29))


class Weighted(forge.TaskModule):
    def __init__(self, counts):
        super().__init__()
        self.net = mlp(12, 32, 3)
        self.register_buffer("weight", counts.sum() / (len(counts) * counts))

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.cross_entropy(self.net(x), y, weight=self.weight)}

    def validation_step(self, batch):
        x, y = batch
        guess = self.net(x).argmax(1)
        recalls = [(guess[y == k] == k).float().mean() for k in range(3) if bool((y == k).any())]
        return {"loss": F.cross_entropy(self.net(x), y, weight=self.weight), "balanced": torch.stack(recalls).mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def weighted_rare_classes():
    g = gen(30)
    y = torch.multinomial(torch.tensor([0.8, 0.14, 0.06]), 800, replacement=True, generator=g)
    x = 0.8 * torch.randn(3, 12, generator=g)[y] + torch.randn(800, 12, generator=g)
    counts = torch.bincount(y[:640], minlength=3).float()
    return Weighted(counts), split(x, y, val=160, batch=40)


class Mixup(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = mlp(12, 64, 64, 4)

    def training_step(self, batch):
        x, y = batch
        amount = float(torch.distributions.Beta(0.4, 0.4).sample())
        other = torch.randperm(len(x), device=x.device)
        logits = self.net(amount * x + (1 - amount) * x[other])
        loss = amount * F.cross_entropy(logits, y) + (1 - amount) * F.cross_entropy(logits, y[other])
        return {"loss": loss}

    def validation_step(self, batch):
        x, y = batch
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": hits(logits, y)}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


@entry
def mixup():
    return Mixup(), split(*clusters(seed=31))


class AdversarialTraining(forge.TaskModule):
    def __init__(self, size=0.2):
        super().__init__()
        self.size = size
        self.net = mlp(12, 64, 4)

    def training_step(self, batch):
        x, y = batch
        probe = x.detach().clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(F.cross_entropy(self.net(probe), y), probe)
        hostile = (x + self.size * slope.sign()).detach()
        logits = self.net(torch.cat([x, hostile]))
        return {"loss": F.cross_entropy(logits, torch.cat([y, y]))}

    def validation_step(self, batch):
        x, y = batch
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": hits(logits, y)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@entry
def adversarial_training():
    return AdversarialTraining(), split(*clusters(seed=32))


class Dice(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(),
            nn.Conv2d(12, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.Conv2d(12, 1, 1),
        )

    @staticmethod
    def overlap(p, mask):
        return (2 * (p * mask).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)

    def training_step(self, batch):
        image, mask = batch
        if torch.rand(()) < 0.5:
            image, mask = image.flip(-1), mask.flip(-1)
        logits = self.net(image)
        dice = 1 - self.overlap(logits.sigmoid(), mask).mean()
        return {"loss": F.binary_cross_entropy_with_logits(logits, mask) + dice}

    def validation_step(self, batch):
        image, mask = batch
        return {"dice": self.overlap((self.net(image) > 0).float(), mask).mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def dice_segmentation():
    g = gen(33)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    centre = 3 + 10 * torch.rand(320, 2, 1, 1, generator=g)
    mask = ((yy - centre[:, 0]) ** 2 + (xx - centre[:, 1]) ** 2 < 12).float()[:, None]
    image = mask - 0.2 + 0.5 * torch.randn(320, 1, 16, 16, generator=g)
    return Dice(), split(image, mask, val=64, batch=16)


class Experts(forge.TaskModule):
    def __init__(self, experts=4, width=24):
        super().__init__()
        self.gate = nn.Linear(12, experts)
        self.experts = nn.ModuleList(mlp(12, width, 4) for _ in range(experts))

    def forward(self, x):
        gates = self.gate(x).softmax(1)
        answers = torch.stack([expert(x) for expert in self.experts], 1)
        return (gates[..., None] * answers).sum(1), gates

    def training_step(self, batch):
        x, y = batch
        logits, gates = self(x)
        balance = len(self.experts) * gates.mean(0).square().sum()
        return {"loss": F.cross_entropy(logits, y) + 0.01 * balance, "accuracy": hits(logits, y)}

    def validation_step(self, batch):
        x, y = batch
        logits, _ = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": hits(logits, y)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@entry
def mixture_of_experts():
    return Experts(), split(*clusters(seed=34))


class Restarts(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        return optimizer, CosineAnnealingWarmRestarts(optimizer, T_0=40, T_mult=2, eta_min=1e-3)


@entry
def warm_restarts():
    return Restarts(mlp(12, 48, 4)), split(*clusters(seed=35))


class OneCycle(Classifier):
    """Up, down, and then flat, over 400 updates."""

    def configure_optimizers(self):
        def height(step):
            if step < 60:
                return 0.1 + 0.9 * step / 60
            return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 60) / 340)))

        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=1e-3)
        return optimizer, LambdaLR(optimizer, height)


@entry
def one_cycle():
    return OneCycle(mlp(12, 48, 48, 4, act=nn.SiLU)), split(*clusters(seed=36))


class LayerwiseRates(Classifier):
    def configure_optimizers(self):
        layers = [m for m in self.net if isinstance(m, nn.Linear)]
        last = len(layers) - 1
        return torch.optim.AdamW(
            [{"params": m.parameters(), "lr": 5e-3 * 0.6 ** (last - i)} for i, m in enumerate(layers)]
        )


@entry
def layerwise_rates():
    return LayerwiseRates(mlp(12, 48, 48, 48, 4)), split(*clusters(seed=37))


# ---------------------------------------------------------------- embeddings and sets


class Embedder(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = mlp(16, 48, 12)

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class TripletTask(Embedder):
    def training_step(self, batch):
        anchor, positive, negative = (self(x) for x in batch)
        near, far = (anchor - positive).norm(dim=1), (anchor - negative).norm(dim=1)
        return {"loss": F.relu(near - far + 0.3).mean(), "right": (near < far).float().mean()}

    validation_step = training_step


@entry
def triplets():
    g = gen(38)
    centres = torch.randn(12, 16, generator=g)
    k = torch.randint(12, (576,), generator=g)
    other = (k + torch.randint(1, 12, (576,), generator=g)) % 12
    draw = lambda which: centres[which] + 0.9 * torch.randn(576, 16, generator=g)
    return TripletTask(), split(draw(k), draw(k), draw(other))


class NTXent(Embedder):
    def training_step(self, batch):
        a, b = (self(x) for x in batch)
        z = torch.cat([a, b])
        n = len(a)
        sims = (z @ z.T / 0.2).masked_fill(torch.eye(2 * n, dtype=torch.bool, device=z.device), float("-inf"))
        partner = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
        return {"loss": F.cross_entropy(sims, partner), "accuracy": hits(sims, partner)}

    validation_step = training_step


@entry
def in_batch_contrast():
    g = gen(39)
    hidden = torch.randn(640, 5, generator=g) @ torch.randn(5, 16, generator=g) / 2
    views = [hidden + 0.4 * torch.randn(640, 16, generator=g) for _ in range(2)]
    return NTXent(), split(*views, val=128, batch=32)


class ArcFace(Embedder):
    def __init__(self, classes=8, margin=0.2, scale=12.0):
        super().__init__()
        self.margin, self.scale = margin, scale
        self.centres = nn.Parameter(torch.randn(classes, 12))

    def cosines(self, x):
        return self(x) @ F.normalize(self.centres, dim=1).T

    def training_step(self, batch):
        x, y = batch
        angle = self.cosines(x).clamp(-1 + 1e-6, 1 - 1e-6).acos()
        wanted = F.one_hot(y, len(self.centres)).bool()
        logits = self.scale * torch.where(wanted, (angle + self.margin).clamp(max=math.pi), angle).cos()
        return {"loss": F.cross_entropy(logits, y)}

    def validation_step(self, batch):
        x, y = batch
        logits = self.scale * self.cosines(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": hits(logits, y)}


@entry
def additive_angular_margin():
    return ArcFace(), split(*clusters(n=640, features=16, classes=8, seed=40), val=128, batch=32)


class BPR(forge.TaskModule):
    def __init__(self, users=60, items=50, dim=12):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.bias = nn.Embedding(items, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def score(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.bias(i).squeeze(-1)

    def training_step(self, batch):
        user, liked, other = batch
        gap = self.score(user, liked) - self.score(user, other)
        return {"loss": -F.logsigmoid(gap).mean(), "auc": (gap > 0).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-2, weight_decay=1e-5)


@entry
def pairwise_ranking():
    g = gen(41)
    p, q = torch.randn(60, 3, generator=g), torch.randn(50, 3, generator=g)
    user = torch.randint(60, (2000,), generator=g)
    a, b = torch.randint(50, (2, 2000), generator=g)
    a_wins = (p[user] * q[a]).sum(1) > (p[user] * q[b]).sum(1)
    keep = a != b
    liked, other = torch.where(a_wins, a, b)[keep], torch.where(a_wins, b, a)[keep]
    return BPR(), split(user[keep], liked, other, val=320, batch=40)


class DeepSets(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.each, self.all = mlp(3, 32, 32), mlp(32, 32, 1)

    def forward(self, points, mask):
        return self.all((self.each(points) * mask[..., None]).sum(1) / 4).squeeze(1)

    def training_step(self, batch):
        points, mask, y = batch
        return {"loss": F.mse_loss(self(points, mask), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@entry
def sums_over_sets():
    g = gen(42)
    points = torch.randn(576, 8, 3, generator=g)
    mask = (torch.arange(8) < torch.randint(2, 9, (576, 1), generator=g)).float()
    y = (points[..., 0] * points[..., 1] * mask).sum(1) + (points[..., 2].abs() * mask).sum(1)
    return DeepSets(), split(points * mask[..., None], mask, (y - y.mean()) / y.std())


class GraphNet(forge.TaskModule):
    def __init__(self, x, adjacency, y):
        super().__init__()
        self.register_buffer("x", x)
        self.register_buffer("adjacency", adjacency)
        self.register_buffer("y", y)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self):
        h = F.dropout(torch.relu(self.adjacency @ self.first(self.x)), 0.3, self.training)
        return self.adjacency @ self.second(h)

    def training_step(self, nodes):
        logits = self()[nodes]
        return {"loss": F.cross_entropy(logits, self.y[nodes]), "accuracy": hits(logits, self.y[nodes])}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, weight_decay=5e-4)


@entry
def graph_convolution_on_node_splits():
    g = gen(43)
    y = torch.randint(4, (240,), generator=g)
    edges = torch.rand(240, 240, generator=g) < torch.where(y[:, None] == y, 0.06, 0.01)
    edges = (edges | edges.T | torch.eye(240, dtype=torch.bool)).float()
    d = edges.sum(1).rsqrt()
    x = 0.6 * torch.randn(4, 16, generator=g)[y] + torch.randn(240, 16, generator=g)
    return GraphNet(x, d[:, None] * edges * d, y), SimpleNamespace(
        train=DataLoader(range(160), batch_size=16, shuffle=True), val=DataLoader(range(160, 240), batch_size=16)
    )


# ---------------------------------------------------------------- regression and likelihoods


class Regressor(forge.TaskModule):
    """A net and a loss of its output and the target."""

    def __init__(self, net, loss, lr=3e-3):
        super().__init__()
        self.net, self.loss, self.lr = net, loss, lr

    def training_step(self, batch):
        x, y = batch
        return {"loss": self.loss(self.net(x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@entry
def tanh_output_of_scaled_targets():
    x, y = surface(seed=44)
    y = (0.9 * y / y.abs().max())[:, None]
    return Regressor(nn.Sequential(mlp(8, 48, 1), nn.Tanh()), F.mse_loss), split(x, y)


@entry
def poisson_counts():
    g = gen(45)
    x = torch.randn(576, 8, generator=g)
    y = torch.poisson(torch.exp(1 + 0.3 * x @ torch.randn(8, 1, generator=g)), generator=g)
    return Regressor(mlp(8, 32, 1), nn.PoissonNLLLoss(log_input=True)), split(x, y)


@entry
def gamma_amounts():
    g = gen(46)
    x = torch.randn(576, 8, generator=g)
    mean = torch.exp(1 + 0.3 * x @ torch.randn(8, 1, generator=g))
    noise = torch.rand(576, 1, 3, generator=g).log().neg().sum(-1) / 3
    return Regressor(mlp(8, 32, 1), lambda log_mean, y: (y * (-log_mean).exp() + log_mean).mean()), split(x, mean * noise)


def pinball(guess, y, levels=(0.1, 0.5, 0.9)):
    error = y[:, None] - guess
    q = torch.tensor(levels, device=y.device)
    return torch.maximum(q * error, (q - 1) * error).mean()


@entry
def three_quantiles():
    return Regressor(mlp(8, 48, 3), pinball, lr=5e-3), split(*surface(seed=47, noise=0.4))


class Heteroscedastic(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = mlp(4, 48, 48, 2, act=nn.Tanh)

    def training_step(self, batch):
        x, y = batch
        mean, log_var = self.net(x).unbind(1)
        log_var = log_var.clamp(-6, 6)
        nll = 0.5 * (log_var + (y - mean).square() * (-log_var).exp()).mean()
        return {"loss": nll, "mse": F.mse_loss(mean, y).detach()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@entry
def mean_and_variance():
    g = gen(48)
    x = torch.randn(576, 4, generator=g)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] + (0.1 + 0.4 * x[:, 2].sigmoid()) * torch.randn(576, generator=g)
    return Heteroscedastic(), split(x, y)


class MixtureDensity(forge.TaskModule):
    def __init__(self, parts=4):
        super().__init__()
        self.net = mlp(1, 48, 48, 3 * parts, act=nn.Tanh)

    def training_step(self, batch):
        x, y = batch
        weight, mean, log_std = self.net(x).chunk(3, 1)
        parts = Normal(mean, log_std.clamp(-4, 3).exp()).log_prob(y)
        return {"loss": -torch.logsumexp(weight.log_softmax(1) + parts, 1).mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def mixture_density():
    g = gen(49)
    x = 2 * torch.rand(640, 1, generator=g) - 1
    y = torch.where(torch.rand(640, 1, generator=g) < 0.5, 1.0, -1.0) * (0.5 + x.abs())
    return MixtureDensity(), split(x, y + 0.1 * torch.randn(640, 1, generator=g), val=128, batch=32)


class Ordinal(forge.TaskModule):
    """One score and increasing thresholds: the chance that the grade is above each."""

    def __init__(self, grades=5):
        super().__init__()
        self.score = mlp(8, 32, 1)
        self.first = nn.Parameter(torch.tensor(-1.0))
        self.gaps = nn.Parameter(torch.zeros(grades - 2))

    def forward(self, x):
        cuts = torch.cat([self.first[None], self.first + F.softplus(self.gaps).cumsum(0)])
        return self.score(x) - cuts

    def training_step(self, batch):
        x, grade = batch
        logits = self(x)
        above = (grade[:, None] > torch.arange(logits.shape[1], device=x.device)).float()
        off = ((logits > 0).sum(1) - grade).abs().float().mean()
        return {"loss": F.binary_cross_entropy_with_logits(logits, above), "off": off}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@entry
def ordinal_grades():
    x, y = surface(seed=50)
    return Ordinal(), split(x, torch.bucketize(y, torch.tensor([-1.0, -0.3, 0.3, 1.0])))


class Cox(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.risk = mlp(6, 24, 1, act=nn.Tanh)

    def training_step(self, batch):
        x, time, event = batch
        risk = self.risk(x).squeeze(1)
        order = time.argsort(descending=True)
        risk, event = risk[order], event[order]
        at_risk = torch.logcumsumexp(risk, 0)
        return {"loss": -((risk - at_risk) * event).sum() / event.sum().clamp(min=1)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3, weight_decay=1e-4)


@entry
def cox_survival():
    g = gen(51)
    x = torch.randn(640, 6, generator=g)
    failure = -torch.rand(640, generator=g).log() * torch.exp(-x @ torch.randn(6, generator=g))
    end = -torch.rand(640, generator=g).log() * 3
    return Cox(), split(x, torch.minimum(failure, end), (failure <= end).float(), val=128, batch=32)


class Imputer(forge.TaskModule):
    """Fill in values: the inputs have holes and a mask, the loss counts only the held-back known values."""

    def __init__(self):
        super().__init__()
        self.net = mlp(48, 64, 24)

    def loss(self, x, known, shown):
        guess = self.net(torch.cat([x * shown, shown], 1))
        asked = known * (1 - shown)
        return ((guess - x).square() * asked).sum() / asked.sum().clamp(min=1)

    def training_step(self, batch):
        x, known = batch
        shown = known * (torch.rand_like(x) < 0.7)
        return {"loss": self.loss(x, known, shown)}

    def validation_step(self, batch):
        x, known = batch
        shown = known * (torch.arange(x.shape[1], device=x.device) % 4 != 0)
        return {"loss": self.loss(x, known, shown)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@entry
def masked_imputation():
    x = manifold(seed=52)
    known = (torch.rand(x.shape, generator=gen(52)) < 0.8).float()
    return Imputer(), split(x * known, known)


@entry
def spectral_norm_regression():
    norm = nn.utils.parametrizations.spectral_norm
    net = nn.Sequential(
        norm(nn.Linear(8, 64)), nn.LeakyReLU(0.2), norm(nn.Linear(64, 64)), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )
    x, y = surface(seed=53)
    return Regressor(net, F.mse_loss, lr=5e-3), split(x, y[:, None])


class Hypernetwork(forge.TaskModule):
    """A net of the context writes the weights of a small net of the input."""

    def __init__(self, width=8):
        super().__init__()
        self.width = width
        self.hyper = mlp(2, 32, 2 * width + width + 1)
        nn.init.normal_(self.hyper[-1].weight, std=0.1)

    def forward(self, context, x):
        w = self.width
        a, b, c, d = self.hyper(context).split([w, w, w, 1], 1)
        return (torch.tanh(x * a + b) * c).sum(1, keepdim=True) + d

    def training_step(self, batch):
        context, x, y = batch
        return {"loss": F.mse_loss(self(context, x), y)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def hypernetwork():
    g = gen(54)
    context, x = torch.randn(640, 2, generator=g), torch.randn(640, 1, generator=g)
    y = torch.tanh(context[:, :1] * x) + 0.5 * context[:, 1:]
    return Hypernetwork(), split(context, x, y, val=128, batch=32)


class UncertaintyWeights(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(mlp(8, 48, 32), nn.ReLU())
        self.number, self.kind = nn.Linear(32, 1), nn.Linear(32, 3)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def training_step(self, batch):
        x, number, kind = batch
        h = self.trunk(x)
        losses = torch.stack([0.5 * F.mse_loss(self.number(h).squeeze(1), number), F.cross_entropy(self.kind(h), kind)])
        loss = ((-self.log_vars).exp() * losses + 0.5 * self.log_vars).sum()
        return {"loss": loss, "number_loss": losses[0].detach(), "kind_loss": losses[1].detach()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@entry
def learned_task_weights():
    x, y = surface(seed=55)
    kind = torch.bucketize(x[:, 2] + x[:, 3], torch.tensor([-0.6, 0.6]))
    return UncertaintyWeights(), split(x, y, kind)


class Radiance(forge.TaskModule):
    """A tiny NeRF in the plane: colours along rays, mixed by density."""

    def __init__(self, samples=12):
        super().__init__()
        self.samples = samples
        self.net = mlp(16, 48, 48, 2)

    def forward(self, origin, direction):
        depth = (torch.arange(self.samples, device=origin.device) + 0.5) / self.samples * 2
        places = origin[:, None] + depth[:, None] * direction[:, None]
        angle = (places[..., None] * (math.pi / 2 * 2.0 ** torch.arange(4, device=origin.device))).flatten(2)
        density, colour = self.net(torch.cat([angle.sin(), angle.cos()], -1)).unbind(-1)
        opacity = 1 - torch.exp(-F.softplus(density) * 2 / self.samples)
        through = torch.cumprod(1 - opacity + 1e-6, 1)
        through = torch.cat([torch.ones_like(through[:, :1]), through[:, :-1]], 1)
        return (opacity * through * colour.sigmoid()).sum(1)

    def training_step(self, batch):
        origin, direction, seen = batch
        return {"loss": F.mse_loss(self(origin, direction), seen)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def rays_through_a_field():
    g = gen(56)
    a = 6.283 * torch.rand(640, generator=g)
    origin = torch.stack([a.cos(), a.sin()], 1)
    aim = 0.5 * torch.randn(640, 2, generator=g)
    direction = F.normalize(aim - origin, dim=1)
    closest = (origin - (origin * direction).sum(1, keepdim=True) * direction).norm(dim=1)
    seen = torch.where(closest < 0.4, 0.8, 0.1) * torch.where(a < 3.14, 1.0, 0.5)
    return Radiance(), split(origin, direction, seen, val=128, batch=32)


class Physics(forge.TaskModule):
    """Solve u'' = -pi^2 sin(pi x), u(0) = u(1) = 0, from the equation alone."""

    def __init__(self):
        super().__init__()
        self.net = mlp(1, 32, 32, 1, act=nn.Tanh)

    def forward(self, x):
        return self.net(2 * x - 1)

    def training_step(self, batch):
        x = batch[0].detach().clone().requires_grad_(True)
        u = self(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        equation = (second + math.pi**2 * torch.sin(math.pi * x)).square().mean()
        ends = self(x.new_tensor([[0.0], [1.0]])).square().mean()
        return {"loss": equation / math.pi**2 + 10 * ends}

    def validation_step(self, batch):
        (x,) = batch
        return {"error": (self(x) - torch.sin(math.pi * x)).abs().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def physics_informed():
    return Physics(), split(torch.rand(800, 1, generator=gen(57)), val=160, batch=32)


class Sines(Dataset):
    """Each sample is a task: points of a sine of its own amplitude and phase."""

    def __init__(self, count, seed):
        g = gen(seed)
        amplitude, phase = 0.5 + torch.rand(count, 1, 1, generator=g), 3.14 * torch.rand(count, 1, 1, generator=g)
        self.x = 6 * torch.rand(count, 20, 1, generator=g) - 3
        self.y = amplitude * torch.sin(self.x + phase)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class MAML(forge.TaskModule):
    def __init__(self, inner_lr=0.05):
        super().__init__()
        self.inner_lr = inner_lr
        self.net = mlp(1, 24, 24, 1, act=nn.Tanh)

    def adapted_loss(self, x, y, create_graph):
        weights = OrderedDict(self.net.named_parameters())
        call = torch.func.functional_call
        for _ in range(2):
            loss = F.mse_loss(call(self.net, weights, (x[:10],)), y[:10])
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=create_graph)
            weights = OrderedDict((k, w - self.inner_lr * s) for (k, w), s in zip(weights.items(), slopes))
        return F.mse_loss(call(self.net, weights, (x[10:],)), y[10:])

    def training_step(self, batch):
        return {"loss": torch.stack([self.adapted_loss(x, y, True) for x, y in zip(*batch)]).mean()}

    def validation_step(self, batch):
        with torch.inference_mode(False), torch.enable_grad():
            x, y = (t.clone() for t in batch)
            losses = [self.adapted_loss(a, b, False).detach() for a, b in zip(x, y)]
        return {"loss": torch.stack(losses).mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def learning_to_learn_sines():
    return MAML(), SimpleNamespace(
        train=DataLoader(Sines(160, 58), batch_size=4, shuffle=True), val=DataLoader(Sines(32, 59), batch_size=4)
    )


# ---------------------------------------------------------------- reinforcement learning


class DQN(forge.TaskModule):
    def __init__(self, cells=10, gamma=0.9, every=20):
        super().__init__()
        self.gamma, self.every = gamma, every
        self.online = mlp(cells, 32, 2)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def loss(self, batch):
        state, action, reward, after, done = batch
        q = self.online(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            choice = self.online(after).argmax(1, keepdim=True)
            wanted = reward + self.gamma * (1 - done) * self.target(after).gather(1, choice).squeeze(1)
        return F.smooth_l1_loss(q, wanted)

    def training_step(self, batch):
        if self.count % self.every == 0:
            self.target.load_state_dict(self.online.state_dict())
        self.count += 1
        return {"loss": self.loss(batch)}

    def validation_step(self, batch):
        right = (self.online(batch[0]).argmax(1) == 1).float().mean()
        return {"loss": self.loss(batch), "right": right}

    def configure_optimizers(self):
        return torch.optim.Adam(self.online.parameters(), lr=3e-3)


@entry
def double_dqn_from_a_log():
    g = gen(60)
    n, cells = 1200, 10
    place, action = torch.randint(cells - 1, (n,), generator=g), torch.randint(2, (n,), generator=g)
    after = (place + 2 * action - 1).clamp(min=0)
    done = (after == cells - 1).float()
    hot = lambda p: F.one_hot(p, cells).float()
    return DQN(), split(hot(place), action, done.clone(), hot(after), done, val=240, batch=32)


class ActorCritic(forge.TaskModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, state):
        h = self.body(state)
        return Categorical(logits=self.actor(h)), self.critic(h).squeeze(1)

    def training_step(self, batch):
        state, rewards = batch
        policy, value = self(state)
        action = policy.sample()
        reward = rewards.gather(1, action[:, None]).squeeze(1)
        advantage = (reward - value).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        loss = -(policy.log_prob(action) * advantage).mean() + 0.5 * F.mse_loss(value, reward)
        return {"loss": loss - 0.01 * policy.entropy().mean(), "reward": reward.mean()}

    def validation_step(self, batch):
        state, rewards = batch
        policy, _ = self(state)
        return {"reward": (policy.probs * rewards).sum(1).mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


@entry
def actor_critic_bandit():
    g = gen(61)
    state = torch.randn(800, 8, generator=g)
    rewards = torch.tanh(state @ torch.randn(8, 4, generator=g) / 2) + 0.1 * torch.randn(800, 4, generator=g)
    return ActorCritic(), split(state, rewards, val=160, batch=32)
