"""Plain networks with the losses and layers of textbooks: counts, survival, ranks, mixtures, sets, points, factors."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, WeightedRandomSampler

import forge
from benchmarks.doctor.zoo.common import (
    Classify,
    Entry,
    Regress,
    Samples,
    accuracy,
    adamw,
    clusters,
    dict_loaders,
    generator,
    gratings,
    mlp,
    rectangles,
    sample_loaders,
    teacher_table,
    tensor_loaders,
)
from forge.data import Splits, TensorLoader

MODELS: dict[str, Entry] = {}


def entry(function: Entry) -> Entry:
    MODELS[function.__name__] = function
    return function


@entry
def mlp_classifier() -> tuple[forge.TaskModule, Splits]:
    return Classify(mlp(8, 48, 48, 4), 5e-3), tensor_loaders(*clusters())


@entry
def mlp_regression() -> tuple[forge.TaskModule, Splits]:
    return Regress(mlp(8, 48, 48, 1), 5e-3), tensor_loaders(*teacher_table())


@entry
def linear_regression_sgd() -> tuple[forge.TaskModule, Splits]:
    class Linear(Regress):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    x, _ = teacher_table()
    y = x @ torch.linspace(-1, 1, 8)[:, None] + 0.1 * torch.randn(400, 1, generator=generator(1))
    return Linear(nn.Linear(8, 1)), tensor_loaders(x, y)


@entry
def logistic_from_zero() -> tuple[forge.TaskModule, Splits]:
    """Weights of zero are right for a convex problem."""
    layer = nn.Linear(8, 4)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return Classify(layer, 5e-2), tensor_loaders(*clusters())


@entry
def dropout_and_batchnorm() -> tuple[forge.TaskModule, Splits]:
    net = nn.Sequential(nn.Linear(8, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))
    return Classify(net, 5e-3), tensor_loaders(*clusters())


@entry
def self_normalising() -> tuple[forge.TaskModule, Splits]:
    net = nn.Sequential(
        nn.Linear(8, 48), nn.SELU(), nn.AlphaDropout(0.05), nn.Linear(48, 48), nn.SELU(), nn.Linear(48, 4)
    )
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
            nn.init.zeros_(layer.bias)
    return Classify(net, 3e-3), tensor_loaders(*clusters())


@entry
def weight_norm_mlp() -> tuple[forge.TaskModule, Splits]:
    net = nn.Sequential(weight_norm(nn.Linear(8, 48)), nn.ReLU(), weight_norm(nn.Linear(48, 1)))
    return Regress(net, 5e-3), tensor_loaders(*teacher_table())


def conv_net(norm, channels: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride=2, padding=1),
        norm(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        norm(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 4),
    )


@entry
def cnn_groupnorm() -> tuple[forge.TaskModule, Splits]:
    return Classify(conv_net(lambda c: nn.GroupNorm(4, c)), 3e-3), tensor_loaders(*gratings(size=16))


@entry
def cnn_instancenorm() -> tuple[forge.TaskModule, Splits]:
    """Normalising each picture drops its tint and contrast; the direction of the stripes is left."""
    net = conv_net(lambda c: nn.InstanceNorm2d(c, affine=True))
    return Classify(net, 3e-3), tensor_loaders(*gratings(size=16, noise=0.2))


@entry
def cnn_batchnorm_tiny_batches() -> tuple[forge.TaskModule, Splits]:
    """Batches of two: each still has 128 values per channel."""
    return Classify(conv_net(nn.BatchNorm2d), 1e-3), tensor_loaders(*gratings(200, 16), batch_size=2)


@entry
def batches_of_one() -> tuple[forge.TaskModule, Splits]:
    return Classify(conv_net(lambda c: nn.GroupNorm(4, c)), 5e-4), tensor_loaders(*gratings(200, 16), batch_size=1)


class ResidualNet(nn.Module):
    """Deep, and it begins as the identity: the last scale of every block is zero."""

    def __init__(self, blocks: int = 12, width: int = 32):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(mlp(width, width, width) for _ in range(blocks))
        self.scales = nn.Parameter(torch.zeros(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = x + scale * block(x)
        return self.last(x)


@entry
def rezero_deep_residual() -> tuple[forge.TaskModule, Splits]:
    return Classify(ResidualNet(), 5e-3), tensor_loaders(*clusters())


class UNet(nn.Module):
    def __init__(self, width: int = 12, outputs: int = 3):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.deep = nn.Sequential(
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.up = nn.Sequential(
            nn.Conv2d(2 * width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, outputs, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        shallow = self.down(x)
        return self.up(torch.cat([shallow, self.deep(shallow)], 1))


class SegmentDice(forge.TaskModule):
    """Cross-entropy plus soft Dice over the batch."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = UNet()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch):
        images, masks = batch
        logits = self(images)
        chances, wanted = logits.softmax(1), F.one_hot(masks, 3).permute(0, 3, 1, 2).float()
        shared = (chances * wanted).sum((0, 2, 3))
        dice = 1 - ((2 * shared + 1) / (chances.sum((0, 2, 3)) + wanted.sum((0, 2, 3)) + 1)).mean()
        return {"loss": F.cross_entropy(logits, masks) + dice, "pixels": (logits.argmax(1) == masks).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def unet_dice() -> tuple[forge.TaskModule, Splits]:
    images, masks, _, _ = rectangles(120, 32)
    return SegmentDice(), tensor_loaders(images, masks, batch_size=8, val=24)


class Counts(forge.TaskModule):
    """Poisson regression: the network gives the logarithm of the rate; exposure enters as an offset."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(6, 32, 1)

    def forward(self, x: Tensor, exposure: Tensor) -> Tensor:
        return self.net(x).squeeze(1) + exposure.log()

    def training_step(self, batch):
        x, exposure, counts = batch
        return F.poisson_nll_loss(self(x, exposure), counts, log_input=True)

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


def count_data() -> tuple[Tensor, Tensor, Tensor]:
    g = generator(2)
    x = torch.randn(400, 6, generator=g)
    exposure = 0.5 + 2 * torch.rand(400, generator=g)
    rate = torch.exp(0.6 * x[:, 0] + 0.5 * torch.sin(2 * x[:, 1]) + 0.5) * exposure
    return x, exposure, torch.poisson(rate, generator=g)


@entry
def poisson_counts() -> tuple[forge.TaskModule, Splits]:
    return Counts(), tensor_loaders(*count_data())


class Dispersed(Counts):
    """Negative binomial: a rate per sample and one dispersion for all."""

    def __init__(self):
        super().__init__()
        self.log_size = nn.Parameter(torch.zeros(()))

    def training_step(self, batch):
        x, exposure, counts = batch
        rate, size = self(x, exposure).exp(), self.log_size.exp()
        spread = torch.distributions.NegativeBinomial(size, logits=(rate / size).log())
        return -spread.log_prob(counts).mean()

    validation_step = training_step


@entry
def negative_binomial() -> tuple[forge.TaskModule, Splits]:
    return Dispersed(), tensor_loaders(*count_data())


class Cox(forge.TaskModule):
    """Survival: the partial likelihood compares each event with all who were still at risk in the batch."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, time, event = batch
        order = time.argsort(descending=True)
        risk, event = self(x)[order], event[order]
        return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum().clamp(min=1)

    def validation_step(self, batch):
        x, time, event = batch
        risk = self(x)
        comparable = (time[:, None] < time[None]) & event[:, None].bool()
        return {
            "loss": self.training_step(batch),
            "concordance": (risk[:, None] > risk[None])[comparable].float().mean(),
        }

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def cox_survival() -> tuple[forge.TaskModule, Splits]:
    g = generator(3)
    x = torch.randn(480, 6, generator=g)
    hazard = torch.exp(x[:, 0] - 0.7 * x[:, 1])
    time = -torch.log(torch.rand(480, generator=g)) / hazard
    censored = -torch.log(torch.rand(480, generator=g)) * 2
    return Cox(), tensor_loaders(x, torch.minimum(time, censored), (time < censored).float(), batch_size=32)


class Mixture(forge.TaskModule):
    """A mixture density network: several answers to one question."""

    def __init__(self, parts: int = 4, lr: float = 5e-3):
        super().__init__()
        self.lr, self.parts = lr, parts
        self.net = mlp(1, 48, 3 * parts, activation=nn.Tanh)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.net(x).chunk(3, 1)

    def training_step(self, batch):
        x, y = batch
        weight, mean, log_scale = self(x)
        each = -0.5 * ((y - mean) / log_scale.exp()).square() - log_scale - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(weight.log_softmax(1) + each, 1).mean()

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def mixture_density() -> tuple[forge.TaskModule, Splits]:
    g = generator(4)
    y = 2 * torch.rand(480, 1, generator=g) - 1
    x = y + 0.4 * torch.sin(2 * math.pi * y) + 0.05 * torch.randn(480, 1, generator=g)
    return Mixture(), tensor_loaders(x / x.std(), y / y.std(), batch_size=32)


class Uncertain(forge.TaskModule):
    """Mean and variance by Gaussian likelihood."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(8, 48, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = self.net(x).chunk(2, 1)
        return mean, F.softplus(raw) + 1e-3

    def training_step(self, batch):
        x, y = batch
        mean, variance = self(x)
        return {"loss": F.gaussian_nll_loss(mean, y, variance), "mse": F.mse_loss(mean, y)}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def gaussian_likelihood() -> tuple[forge.TaskModule, Splits]:
    return Uncertain(), tensor_loaders(*teacher_table())


class Ordinal(forge.TaskModule):
    """Grades from one to five: one score, and a threshold between neighbouring grades (CORAL)."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.score = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1, bias=False))
        self.thresholds = nn.Parameter(torch.tensor([1.0, 0.3, -0.3, -1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x) + self.thresholds

    def training_step(self, batch):
        x, grade = batch
        logits = self(x)
        above = (grade[:, None] > torch.arange(4)).float()
        error = ((logits > 0).sum(1) - grade).abs().float().mean()
        return {"loss": F.binary_cross_entropy_with_logits(logits, above), "mae": error}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def ordinal_grades() -> tuple[forge.TaskModule, Splits]:
    x, y = teacher_table(noise=0.2)
    return Ordinal(), tensor_loaders(x, torch.bucketize(y[:, 0], torch.tensor([-1.0, -0.3, 0.3, 1.0])))


class Ranked(forge.TaskModule):
    """Learning to rank: the loss compares the documents of one query (RankNet) and ignores the scores' level."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1, bias=False))

    def forward(self, documents: Tensor) -> Tensor:
        return self.net(documents).squeeze(-1)

    def training_step(self, batch):
        documents, worth = batch
        scores = self(documents)
        gap = scores[:, :, None] - scores[:, None]
        better = worth[:, :, None] > worth[:, None]
        return {"loss": F.softplus(-gap)[better].mean(), "right": (gap[better] > 0).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def pairwise_ranking() -> tuple[forge.TaskModule, Splits]:
    x, y = teacher_table(240 * 6)
    return Ranked(), tensor_loaders(x.view(240, 6, 8), y.view(240, 6).round())


class Several(forge.TaskModule):
    """Multi-label: rare labels have a larger weight for their positives."""

    def __init__(self, weight: Tensor, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(8, 48, 5)
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch):
        x, labels = batch
        logits = self(x)
        loss = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=self.weight)
        return {"loss": loss, "accuracy": ((logits > 0) == labels.bool()).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def multi_label_positive_weights() -> tuple[forge.TaskModule, Splits]:
    x, y = teacher_table(outputs=5)
    labels = (y > torch.tensor([0.0, 0.3, 0.6, 0.9, 1.1])).float()
    share = labels.mean(0)
    return Several((1 - share) / share), tensor_loaders(x, labels)


class Rare(forge.TaskModule):
    """Nine to one: the loss weighs the classes; precision and recall from all of the validation."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(8, 48, 2)
        self.register_buffer("weight", torch.tensor([1 / 0.9, 1 / 0.1]) / 2)
        self.counts = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch):
        x, labels = batch
        return F.cross_entropy(self(x), labels, weight=self.weight)

    def validation_step(self, batch):
        x, labels = batch
        logits = self(x)
        found, real = logits.argmax(1).bool(), labels.bool()
        self.counts = self.counts + torch.stack([(found & real).sum(), found.sum(), real.sum()])
        return {"loss": F.cross_entropy(logits, labels, weight=self.weight)}

    def evaluation_end(self, stage):
        (both, found, real), self.counts = self.counts.tolist(), torch.zeros(3)
        return {"precision": both / max(found, 1), "recall": both / max(real, 1)}

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


def rare_data() -> tuple[Tensor, Tensor]:
    x, y = teacher_table(480)
    return x, (y[:, 0] > y[:, 0].quantile(0.9)).long()


@entry
def imbalanced_weighted() -> tuple[forge.TaskModule, Splits]:
    return Rare(), tensor_loaders(*rare_data(), batch_size=32, val=96)


@entry
def imbalanced_oversampled() -> tuple[forge.TaskModule, Splits]:
    """A sampler draws the rare class more often; validation keeps the natural shares."""
    x, labels = rare_data()
    samples = list(zip(x, labels, strict=True))
    weights = torch.where(labels[:384] == 1, 9.0, 1.0).tolist()
    sampler = WeightedRandomSampler(weights, 384, generator=generator(5))
    train = DataLoader(Samples(samples[:384]), batch_size=32, sampler=sampler)
    return Classify(mlp(8, 48, 2), 3e-3), Splits(train=train, val=DataLoader(Samples(samples[384:]), batch_size=32))


class TwoHeads(forge.TaskModule):
    """One body, a class and a number; the losses are weighed by learned uncertainties."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(nn.Linear(8, 48), nn.ReLU())
        self.kind, self.amount = nn.Linear(48, 3), nn.Linear(48, 1)
        self.log_noise = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.kind(hidden), self.amount(hidden).squeeze(1)

    def training_step(self, batch):
        logits, amount = self(batch["x"])
        losses = torch.stack([F.cross_entropy(logits, batch["kind"]), F.mse_loss(amount, batch["amount"])])
        loss = (losses * (-self.log_noise).exp() + self.log_noise).sum()
        return {"loss": loss, "kind": losses[0], "amount": losses[1], "accuracy": accuracy(logits, batch["kind"])}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def two_heads_dict_batches() -> tuple[forge.TaskModule, Splits]:
    x, y = teacher_table(outputs=2)
    kind = torch.bucketize(y[:, 0].contiguous(), torch.tensor([-0.5, 0.5]))
    return TwoHeads(), dict_loaders({"x": x, "kind": kind, "amount": y[:, 1]})


class LargeScale(forge.TaskModule):
    """Prices in the hundred thousands: the loss is on standardised targets, the metric in the original unit."""

    def __init__(self, mean: float = 250_000.0, std: float = 80_000.0, lr: float = 5e-3):
        super().__init__()
        self.lr, self.mean, self.std = lr, mean, std
        self.net = mlp(8, 48, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(1) * self.std + self.mean

    def training_step(self, batch):
        x, price = batch
        guess = self(x)
        loss = F.smooth_l1_loss((guess - self.mean) / self.std, (price - self.mean) / self.std)
        return {"loss": loss, "mae": (guess - price).abs().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def large_targets_standardised() -> tuple[forge.TaskModule, Splits]:
    x, y = teacher_table()
    return LargeScale(), tensor_loaders(x, 250_000 + 80_000 * y[:, 0])


class DeepSets(nn.Module):
    """Sums over the members of a set; missing members are masked."""

    def __init__(self):
        super().__init__()
        self.member, self.whole = mlp(3, 32, 32), mlp(32, 32, 1)

    def forward(self, sets: Tensor) -> Tensor:
        mask = (sets != 0).any(-1, keepdim=True)
        return self.whole((self.member(sets) * mask).sum(1) / 8)


@entry
def deep_sets() -> tuple[forge.TaskModule, Splits]:
    g = generator(6)
    sets = torch.randn(400, 8, 3, generator=g)
    sets = sets * (torch.arange(8) < torch.randint(3, 9, (400, 1), generator=g))[..., None]
    spread = sets.square().sum((1, 2), keepdim=True).squeeze(1).log()
    return Regress(DeepSets(), 5e-3), tensor_loaders(sets, (spread - spread.mean()) / spread.std())


class PointNet(nn.Module):
    """Points go through one network each, then the maximum; many points have no gradient."""

    def __init__(self):
        super().__init__()
        self.point = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.point(points.transpose(1, 2)).amax(-1))


@entry
def point_net() -> tuple[forge.TaskModule, Splits]:
    """Spheres, boxes and rings of 48 points."""
    g = generator(7)
    kind = torch.randint(3, (240,), generator=g)
    points = torch.randn(240, 48, 3, generator=g)
    ball = F.normalize(points, dim=-1)
    box = points.clamp(-0.7, 0.7) / 0.7
    ring = F.normalize(points * torch.tensor([1.0, 1.0, 0.0]), dim=-1)
    shapes = torch.stack([ball, box, ring])[kind, torch.arange(240)]
    return Classify(PointNet(), 3e-3), tensor_loaders(shapes + 0.05 * torch.randn(shapes.shape, generator=g), kind)


class Factors(forge.TaskModule):
    """Matrix factorisation with biases: ratings of users for items; a batch touches few rows."""

    def __init__(self, users: int = 40, items: int = 30, width: int = 8, lr: float = 2e-2):
        super().__init__()
        self.lr = lr
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.user_bias, self.item_bias):
            nn.init.zeros_(table.weight)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        bias = self.user_bias(user) + self.item_bias(item)
        return (self.users(user) * self.items(item)).sum(1) + bias.squeeze(1)

    def training_step(self, batch):
        user, item, rating = batch
        return F.mse_loss(self(user, item), rating)

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr, 1e-4)


@entry
def matrix_factorisation() -> tuple[forge.TaskModule, Splits]:
    g = generator(8)
    taste, kind = torch.randn(40, 3, generator=g), torch.randn(30, 3, generator=g)
    level = torch.randn(40, generator=g)
    user, item = torch.randint(40, (480,), generator=g), torch.randint(30, (480,), generator=g)
    rating = (taste[user] * kind[item]).sum(1) / 3 + level[user]
    return Factors(), tensor_loaders(user, item, rating / rating.std(), batch_size=32)


class Wide(forge.TaskModule):
    """Wide and deep on categories and numbers; an index for unknown categories that training never sees."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.tables = nn.ModuleList(nn.Embedding(size + 1, 6) for size in (12, 7, 30))
        self.wide = nn.Linear(4, 1)
        self.deep = mlp(22, 48, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        found = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        return (self.wide(numbers) + self.deep(torch.cat([*found, numbers], 1))).squeeze(1)

    def training_step(self, batch):
        categories, numbers, bought = batch
        logits = self(categories, numbers)
        right = ((logits > 0) == bought.bool()).float().mean()
        return {"loss": F.binary_cross_entropy_with_logits(logits, bought), "accuracy": right}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def wide_and_deep() -> tuple[forge.TaskModule, Splits]:
    g = generator(9)
    sizes = torch.tensor([12, 7, 30])
    categories = (torch.rand(480, 3, generator=g) * sizes).long()
    numbers = torch.randn(480, 4, generator=g)
    effects = [torch.randn(int(size), generator=g) for size in sizes]
    score = sum(effect[categories[:, i]] for i, effect in enumerate(effects)) + numbers[:, 0]
    chance = torch.rand(480, generator=g) < torch.sigmoid(score)
    return Wide(), tensor_loaders(categories, numbers, chance.float(), batch_size=32)


class Prototypes(forge.TaskModule):
    """Few-shot: each batch is one episode with its own classes; prototypes are means of the support set."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(12, 48, 16)

    def forward(self, support: Tensor, query: Tensor) -> Tensor:
        centres = self.net(support).mean(1)
        return -torch.cdist(self.net(query), centres).square()

    def training_step(self, batch):
        support, query, labels = batch
        logits = self(support, query)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    validation_step = training_step

    def num_items(self, batch):
        return len(batch[1])

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def prototypes_few_shot() -> tuple[forge.TaskModule, Splits]:
    g = generator(10)
    mixing = torch.randn(4, 12, generator=g)

    def episode() -> tuple[Tensor, Tensor, Tensor]:
        centres = torch.randn(5, 4, generator=g)
        labels = torch.randint(5, (25,), generator=g)
        support = centres[:, None] + 0.3 * torch.randn(5, 3, 4, generator=g)
        query = centres[labels] + 0.3 * torch.randn(25, 4, generator=g)
        unrelated = [torch.randn(5, 3, 12, generator=g), torch.randn(25, 12, generator=g)]
        return support @ mixing / 2 + unrelated[0], query @ mixing / 2 + unrelated[1], labels

    episodes = [episode() for _ in range(50)]
    return Prototypes(), Splits(train=episodes[:40], val=episodes[40:])


class KeyPoints(forge.TaskModule):
    """Soft-argmax: heat maps become coordinates."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 1, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        heat = self.net(images)[:, 0]
        heat = heat.flatten(1).softmax(1).view_as(heat)
        grid = torch.linspace(-1, 1, heat.size(-1))
        return torch.stack([(heat.sum(1) * grid).sum(1), (heat.sum(2) * grid).sum(1)], 1)

    def training_step(self, batch):
        images, places = batch
        return F.smooth_l1_loss(self(images), places)

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def soft_argmax_keypoints() -> tuple[forge.TaskModule, Splits]:
    images, _, boxes, kinds = rectangles(200, 24)
    images = images * torch.where(kinds == 1, 1.0, -1.0)[:, None, None, None]
    places = (boxes[:, :2] + boxes[:, 2:]) / 24 - 1
    return KeyPoints(), tensor_loaders(images, places)


@entry
def tensor_loader_images_as_bytes() -> tuple[forge.TaskModule, Splits]:
    """Bytes in memory, scaled and normalised when a batch is read."""
    images, labels = gratings(size=16)
    stored = (images * 40 + 128).clamp(0, 255).to(torch.uint8)

    def transform(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x.float() - 128) / 40, y

    net = conv_net(nn.BatchNorm2d)
    return Classify(net, 3e-3), Splits(
        train=TensorLoader(stored[:-48], labels[:-48], batch_size=16, shuffle=True, transform=transform),
        val=TensorLoader(stored[-48:], labels[-48:], batch_size=16, transform=transform),
    )


class Augmented(Samples):
    """Shifts and noise of the training pictures, drawn again in each epoch."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.samples[index]
        shift = torch.randint(-2, 3, (2,)).tolist()
        image = torch.roll(image, shift, (1, 2))
        return image + 0.05 * torch.randn_like(image), label


@entry
def augmented_training() -> tuple[forge.TaskModule, Splits]:
    samples = list(zip(*gratings(size=16), strict=True))
    splits = sample_loaders(samples)
    train = DataLoader(Augmented(samples[:-48]), batch_size=16, shuffle=True)
    return Classify(conv_net(nn.BatchNorm2d), 3e-3), Splits(train=train, val=splits.val)


@entry
def one_class_of_many_never_sampled() -> tuple[forge.TaskModule, Splits]:
    """A head for ten classes, of which the data have four so far."""
    return Classify(mlp(8, 48, 10), 5e-3), tensor_loaders(*clusters())
