"""Ways of training that may look odd and are meant: mixed labels, reversed gradients, routing, inner loops."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.checkpoint import checkpoint

import forge
from benchmarks.doctor.zoo.common import (
    Classify,
    Entry,
    Regress,
    accuracy,
    adamw,
    clusters,
    generator,
    gratings,
    mlp,
    teacher_table,
    tensor_loaders,
    walks,
)
from forge.data import Splits

MODELS: dict[str, Entry] = {}


def entry(function: Entry) -> Entry:
    MODELS[function.__name__] = function
    return function


def blobs() -> Splits:
    return tensor_loaders(*clusters())


@entry
def label_smoothing() -> tuple[forge.TaskModule, Splits]:
    return Classify(mlp(8, 48, 4), 5e-3, smoothing=0.1), blobs()


class Mixup(Classify):
    """Training on mixtures of two samples and of their labels; validation on real ones."""

    def training_step(self, batch):
        x, labels = batch
        share = torch.distributions.Beta(0.4, 0.4).sample()
        order = torch.randperm(len(x))
        logits = self(share * x + (1 - share) * x[order])
        return {"loss": share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(logits, labels[order])}


@entry
def mixup() -> tuple[forge.TaskModule, Splits]:
    return Mixup(mlp(8, 48, 4), 5e-3), blobs()


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 4),
    )


class CutMix(Classify):
    """A patch of another picture; soft labels by area."""

    def training_step(self, batch):
        images, labels = batch
        order = torch.randperm(len(images))
        size = images.size(-1)
        side = int(torch.randint(2, size // 2 + 1, ()))
        top, left = (int(torch.randint(0, size - side, ())) for _ in range(2))
        mixed = images.clone()
        mixed[:, :, top : top + side, left : left + side] = images[order, :, top : top + side, left : left + side]
        area = side**2 / size**2
        target = (1 - area) * F.one_hot(labels, 4) + area * F.one_hot(labels[order], 4)
        return {"loss": F.cross_entropy(self(mixed), target)}


@entry
def cutmix_soft_labels() -> tuple[forge.TaskModule, Splits]:
    return CutMix(small_cnn(), 3e-3), tensor_loaders(*gratings(size=16))


class Focal(forge.TaskModule):
    """Focal loss for rare positives; the last bias starts at the prior of one in ten."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(8, 48, 1)
        nn.init.constant_(self.net[-1].bias, -math.log(9))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(1)

    def training_step(self, batch):
        x, labels = batch
        logits = self(x)
        each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        chance = logits.sigmoid()
        right = torch.where(labels == 1, chance, 1 - chance)
        weight = torch.where(labels == 1, 0.75, 0.25)
        return {"loss": (weight * (1 - right).square() * each).mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def focal_loss_prior_bias() -> tuple[forge.TaskModule, Splits]:
    x, y = teacher_table(480)
    return Focal(), tensor_loaders(x, (y[:, 0] > 1.2).float(), batch_size=32, val=96)


class Routed(nn.Module):
    """A mixture of experts with top-1 routing: an expert that got no token of a batch has no gradient."""

    def __init__(self, width: int = 16, experts: int = 6):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(mlp(width, 24, width) for _ in range(experts))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(1)
        weight, chosen = chances.max(1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        share = F.one_hot(chosen, len(self.experts)).float().mean(0)
        self.balance = len(self.experts) * (share * chances.mean(0)).sum()
        return x + out


class Experts(Classify):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Routed(), nn.Linear(16, 4)), 5e-3)

    def training_step(self, batch):
        out = super().training_step(batch)
        balance = self.net[2].balance
        return out | {"loss": out["loss"] + 0.01 * balance, "balance": balance}


@entry
def experts_top1() -> tuple[forge.TaskModule, Splits]:
    inputs, labels = clusters()
    return Experts(), tensor_loaders(inputs, labels, batch_size=8)


class Dropped(nn.Module):
    """Stochastic depth: a block is left out of training with a chance that grows with depth."""

    def __init__(self, blocks: int = 6, width: int = 32):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            keep = 1 - 0.3 * i / len(self.blocks)
            if not self.training:
                x = x + keep * block(x)
            elif torch.rand(()) < keep:
                x = x + block(x)
        return self.last(x)


@entry
def stochastic_depth() -> tuple[forge.TaskModule, Splits]:
    return Classify(Dropped(), 3e-3), blobs()


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return -ctx.strength * grad, None


class DANN(forge.TaskModule):
    """Domain-adversarial: the features learn to hide the domain, whose loss therefore stays near log 2."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.features = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.label, self.domain = nn.Linear(24, 4), mlp(24, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.label(self.features(x))

    def training_step(self, batch):
        x, labels, domain = batch
        features = self.features(x)
        source = domain == 0
        task = F.cross_entropy(self.label(features[source]), labels[source])
        guess = self.domain(Reverse.apply(features, 0.5)).squeeze(1)
        return {"loss": task + F.binary_cross_entropy_with_logits(guess, domain), "task": task}

    def validation_step(self, batch):
        x, labels, _ = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def gradient_reversal() -> tuple[forge.TaskModule, Splits]:
    x, labels = clusters(480)
    domain = (torch.rand(480, generator=generator(1)) < 0.5).float()
    shifted = x + domain[:, None] * torch.linspace(-0.6, 0.6, 8)
    return DANN(), tensor_loaders(shifted, labels, domain, batch_size=32)


class Maml(forge.TaskModule):
    """Sines from five points: the inner step is part of the graph, so its gradient is differentiated again."""

    evaluation = "grad"

    def __init__(self, inner: float = 0.05, lr: float = 3e-3):
        super().__init__()
        self.inner, self.lr = inner, lr
        self.net = mlp(1, 40, 40, 1, activation=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def adapted(self, x: Tensor, y: Tensor, graph: bool) -> dict[str, Tensor]:
        weights = dict(self.net.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(functional_call(self.net, weights, (x,)), y)
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=graph)
            weights = {k: w - self.inner * s for (k, w), s in zip(weights.items(), slopes, strict=True)}
        return weights

    def training_step(self, batch):
        losses = []
        for few_x, few_y, x, y in zip(*batch, strict=True):
            weights = self.adapted(few_x, few_y, graph=True)
            losses.append(F.mse_loss(functional_call(self.net, weights, (x,)), y))
        return torch.stack(losses).mean()

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@entry
def maml_inner_loop() -> tuple[forge.TaskModule, Splits]:
    g = generator(2)
    height, phase = 0.5 + torch.rand(240, 1, 1, generator=g), math.pi * torch.rand(240, 1, 1, generator=g)
    few, many = (4 * torch.rand(240, n, 1, generator=g) - 2 for n in (5, 10))
    return Maml(), tensor_loaders(
        few, height * torch.sin(few + phase), many, height * torch.sin(many + phase), batch_size=8
    )


class HalfPrecision(Classify):
    """Parameters and activations in bfloat16; the loss in float32. SGD with a rate that bfloat16 can resolve."""

    def __init__(self):
        super().__init__(mlp(8, 48, 4).to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(torch.bfloat16)).float()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@entry
def bfloat16_parameters() -> tuple[forge.TaskModule, Splits]:
    return HalfPrecision(), blobs()


class Autocast(Classify):
    """Mixed precision by hand: bfloat16 in the network, float32 weights."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.net(x)
        return logits.float()


@entry
def autocast_by_hand() -> tuple[forge.TaskModule, Splits]:
    return Autocast(mlp(8, 48, 4), 5e-3), blobs()


class Summed(forge.TaskModule):
    """The loss is a sum over the batch, and the learning rate is small to match."""

    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(8, 48, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        return F.mse_loss(self(x), y, reduction="sum")

    def validation_step(self, batch):
        x, y = batch
        return {"mse": F.mse_loss(self(x), y)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@entry
def summed_loss_small_rate() -> tuple[forge.TaskModule, Splits]:
    return Summed(), tensor_loaders(*teacher_table())


class PerToken(forge.TaskModule):
    """A sum over tokens divided by their number, with lengths that differ; the batch weighs as many items."""

    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(24, 24)
        self.gru = nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(32, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(tokens))[0])

    def training_step(self, batch):
        (tokens,) = batch
        each = F.cross_entropy(self(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
        mask = tokens[:, 1:] != 0
        return (each * mask).sum() / mask.sum()

    validation_step = training_step

    def num_items(self, batch):
        return (batch[0][:, 1:] != 0).sum()

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def sum_over_tokens_divided() -> tuple[forge.TaskModule, Splits]:
    tokens = walks(320, 14)
    lengths = torch.randint(5, 15, (320, 1), generator=generator(3))
    return PerToken(), tensor_loaders(tokens * (torch.arange(14) < lengths))


class Sign(torch.autograd.Function):
    """The sign of a number; the gradient passes where the number is small."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class BinaryLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().mean()
        return F.linear(x, Sign.apply(self.weight) * scale, self.bias)


class Signs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Sign.apply(x)


@entry
def binary_weights_straight_through() -> tuple[forge.TaskModule, Splits]:
    net = nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), Signs(), BinaryLinear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)
    )
    return Classify(net, 5e-3), blobs()


class FakeQuantised(nn.Linear):
    """Quantisation-aware training: weights are rounded to eight bits on the way, gradients pass."""

    def forward(self, x: Tensor) -> Tensor:
        step = self.weight.detach().abs().amax(1, keepdim=True) / 127
        rounded = (self.weight / step).round() * step
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


@entry
def quantisation_aware() -> tuple[forge.TaskModule, Splits]:
    net = nn.Sequential(FakeQuantised(8, 48), nn.ReLU(), FakeQuantised(48, 4))
    return Classify(net, 5e-3), blobs()


class Masked(nn.Module):
    def __init__(self, mask: Tensor):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


@entry
def pruned_weights() -> tuple[forge.TaskModule, Splits]:
    """A sparse network: eight weights in ten are held at zero."""
    net = mlp(8, 128, 128, 4)
    g = generator(4)
    for layer in (net[0], net[2]):
        mask = (torch.rand(layer.weight.shape, generator=g) < 0.2).float()
        with torch.no_grad():
            layer.weight.mul_(5**0.5)
        parametrize.register_parametrization(layer, "weight", Masked(mask))
    return Classify(net, 5e-3), blobs()


@entry
def orthogonal_weights() -> tuple[forge.TaskModule, Splits]:
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), orthogonal(nn.Linear(32, 32)), nn.Tanh(), nn.Linear(32, 4))
    return Classify(net, 5e-3), blobs()


class Adversarial(Classify):
    """Each step first looks for a small change of the input that hurts, without touching the weights' gradients."""

    def training_step(self, batch):
        x, labels = batch
        shifted = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(self(shifted), labels), shifted)
        logits = self(x + 0.1 * slope.sign())
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}


@entry
def adversarial_training() -> tuple[forge.TaskModule, Splits]:
    return Adversarial(mlp(8, 48, 4), 5e-3), blobs()


class Sharpness(Classify):
    """Sharpness-aware: the loss at weights that were moved uphill; the move itself is a constant."""

    def training_step(self, batch):
        x, labels = batch
        weights = dict(self.net.named_parameters())
        first = F.cross_entropy(self(x), labels)
        slopes = torch.autograd.grad(first, list(weights.values()))
        length = torch.stack([s.norm() for s in slopes]).norm() + 1e-12
        moved = {k: w + 0.05 * s / length for (k, w), s in zip(weights.items(), slopes, strict=True)}
        logits = functional_call(self.net, moved, (x,))
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}


@entry
def sharpness_aware() -> tuple[forge.TaskModule, Splits]:
    return Sharpness(mlp(8, 48, 4), 5e-3), blobs()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 48), nn.Linear(48, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


@entry
def gradient_checkpointing() -> tuple[forge.TaskModule, Splits]:
    return Classify(Checkpointed(), 3e-3), blobs()


class Hyper(nn.Module):
    """A network whose weights come from another network."""

    def __init__(self):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 6 * 12 + 12 + 12 + 1))
        with torch.no_grad():
            self.maker[-1].weight.mul_(0.3)
            self.maker[-1].bias.uniform_(-0.4, 0.4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.maker(x[:, :2])
        first, bias, second, last = made.split([72, 12, 12, 1], 1)
        hidden = torch.relu(torch.einsum("bi,bij->bj", x[:, 2:], first.view(-1, 6, 12)) + bias)
        return (hidden * second).sum(1, keepdim=True) + last


@entry
def hypernetwork() -> tuple[forge.TaskModule, Splits]:
    return Regress(Hyper(), 3e-3), tensor_loaders(*teacher_table())


class EarlyExits(forge.TaskModule):
    """A classifier after every block; all losses count, the last one is the result."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(w, 32), nn.ReLU()) for w in (8, 32, 32))
        self.exits = nn.ModuleList(nn.Linear(32, 4) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            outputs.append(leave(x))
        return outputs

    def training_step(self, batch):
        x, labels = batch
        outputs = self(x)
        losses = [F.cross_entropy(logits, labels) for logits in outputs]
        return {"loss": sum(losses) / len(losses), "accuracy": accuracy(outputs[-1], labels)}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def early_exits() -> tuple[forge.TaskModule, Splits]:
    return EarlyExits(), blobs()


class Ensemble(forge.TaskModule):
    """Five networks side by side in batched weights; their losses are summed, their chances averaged."""

    def __init__(self, members: int = 5, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.first = nn.Parameter(torch.randn(members, 8, 32) * (2 / 8) ** 0.5)
        self.shift = nn.Parameter(torch.zeros(members, 1, 32))
        self.last = nn.Parameter(torch.randn(members, 32, 4) / 32**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.first + self.shift) @ self.last

    def training_step(self, batch):
        x, labels = batch
        logits = self(x)
        many = labels.expand(len(logits), -1)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), many.flatten())}

    def validation_step(self, batch):
        x, labels = batch
        chances = self(x).softmax(-1).mean(0)
        return {"loss": F.nll_loss(chances.log(), labels), "accuracy": accuracy(chances, labels)}

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def ensemble_batched() -> tuple[forge.TaskModule, Splits]:
    return Ensemble(), blobs()


class Averaged(Classify):
    """A moving average of the weights is what validation uses."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 4)), 5e-3)
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def validation_step(self, batch):
        x, labels = batch
        logits = self.average(x)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    @forge.hookimpl
    def forge_step_end(self, step):
        with torch.no_grad():
            for a, b in zip(self.average.parameters(), self.net.parameters(), strict=True):
                a.lerp_(b, 0.2)
            for a, b in zip(self.average.buffers(), self.net.buffers(), strict=True):
                a.copy_(b)

    def configure_optimizers(self):
        return adamw(self.net.parameters(), self.lr)


@entry
def averaged_weights_by_hand() -> tuple[forge.TaskModule, Splits]:
    return Averaged(), blobs()


class MonteCarlo(Regress):
    """Dropout; predictions are means over many masks, on purpose."""

    def predict_step(self, batch):
        x = batch[0]
        self.net.train()
        draws = torch.stack([self(x) for _ in range(8)])
        self.net.eval()
        return {"mean": draws.mean(0), "std": draws.std(0)}


@entry
def monte_carlo_dropout_predictions() -> tuple[forge.TaskModule, Splits]:
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
    return MonteCarlo(net, 5e-3), tensor_loaders(*teacher_table())


class RandomFeatures(nn.Module):
    """Random Fourier features: the first layer is a fixed buffer by design; only the readout learns."""

    def __init__(self, width: int = 128):
        super().__init__()
        g = generator(5)
        self.register_buffer("weight", 0.5 * torch.randn(8, width, generator=g))
        self.register_buffer("phase", 2 * math.pi * torch.rand(width, generator=g))
        self.readout = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.cos(x @ self.weight + self.phase) * 2**0.5)


@entry
def random_features_fixed_layer() -> tuple[forge.TaskModule, Splits]:
    return Regress(RandomFeatures(), 1e-2), tensor_loaders(*teacher_table())


class NoDecay(forge.TaskModule):
    """SGD with Nesterov momentum; no weight decay on norms and biases; a cosine over the run's length."""

    def __init__(self, lr: float = 0.05):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch):
        x, labels = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    validation_step = training_step

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 5e-4}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=0.9, nesterov=True)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 220)


@entry
def sgd_groups_cosine() -> tuple[forge.TaskModule, Splits]:
    return NoDecay(), blobs()


class Plateau(Regress):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3), "val/loss"


@entry
def reduce_on_plateau() -> tuple[forge.TaskModule, Splits]:
    return Plateau(mlp(8, 48, 1), 5e-3), tensor_loaders(*teacher_table())


class Ghost(nn.Module):
    """Ghost BatchNorm: statistics of small parts of a batch, so a sample's output depends on its neighbours."""

    def __init__(self, width: int, part: int = 8):
        super().__init__()
        self.norm, self.part = nn.BatchNorm1d(width), part

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.norm(x)
        return torch.cat([self.norm(piece) for piece in x.split(self.part)])


@entry
def ghost_batchnorm() -> tuple[forge.TaskModule, Splits]:
    net = nn.Sequential(nn.Linear(8, 48), Ghost(48), nn.ReLU(), nn.Linear(48, 4))
    return Classify(net, 5e-3), blobs()


class Whitened(forge.TaskModule):
    """Deep CCA-like: the loss correlates two views over the batch and is negative."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.left, self.right = mlp(8, 32, 4), mlp(8, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x)

    def training_step(self, batch):
        left, right = self.left(batch[0]), self.right(batch[1])
        left, right = ((v - v.mean(0)) / (v.std(0) + 1e-4) for v in (left, right))
        cross = left.T @ right / (len(left) - 1)
        within = left.T @ left / (len(left) - 1) - torch.eye(4)
        return {"loss": -cross.diagonal().mean() + 0.1 * within.square().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def correlation_over_batch() -> tuple[forge.TaskModule, Splits]:
    g = generator(6)
    hidden = torch.randn(480, 4, generator=g)
    views = [torch.tanh(hidden @ torch.randn(4, 8, generator=g)) for _ in range(2)]
    views = [v + 0.2 * torch.randn(480, 8, generator=g) for v in views]
    return Whitened(), tensor_loaders(*views, batch_size=48)


class Bayesian(nn.Module):
    """Weights are drawn again in every training step (Bayes by backprop); means in evaluation."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.mean = nn.Parameter(torch.randn(outputs, inputs) * (1 / inputs) ** 0.5)
        self.raw = nn.Parameter(torch.full((outputs, inputs), -4.0))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mean
        if self.training:
            weight = weight + F.softplus(self.raw) * torch.randn_like(self.mean)
        return F.linear(x, weight, self.bias)

    def divergence(self) -> Tensor:
        scale = F.softplus(self.raw)
        return (scale.square() / 2 + self.mean.square() / 2 - scale.log() - 0.5).sum()


class BayesianTask(Regress):
    def __init__(self):
        super().__init__(nn.Sequential(Bayesian(8, 32), nn.ReLU(), Bayesian(32, 1)), 5e-3)

    def training_step(self, batch):
        x, y = batch
        fit = F.gaussian_nll_loss(self(x), y, torch.full_like(y, 0.05))
        divergence = sum(layer.divergence() for layer in self.net if isinstance(layer, Bayesian))
        return {"loss": fit + divergence / 352, "fit": fit}

    def validation_step(self, batch):
        x, y = batch
        return {"mse": F.mse_loss(self(x), y)}


@entry
def bayes_by_backprop() -> tuple[forge.TaskModule, Splits]:
    return BayesianTask(), tensor_loaders(*teacher_table())


class Noisy(Classify):
    """A third of the labels is wrong on purpose; generalised cross-entropy bears it. Validation labels are clean."""

    def training_step(self, batch):
        x, labels = batch
        chance = self(x).softmax(1).gather(1, labels[:, None]).squeeze(1)
        return {"loss": ((1 - chance.clamp(min=1e-6).pow(0.7)) / 0.7).mean()}


@entry
def noisy_labels_robust_loss() -> tuple[forge.TaskModule, Splits]:
    g = generator(7)
    splits = blobs()
    x, labels = splits.train.dataset.tensors
    wrong = torch.rand(len(labels), generator=g) < 0.3
    noisy = torch.where(wrong, torch.randint(4, labels.shape, generator=g), labels)
    splits.train.dataset.tensors = (x, noisy)
    return Noisy(mlp(8, 48, 4), 5e-3), splits


class Hinged(forge.TaskModule):
    """A linear support vector machine: samples beyond the margin cost nothing and have no gradient."""

    def __init__(self, lr: float = 0.05):
        super().__init__()
        self.lr = lr
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze(1)

    def training_step(self, batch):
        x, side = batch
        score = self(x)
        loss = F.relu(1 - side * score).mean() + 0.01 * self.layer.weight.square().sum()
        return {"loss": loss, "accuracy": ((score > 0) == (side > 0)).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@entry
def support_vector_machine() -> tuple[forge.TaskModule, Splits]:
    x, y = teacher_table()
    return Hinged(), tensor_loaders(x, torch.where(y[:, 0] > 0, 1.0, -1.0))
