"""Learning without labels, from few labels, from pairs and from teachers."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from benchmarks.doctor.zoo.common import Classify, Entry, accuracy, adamw, clusters, generator, mlp, tensor_loaders
from forge.data import Splits

MODELS: dict[str, Entry] = {}


def entry(function: Entry) -> Entry:
    MODELS[function.__name__] = function
    return function


def follow(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    with torch.no_grad():
        for a, b in zip(slow.parameters(), fast.parameters(), strict=True):
            a.lerp_(b, rate)
        for a, b in zip(slow.buffers(), fast.buffers(), strict=True):
            a.copy_(b)


def frozen_copy(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).requires_grad_(False)


def signals(count: int = 400) -> tuple[Tensor, Tensor]:
    """Sixteen numbers around one of eight patterns."""
    return clusters(count, 16, 8, spread=0.9, seed=1)


class Views(forge.TaskModule):
    """Two views of each sample: noise, a random scale, some numbers set to zero. Validation uses fixed noise."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.projector = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def view(self, x: Tensor, g: torch.Generator | None) -> Tensor:
        noise = 0.3 * torch.randn(x.shape, generator=g)
        keep = (torch.rand(x.shape, generator=g) > 0.1).float()
        return (x * (0.8 + 0.4 * torch.rand(len(x), 1, generator=g)) + noise) * keep

    def compare(self, one: Tensor, two: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch):
        return self.compare(self.view(batch[0], None), self.view(batch[0], None))

    def validation_step(self, batch):
        g = generator(2)
        return {"loss": self.compare(self.view(batch[0], g), self.view(batch[0], g))}

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr, 1e-4)


class SimCLR(Views):
    """NT-Xent: every other sample of the batch is a negative, so the loss depends on the whole batch."""

    def compare(self, one: Tensor, two: Tensor) -> Tensor:
        codes = F.normalize(self.projector(self(torch.cat([one, two]))), dim=1)
        likeness = (codes @ codes.T / 0.2).fill_diagonal_(-1e9)
        count = len(one)
        partner = torch.cat([torch.arange(count) + count, torch.arange(count)])
        return F.cross_entropy(likeness, partner)


@entry
def simclr() -> tuple[forge.TaskModule, Splits]:
    return SimCLR(), tensor_loaders(signals()[0], batch_size=32)


class MoCo(Views):
    """Momentum contrast: keys of a slow encoder, negatives from a queue."""

    def __init__(self, queue: int = 128):
        super().__init__()
        self.slow = frozen_copy(nn.Sequential(self.encoder, self.projector))
        self.register_buffer("queue", F.normalize(torch.randn(queue, 16), dim=1))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))

    def compare(self, one: Tensor, two: Tensor) -> Tensor:
        query = F.normalize(self.projector(self(one)), dim=1)
        with torch.no_grad():
            key = F.normalize(self.slow(two), dim=1)
        good = (query * key).sum(1, keepdim=True)
        logits = torch.cat([good, query @ self.queue.T.clone()], 1) / 0.2
        if self.training:
            spots = (self.position + torch.arange(len(key))) % len(self.queue)
            self.queue[spots] = key
            self.position.copy_((self.position + len(key)) % len(self.queue))
        return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long))

    @forge.hookimpl
    def forge_step_end(self, step):
        follow(self.slow, nn.Sequential(self.encoder, self.projector), 0.05)

    def configure_optimizers(self):
        return adamw([*self.encoder.parameters(), *self.projector.parameters()], self.lr, 1e-4)


@entry
def moco_queue() -> tuple[forge.TaskModule, Splits]:
    return MoCo(), tensor_loaders(signals()[0], batch_size=32)


class BYOL(Views):
    """No negatives: predict the code of a slow copy."""

    def __init__(self):
        super().__init__()
        self.predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.slow = frozen_copy(nn.Sequential(self.encoder, self.projector))

    def half(self, one: Tensor, two: Tensor) -> Tensor:
        guess = F.normalize(self.predictor(self.projector(self(one))), dim=1)
        with torch.no_grad():
            goal = F.normalize(self.slow(two), dim=1)
        return 2 - 2 * (guess * goal).sum(1).mean()

    def compare(self, one: Tensor, two: Tensor) -> Tensor:
        return self.half(one, two) + self.half(two, one)

    @forge.hookimpl
    def forge_step_end(self, step):
        follow(self.slow, nn.Sequential(self.encoder, self.projector), 0.02)

    def configure_optimizers(self):
        return adamw([p for p in self.parameters() if p.requires_grad], self.lr, 1e-4)


@entry
def byol() -> tuple[forge.TaskModule, Splits]:
    return BYOL(), tensor_loaders(signals()[0], batch_size=32)


class SimSiam(Views):
    """Stop-gradient on one side is all that keeps it from collapsing."""

    def __init__(self):
        super().__init__()
        self.predictor = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 16))

    def compare(self, one: Tensor, two: Tensor) -> Tensor:
        first, second = self.projector(self(one)), self.projector(self(two))
        ahead = F.cosine_similarity(self.predictor(first), second.detach()).mean()
        back = F.cosine_similarity(self.predictor(second), first.detach()).mean()
        return -(ahead + back) / 2


@entry
def simsiam_stop_gradient() -> tuple[forge.TaskModule, Splits]:
    return SimSiam(), tensor_loaders(signals()[0], batch_size=32)


class BarlowTwins(Views):
    """The correlations between two views over the batch should be the identity."""

    def compare(self, one: Tensor, two: Tensor) -> Tensor:
        first, second = self.projector(self(one)), self.projector(self(two))
        first = (first - first.mean(0)) / (first.std(0) + 1e-6)
        second = (second - second.mean(0)) / (second.std(0) + 1e-6)
        matrix = first.T @ second / len(one)
        on = (matrix.diagonal() - 1).square().sum()
        return on + 0.02 * (matrix.square().sum() - matrix.diagonal().square().sum())


@entry
def barlow_twins() -> tuple[forge.TaskModule, Splits]:
    return BarlowTwins(), tensor_loaders(signals()[0], batch_size=32)


class VICReg(Views):
    def compare(self, one: Tensor, two: Tensor) -> Tensor:
        codes = [self.projector(self(one)), self.projector(self(two))]
        loss = 25 * F.mse_loss(*codes)
        for code in codes:
            loss = loss + 25 * F.relu(1 - (code.var(0) + 1e-4).sqrt()).mean()
            centred = code - code.mean(0)
            matrix = centred.T @ centred / (len(code) - 1)
            loss = loss + (matrix.square().sum() - matrix.diagonal().square().sum()) / 16
        return loss


@entry
def vicreg() -> tuple[forge.TaskModule, Splits]:
    return VICReg(), tensor_loaders(signals()[0], batch_size=32)


class Prototypes(nn.Module):
    """Cosines with learned directions."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.directions = nn.Parameter(torch.randn(count, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) @ F.normalize(self.directions, dim=1).T


class DINO(Views):
    """Self-distillation: a slow teacher with centred, sharpened outputs."""

    def __init__(self):
        super().__init__()
        self.encoder = mlp(16, 64, 32, activation=nn.GELU)
        self.projector = nn.Sequential(*mlp(32, 32, 16, activation=nn.GELU), Prototypes(16, 24))
        self.slow = frozen_copy(nn.Sequential(self.encoder, self.projector))
        self.register_buffer("centre", torch.zeros(24))

    def compare(self, one: Tensor, two: Tensor) -> Tensor:
        with torch.no_grad():
            goals = [self.slow(view) for view in (one, two)]
            targets = [((goal - self.centre) / 0.04).softmax(1) for goal in goals]
            if self.training:
                self.centre.lerp_(torch.cat(goals).mean(0), 0.1)
        guesses = [(self.projector(self(view)) / 0.1).log_softmax(1) for view in (one, two)]
        return -((targets[0] * guesses[1]).sum(1) + (targets[1] * guesses[0]).sum(1)).mean() / 2

    @forge.hookimpl
    def forge_step_end(self, step):
        follow(self.slow, nn.Sequential(self.encoder, self.projector), 0.01)

    def configure_optimizers(self):
        return adamw([p for p in self.parameters() if p.requires_grad], 2e-3, 1e-4)


@entry
def dino_centred_teacher() -> tuple[forge.TaskModule, Splits]:
    return DINO(), tensor_loaders(signals()[0], batch_size=32)


class SwAV(Views):
    """Codes of one view predict those of the other; targets from Sinkhorn's iterations over the batch."""

    def __init__(self):
        super().__init__()
        self.prototypes = nn.Linear(16, 12, bias=False)

    @torch.no_grad()
    def assign(self, scores: Tensor) -> Tensor:
        plan = (scores / 0.1).exp()
        for _ in range(3):
            plan = plan / plan.sum(0, keepdim=True) / plan.size(1)
            plan = plan / plan.sum(1, keepdim=True)
        return plan

    def compare(self, one: Tensor, two: Tensor) -> Tensor:
        weight = F.normalize(self.prototypes.weight, dim=1)
        scores = [F.normalize(self.projector(self(view)), dim=1) @ weight.T for view in (one, two)]
        loss = torch.zeros(())
        for mine, other in (scores, scores[::-1]):
            loss = loss - (self.assign(other) * (mine / 0.2).log_softmax(1)).sum(1).mean() / 2
        return loss


@entry
def swav_sinkhorn() -> tuple[forge.TaskModule, Splits]:
    return SwAV(), tensor_loaders(signals()[0], batch_size=32)


class Triplets(forge.TaskModule):
    """Anchor, one of the same kind and one of another; easy triplets have the loss zero."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(16, 48, 12)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=1)

    def training_step(self, batch):
        anchor, same, other = (self(part) for part in batch)
        near, far = (anchor - same).square().sum(1), (anchor - other).square().sum(1)
        return {"loss": F.relu(near - far + 0.5).mean(), "right": (near < far).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def triplets() -> tuple[forge.TaskModule, Splits]:
    g = generator(3)
    centres = torch.randn(10, 16, generator=g)
    kind = torch.randint(10, (400,), generator=g)
    other = (kind + torch.randint(1, 10, (400,), generator=g)) % 10
    parts = [centres[k] + 0.7 * torch.randn(400, 16, generator=g) for k in (kind, kind, other)]
    return Triplets(), tensor_loaders(*parts)


class HardTriplets(Triplets):
    """The hardest positive and negative of each batch; a batch without a pair of one kind costs nothing."""

    def training_step(self, batch):
        x, kind = batch
        codes = self(x)
        distance = (2 - 2 * codes @ codes.T).clamp(min=1e-6).sqrt()
        same = kind[:, None] == kind[None]
        near = distance.masked_fill(~same, 0).max(1).values
        far = distance.masked_fill(same, 10).min(1).values
        return {"loss": F.softplus(near - far).mean()}

    def validation_step(self, batch):
        x, kind = batch
        codes = self(x)
        nearest = (codes @ codes.T).fill_diagonal_(-2).argmax(1)
        return {"recall_at_1": (kind[nearest] == kind).float().mean()}


@entry
def hardest_triplets_of_batch() -> tuple[forge.TaskModule, Splits]:
    return HardTriplets(), tensor_loaders(*signals(), batch_size=32)


class ArcFace(forge.TaskModule):
    """An angular margin for the right class in training; plain cosines in validation."""

    def __init__(self, scale: float = 16.0, margin: float = 0.3, lr: float = 3e-3):
        super().__init__()
        self.scale, self.margin, self.lr = scale, margin, lr
        self.net = mlp(16, 48, 16)
        self.classes = nn.Parameter(torch.empty(8, 16))
        nn.init.xavier_uniform_(self.classes)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=1) @ F.normalize(self.classes, dim=1).T

    def training_step(self, batch):
        x, labels = batch
        cosine = self(x)
        angle = torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))
        harder = torch.cos(angle + self.margin * F.one_hot(labels, 8))
        return {"loss": F.cross_entropy(self.scale * harder, labels), "accuracy": accuracy(cosine, labels)}

    def validation_step(self, batch):
        x, labels = batch
        cosine = self(x)
        return {"loss": F.cross_entropy(self.scale * cosine, labels), "accuracy": accuracy(cosine, labels)}

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def arcface_margin() -> tuple[forge.TaskModule, Splits]:
    return ArcFace(), tensor_loaders(*signals())


class SupCon(Views):
    """Supervised contrast: all samples of the class in the batch are positives."""

    def training_step(self, batch):
        x, labels = batch
        codes = F.normalize(self.projector(self(x)), dim=1)
        likeness = (codes @ codes.T / 0.3).fill_diagonal_(-1e9)
        same = (labels[:, None] == labels[None]).float().fill_diagonal_(0)
        paired = same.sum(1) > 0
        each = (likeness.log_softmax(1) * same).sum(1)[paired] / same.sum(1)[paired]
        return {"loss": -each.mean()}

    validation_step = training_step


@entry
def supervised_contrast() -> tuple[forge.TaskModule, Splits]:
    return SupCon(), tensor_loaders(*signals(), batch_size=32)


class Siamese(forge.TaskModule):
    """Pairs, same or not; one network reads both. The contrastive loss with a margin."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(16, 48, 8)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return (self.net(one) - self.net(two)).square().sum(1).add(1e-8).sqrt()

    def training_step(self, batch):
        one, two, same = batch
        distance = self(one, two)
        loss = (same * distance.square() + (1 - same) * F.relu(1 - distance).square()).mean()
        return {"loss": loss, "accuracy": ((distance < 0.5) == same.bool()).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def siamese_pairs() -> tuple[forge.TaskModule, Splits]:
    g = generator(4)
    centres = torch.randn(8, 16, generator=g)
    first = torch.randint(8, (400,), generator=g)
    second = torch.where(torch.rand(400, generator=g) < 0.5, first, torch.randint(8, (400,), generator=g))
    one, two = (centres[k] + 0.4 * torch.randn(400, 16, generator=g) for k in (first, second))
    return Siamese(), tensor_loaders(one, two, (first == second).float())


class TwoTowers(forge.TaskModule):
    """Pairs of two kinds of data find each other in the batch; the temperature is learned and bounded."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.left, self.right = mlp(12, 48, 16), mlp(20, 48, 16)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        codes = F.normalize(self.left(left), dim=1) @ F.normalize(self.right(right), dim=1).T
        return codes * self.log_scale.exp().clamp(max=100)

    def training_step(self, batch):
        logits = self(*batch)
        partner = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2
        return {"loss": loss, "found": accuracy(logits, partner)}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def two_towers() -> tuple[forge.TaskModule, Splits]:
    g = generator(5)
    hidden = torch.randn(400, 6, generator=g)
    left = hidden @ torch.randn(6, 12, generator=g) / 6**0.5 + 0.1 * torch.randn(400, 12, generator=g)
    right = hidden @ torch.randn(6, 20, generator=g) / 6**0.5 + 0.1 * torch.randn(400, 20, generator=g)
    return TwoTowers(), tensor_loaders(left, right, batch_size=32)


class Distil(forge.TaskModule):
    """A small student learns from a frozen, trained teacher in eval mode: soft targets at temperature 3, and labels."""

    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.teacher = mlp(16, 64, 8)
        inputs, labels = clusters(300, 16, 8, spread=0.9, seed=1)
        with torch.enable_grad():
            optimizer = torch.optim.Adam(self.teacher.parameters(), lr=1e-2)
            for _ in range(40):
                optimizer.zero_grad()
                F.cross_entropy(self.teacher(inputs), labels).backward()
                optimizer.step()
        self.teacher.requires_grad_(False).eval()
        self.student = mlp(16, 32, 8)

    def train(self, mode: bool = True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)

    def training_step(self, batch):
        x, labels = batch
        logits = self(x)
        with torch.no_grad():
            soft = (self.teacher(x) / 3).softmax(1)
        close = F.kl_div((logits / 3).log_softmax(1), soft, reduction="batchmean") * 9
        return {"loss": 0.7 * close + 0.3 * F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    def validation_step(self, batch):
        x, labels = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    def configure_optimizers(self):
        return adamw(self.student.parameters(), self.lr)


@entry
def distillation_frozen_teacher() -> tuple[forge.TaskModule, Splits]:
    return Distil(), tensor_loaders(*signals())


class MeanTeacher(forge.TaskModule):
    """Few labels: the rest (-1) must agree with a moving average of the student."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.student = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 8))
        self.teacher = frozen_copy(self.student)

    def forward(self, x: Tensor) -> Tensor:
        return self.teacher(x)

    def training_step(self, batch):
        x, labels = batch
        logits = self.student(x + 0.1 * torch.randn_like(x))
        with torch.no_grad():
            goal = self.teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        agree = F.mse_loss(logits.softmax(1), goal)
        return {"loss": F.cross_entropy(logits, labels, ignore_index=-1) + agree, "agree": agree}

    def validation_step(self, batch):
        x, labels = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    @forge.hookimpl
    def forge_step_end(self, step):
        follow(self.teacher, self.student, 0.1)

    def configure_optimizers(self):
        return adamw(self.student.parameters(), self.lr)


@entry
def mean_teacher() -> tuple[forge.TaskModule, Splits]:
    x, labels = signals()
    splits = tensor_loaders(x, labels, batch_size=32)
    hidden = torch.rand(352, generator=generator(6)) < 0.7
    inputs, known = splits.train.dataset.tensors
    splits.train.dataset.tensors = (inputs, known.masked_fill(hidden, -1))
    return MeanTeacher(), splits


class FixMatch(forge.TaskModule):
    """Sure guesses on weakly changed samples are labels for strongly changed ones; at first there are none."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(16, 48, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch):
        x, labels = batch
        known = labels >= 0
        loss = F.cross_entropy(self(x[known]), labels[known]) if known.any() else x.sum() * 0
        with torch.no_grad():
            sure, guess = self(x + 0.05 * torch.randn_like(x)).softmax(1).max(1)
        strong = self(x + 0.5 * torch.randn_like(x))
        extra = (F.cross_entropy(strong, guess, reduction="none") * (sure > 0.9)).mean()
        return {"loss": loss + extra, "sure": (sure > 0.9).float().mean()}

    def validation_step(self, batch):
        x, labels = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def fixmatch_pseudo_labels() -> tuple[forge.TaskModule, Splits]:
    _, splits = mean_teacher()
    return FixMatch(), splits


class Rotations(Classify):
    """The labels are made in the step: by how much was the picture turned?"""

    def turn(self, images: Tensor, g: torch.Generator | None) -> tuple[Tensor, Tensor]:
        quarters = torch.randint(4, (len(images),), generator=g)
        turned = torch.stack([torch.rot90(i, int(q), (1, 2)) for i, q in zip(images, quarters, strict=True)])
        return turned, quarters

    def training_step(self, batch):
        return super().training_step(self.turn(batch[0], None))

    def validation_step(self, batch):
        return super().validation_step(self.turn(batch[0], generator(7)))


@entry
def rotation_prediction() -> tuple[forge.TaskModule, Splits]:
    g = generator(8)
    images = torch.randn(320, 1, 12, 12, generator=g) * 0.5
    images[:, :, :4] += 2
    images[:, :, :, :4] += 1
    images = (images - images.mean()) / images.std()
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 4),
    )
    return Rotations(net, 3e-3), tensor_loaders(images)
