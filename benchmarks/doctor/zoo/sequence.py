"""Sequences: recurrent, convolutional and attention models, with padding, CTC, CRF, and series in order."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import forge
from benchmarks.doctor.zoo.common import (
    Classify,
    Entry,
    Regress,
    accuracy,
    adamw,
    generator,
    sample_loaders,
    tensor_loaders,
    topics,
    walks,
)
from forge.data import Bucketed, Loader, Splits, TokenStream, pad_collate

MODELS: dict[str, Entry] = {}


def entry(function: Entry) -> Entry:
    MODELS[function.__name__] = function
    return function


class Packed(forge.TaskModule):
    """A bidirectional LSTM over packed sequences of different lengths; the last states decide."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(32, 24, padding_idx=0)
        self.lstm = nn.LSTM(24, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return self.head(torch.cat([last[0], last[1]], 1))

    def training_step(self, batch):
        tokens, lengths, labels = batch
        logits = self(tokens, lengths)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


def collate_texts(samples):
    tokens, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(t) for t in tokens])
    return pad_sequence(list(tokens), batch_first=True), lengths, torch.stack(list(labels))


@entry
def packed_lstm() -> tuple[forge.TaskModule, Splits]:
    tokens, mask, labels = topics(320)
    samples = [(t[: int(m.sum())], label) for t, m, label in zip(tokens, mask, labels, strict=True)]
    return Packed(), sample_loaders(samples, collate_fn=collate_texts)


class Averaged(forge.TaskModule):
    """The mean of the embeddings of the real tokens; batches of similar lengths from forge's sampler."""

    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        summed = (self.embed(values) * mask[..., None]).sum(1)
        return self.head(summed / mask.sum(1, keepdim=True))

    def training_step(self, batch):
        values, _, mask = batch["tokens"]
        logits = self(values, mask)
        return {"loss": F.cross_entropy(logits, batch["label"]), "accuracy": accuracy(logits, batch["label"])}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def bucketed_bag_of_words() -> tuple[forge.TaskModule, Splits]:
    tokens, mask, labels = topics(320)
    samples = [
        {"tokens": t[: int(m.sum())], "label": int(label)} for t, m, label in zip(tokens, mask, labels, strict=True)
    ]
    train, val = samples[:-64], samples[-64:]
    return Averaged(), Splits(
        train=Loader(train, batch_size=16, sampler=Bucketed([len(s["tokens"]) for s in train]), collate_fn=pad_collate),
        val=Loader(val, batch_size=16, collate_fn=pad_collate),
    )


class Tagger(forge.TaskModule):
    """A bidirectional GRU that tags words; padding has the tag -1, which the loss ignores."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(32, 24, padding_idx=0)
        self.gru = nn.GRU(24, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1)
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=tokens.size(1))
        return self.head(states)

    def training_step(self, batch):
        tokens, tags = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-1)
        return {"loss": loss, "accuracy": accuracy(logits, tags, ignore=-1)}

    validation_step = training_step

    def num_items(self, batch):
        return (batch[1] != -1).sum()

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


def tagged() -> tuple[Tensor, Tensor, Tensor]:
    tokens, mask, _ = topics(320)
    tags = (tokens // 7 + (torch.roll(tokens, 1, 1) > tokens)) % 4
    return tokens, mask, tags


@entry
def gru_tagger_padding() -> tuple[forge.TaskModule, Splits]:
    tokens, mask, tags = tagged()
    return Tagger(), tensor_loaders(tokens, tags.masked_fill(mask == 0, -1))


class ChainTagger(forge.TaskModule):
    """A linear-chain CRF over a GRU: the loss is the negative log-likelihood of the whole tag sequence."""

    def __init__(self, tags: int = 4, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(32, 24, padding_idx=0)
        self.gru = nn.GRU(24, 24, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(48, tags)
        self.moves = nn.Parameter(torch.zeros(tags, tags))
        self.first = nn.Parameter(torch.zeros(tags))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scores(self.gru(self.embed(tokens))[0])

    def likelihood(self, scores: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        path = self.first[tags[:, 0]] + scores[:, 0].gather(1, tags[:, :1]).squeeze(1)
        total = self.first + scores[:, 0]
        for t in range(1, tags.size(1)):
            on = mask[:, t]
            step = self.moves[tags[:, t - 1], tags[:, t]] + scores[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
            path = path + step * on
            ahead = torch.logsumexp(total[:, :, None] + self.moves + scores[:, t, None], 1)
            total = torch.where(on[:, None].bool(), ahead, total)
        return path - torch.logsumexp(total, 1)

    @torch.no_grad()
    def decode(self, scores: Tensor) -> Tensor:
        best, back = self.first + scores[:, 0], []
        for t in range(1, scores.size(1)):
            best, origin = (best[:, :, None] + self.moves).max(1)
            best = best + scores[:, t]
            back.append(origin)
        path = [best.argmax(1)]
        for origin in reversed(back):
            path.append(origin.gather(1, path[-1][:, None]).squeeze(1))
        return torch.stack(path[::-1], 1)

    def training_step(self, batch):
        tokens, mask, tags = batch
        return -self.likelihood(self(tokens), tags, mask).sum() / mask.sum()

    def validation_step(self, batch):
        tokens, mask, tags = batch
        scores = self(tokens)
        loss = -self.likelihood(scores, tags, mask).sum() / mask.sum()
        right = ((self.decode(scores) == tags) * mask).sum() / mask.sum()
        return {"loss": loss, "accuracy": right}

    def num_items(self, batch):
        return batch[1].sum()

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def crf_tagger() -> tuple[forge.TaskModule, Splits]:
    tokens, mask, tags = tagged()
    tags = tags.masked_fill(mask == 0, 0)
    mask, tags, tokens = mask[:, :10], tags[:, :10], tokens[:, :10]
    return ChainTagger(), tensor_loaders(tokens, mask, tags)


class Heard(forge.TaskModule):
    """CTC over a GRU: no alignment is given. The blank is 0."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.gru = nn.GRU(8, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 6)

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.gru(frames)[0]).log_softmax(-1)

    def training_step(self, batch):
        frames, words, lengths = batch
        scores = self(frames).transpose(0, 1)
        steps = torch.full((len(frames),), scores.size(0), dtype=torch.long)
        return F.ctc_loss(scores, words, steps, lengths, blank=0, zero_infinity=True)

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def ctc_gru() -> tuple[forge.TaskModule, Splits]:
    g = generator(2)
    words = torch.randint(1, 6, (240, 5), generator=g)
    lengths = torch.randint(3, 6, (240,), generator=g)
    codes = torch.cat([torch.zeros(1, 8), torch.randn(5, 8, generator=g)])
    shown = words * (torch.arange(5) < lengths[:, None])
    frames = codes[shown].repeat_interleave(4, 1)
    frames = frames + 0.3 * torch.randn(frames.shape, generator=g)
    return Heard(), tensor_loaders(frames, words, lengths)


class Translate(forge.TaskModule):
    """Encoder, decoder and additive attention; teacher forcing in training, and in validation for the loss."""

    def __init__(self, words: int = 24, width: int = 32, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.source = nn.Embedding(words, width)
        self.target = nn.Embedding(words, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRUCell(2 * width, width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.energy = nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(2 * width, words)

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        memory, state = self.encoder(self.source(source))
        state, keys, outputs = state[0], self.key(memory), []
        for t in range(previous.size(1)):
            weights = self.energy(torch.tanh(keys + self.query(state)[:, None])).softmax(1)
            context = (weights * memory).sum(1)
            state = self.decoder(torch.cat([self.target(previous[:, t]), context], 1), state)
            outputs.append(self.head(torch.cat([state, context], 1)))
        return torch.stack(outputs, 1)

    @torch.no_grad()
    def translate(self, source: Tensor, length: int) -> Tensor:
        tokens = torch.ones(len(source), 1, dtype=torch.long)
        for _ in range(length):
            tokens = torch.cat([tokens, self(source, tokens)[:, -1].argmax(-1, keepdim=True)], 1)
        return tokens[:, 1:]

    def training_step(self, batch):
        source, target = batch
        previous = torch.cat([torch.ones_like(target[:, :1]), target[:, :-1]], 1)
        logits = self(source, previous)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), target.flatten())}

    def validation_step(self, batch):
        source, target = batch
        free = (self.translate(source, target.size(1)) == target).float().mean()
        return self.training_step(batch) | {"free_running_accuracy": free}

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def seq2seq_attention() -> tuple[forge.TaskModule, Splits]:
    source = walks(300, 6)
    return Translate(), tensor_loaders(source, source.flip(1))


class ScheduledSampling(Translate):
    """In training, one word in four is the model's own guess, which no gradient flows through."""

    def training_step(self, batch):
        source, target = batch
        previous = torch.cat([torch.ones_like(target[:, :1]), target[:, :-1]], 1)
        with torch.no_grad():
            guess = self(source, previous).argmax(-1)
        own = torch.cat([torch.ones_like(target[:, :1]), guess[:, :-1]], 1)
        mixed = torch.where(torch.rand(target.shape) < 0.25, own, previous)
        return {"loss": F.cross_entropy(self(source, mixed).flatten(0, 1), target.flatten())}

    def validation_step(self, batch):
        source, target = batch
        return {"accuracy": (self.translate(source, target.size(1)) == target).float().mean()}


@entry
def seq2seq_scheduled_sampling() -> tuple[forge.TaskModule, Splits]:
    source = walks(200, 5)
    return ScheduledSampling(), tensor_loaders(source, source.flip(1))


class Chomp(nn.Module):
    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : -self.count].contiguous()


class CausalBlock(nn.Module):
    """A block of a temporal convolutional network, with weight normalisation."""

    def __init__(self, inputs: int, outputs: int, dilation: int):
        super().__init__()
        pad = 2 * dilation
        self.net = nn.Sequential(
            weight_norm(nn.Conv1d(inputs, outputs, 3, padding=pad, dilation=dilation)),
            Chomp(pad),
            nn.ReLU(),
            nn.Dropout(0.1),
            weight_norm(nn.Conv1d(outputs, outputs, 3, padding=pad, dilation=dilation)),
            Chomp(pad),
            nn.ReLU(),
        )
        self.skip = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.net(x) + self.skip(x))


class Convolved(forge.TaskModule):
    """Predict the next value of a series at every step."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(*(CausalBlock(1 if d == 1 else 24, 24, d) for d in (1, 2, 4)), nn.Conv1d(24, 1, 1))

    def forward(self, series: Tensor) -> Tensor:
        return self.net(series[:, None])[:, 0]

    def training_step(self, batch):
        (series,) = batch
        return F.mse_loss(self(series[:, :-1]), series[:, 1:])

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


def waves(count: int, length: int, seed: int = 0) -> Tensor:
    g = generator(seed)
    time = torch.arange(length)[None] + 50 * torch.rand(count, 1, generator=g)
    speed = 0.2 + 0.4 * torch.rand(count, 1, generator=g)
    return math.sqrt(2) * torch.sin(speed * time) + 0.1 * torch.randn(count, length, generator=g)


@entry
def temporal_conv_net() -> tuple[forge.TaskModule, Splits]:
    return Convolved(), tensor_loaders(waves(240, 48))


class Stateful(forge.TaskModule):
    """One long series, read in order: the state of the LSTM is kept from batch to batch, without its gradient."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.lstm = nn.LSTM(1, 32, batch_first=True)
        self.head = nn.Linear(32, 1)
        self.register_buffer("hidden", torch.zeros(1, 8, 32))
        self.register_buffer("cell", torch.zeros(1, 8, 32))

    def forward(self, series: Tensor, state=None):
        states, state = self.lstm(series[..., None], state)
        return self.head(states)[..., 0], state

    def training_step(self, batch):
        series, later = batch
        guess, (hidden, cell) = self(series, (self.hidden, self.cell))
        self.hidden, self.cell = hidden.detach(), cell.detach()
        return F.mse_loss(guess, later)

    def validation_step(self, batch):
        series, later = batch
        return {"loss": F.mse_loss(self(series)[0], later)}

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def stateful_lstm_unshuffled() -> tuple[forge.TaskModule, Splits]:
    """Eight tracks; batch i holds the i-th piece of each, so the order must be kept."""
    tracks = waves(8, 20 * 24 + 1, 3)
    chunks = [(tracks[:, i * 20 : i * 20 + 20], tracks[:, i * 20 + 1 : i * 20 + 21]) for i in range(24)]
    return Stateful(), Splits(train=chunks[:20], val=chunks[20:])


@entry
def series_split_by_time() -> tuple[forge.TaskModule, Splits]:
    """A forecast of one series: training on the past, in order, validation on the future, with a gap between."""
    g = generator(4)
    time = torch.arange(460.0)
    series = torch.sin(time / 5) + 0.5 * torch.sin(time / 11) + 0.1 * torch.randn(460, generator=g)
    series = (series - series[:360].mean()) / series[:360].std()
    windows = series.unfold(0, 17, 1)
    past, future = windows[:, :16], windows[:, 16:]
    train, val = TensorDataset(past[:344], future[:344]), TensorDataset(past[364:], future[364:])
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    return Regress(net, 5e-3), Splits(
        train=DataLoader(train, batch_size=16, shuffle=False), val=DataLoader(val, batch_size=16)
    )


class Stream(IterableDataset):
    """Windows of a series, computed while they are read."""

    def __init__(self, seed: int, count: int):
        self.seed, self.count = seed, count

    def __iter__(self):
        g = generator(self.seed)
        for _ in range(self.count):
            start, speed = 50 * torch.rand(1, generator=g), 0.2 + 0.4 * torch.rand(1, generator=g)
            window = math.sqrt(2) * torch.sin(speed * torch.arange(17) + start)
            yield window[:16] + 0.05 * torch.randn(16, generator=g), window[16:]

    def __len__(self):
        return self.count


@entry
def iterable_stream() -> tuple[forge.TaskModule, Splits]:
    net = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 1))
    return Regress(net, 5e-3), Splits(
        train=DataLoader(Stream(1, 320), batch_size=16), val=DataLoader(Stream(2, 64), batch_size=16)
    )


class Quantiles(forge.TaskModule):
    """Three quantiles of the next value; the pinball loss."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.gru = nn.GRU(1, 32, batch_first=True)
        self.head = nn.Linear(32, 3)
        self.register_buffer("levels", torch.tensor([0.1, 0.5, 0.9]))

    def forward(self, series: Tensor) -> Tensor:
        return self.head(self.gru(series[..., None])[0][:, -1])

    def training_step(self, batch):
        series, later = batch
        guess = self(series)
        error = later[:, None] - guess
        loss = torch.maximum(self.levels * error, (self.levels - 1) * error).mean()
        inside = (later >= guess[:, 0]) & (later <= guess[:, 2])
        return {"loss": loss, "coverage": inside.float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def quantile_forecast() -> tuple[forge.TaskModule, Splits]:
    series = waves(320, 21, 6)
    return Quantiles(), tensor_loaders(series[:, :20], series[:, 20])


class Letters(forge.TaskModule):
    """A small GPT in plain torch: learned positions, causal mask, pre-norm, tied output."""

    def __init__(self, words: int = 24, width: int = 32, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.02 * torch.randn(32, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        states = self.blocks(self.embed(tokens) + self.positions[:length], mask=mask, is_causal=True)
        return self.head(self.norm(states))

    def training_step(self, batch):
        tokens = batch[0] if isinstance(batch, (tuple, list)) else batch
        logits = self(tokens[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())}

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = adamw(self.parameters(), self.lr)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 10))
        return optimizer, warmup


@entry
def small_gpt_tied_warmup() -> tuple[forge.TaskModule, Splits]:
    return Letters(), tensor_loaders(walks(320, 17))


@entry
def token_stream_lm() -> tuple[forge.TaskModule, Splits]:
    """Random windows of one long text; the loader gives inputs and targets shifted by one."""
    text = walks(8, 700, seed=4)

    class Streamed(Letters):
        def training_step(self, batch):
            inputs, targets = batch
            return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

        validation_step = training_step

    return Streamed(), Splits(
        train=TokenStream(text[:7].flatten(), window=16, batch_size=16, mode="random"),
        val=TokenStream(text[7], window=16, batch_size=16, mode="sequential"),
    )


class Diagonal(nn.Module):
    """A linear recurrence with complex diagonal states (LRU, S4D): slow and fast memories side by side."""

    def __init__(self, width: int, states: int = 16):
        super().__init__()
        radius = torch.linspace(0.5, 0.99, states)
        self.decay = nn.Parameter(torch.log(-torch.log(radius)))
        self.angle = nn.Parameter(torch.linspace(0, math.pi, states))
        self.inward = nn.Parameter(torch.randn(states, width, 2) / (2 * width) ** 0.5)
        self.outward = nn.Parameter(torch.randn(width, states, 2) / states**0.5)
        self.through = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        rate = torch.exp(torch.complex(-torch.exp(self.decay), self.angle))
        scale = torch.sqrt(1 - rate.abs() ** 2)
        drive = (x.to(torch.complex64) @ torch.view_as_complex(self.inward).T) * scale
        state, states = torch.zeros_like(drive[:, 0]), []
        for t in range(x.size(1)):
            state = rate * state + drive[:, t]
            states.append(state)
        out = (torch.stack(states, 1) @ torch.view_as_complex(self.outward).T).real
        return out + self.through * x


class Remember(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 24)
        self.mix = Diagonal(24)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        return self.head(self.norm(hidden + F.gelu(self.mix(hidden)))[:, -1])


@entry
def linear_recurrence_complex() -> tuple[forge.TaskModule, Splits]:
    """What was the sign of the input at the marked step?"""
    g = generator(5)
    values = torch.randn(400, 12, generator=g)
    marked = torch.randint(6, 11, (400,), generator=g)
    marks = F.one_hot(marked, 12).float()
    inputs = torch.stack([values * marks + 0.1 * values, marks], -1)
    labels = (values.gather(1, marked[:, None]).squeeze(1) > 0).long()
    return Classify(Remember(), 5e-3), tensor_loaders(inputs, labels)


class KeyPadding(nn.Module):
    """A transformer encoder with a key padding mask; padded queries are computed and left out of the mean."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 32, padding_idx=0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        real = tokens != 0
        states = self.encoder(self.embed(tokens), src_key_padding_mask=~real)
        return self.head((states * real[..., None]).sum(1) / real.sum(1, keepdim=True))


@entry
def transformer_key_padding() -> tuple[forge.TaskModule, Splits]:
    tokens, _, labels = topics(320)
    return Classify(KeyPadding(), 2e-3), tensor_loaders(tokens, labels)


class SkipGram(forge.TaskModule):
    """word2vec with negative sampling; a batch touches few rows of the sparse embeddings."""

    def __init__(self, words: int = 60, width: int = 16, negatives: int = 5, lr: float = 0.02):
        super().__init__()
        self.lr, self.words, self.negatives = lr, words, negatives
        self.centre = nn.Embedding(words, width, sparse=True)
        self.context = nn.Embedding(words, width, sparse=True)
        nn.init.uniform_(self.centre.weight, -0.5 / width, 0.5 / width)
        nn.init.zeros_(self.context.weight)

    def forward(self, words: Tensor) -> Tensor:
        return self.centre(words)

    def loss(self, batch, g: torch.Generator | None) -> Tensor:
        word, near = batch
        others = torch.randint(self.words, (len(word), self.negatives), generator=g)
        centre = self.centre(word)
        good = (centre * self.context(near)).sum(-1)
        bad = torch.einsum("bd,bnd->bn", centre, self.context(others))
        return -(F.logsigmoid(good) + F.logsigmoid(-bad).sum(-1)).mean()

    def training_step(self, batch):
        return self.loss(batch, None)

    def validation_step(self, batch):
        return self.loss(batch, generator(1))

    def configure_optimizers(self):
        return torch.optim.SparseAdam(list(self.parameters()), lr=self.lr)


@entry
def word2vec_negative_sampling() -> tuple[forge.TaskModule, Splits]:
    g = generator(7)
    group = torch.randint(12, (480,), generator=g)
    words = group * 5 + torch.randint(5, (480,), generator=g)
    near = group * 5 + torch.randint(5, (480,), generator=g)
    return SkipGram(), tensor_loaders(words, near, batch_size=32)
