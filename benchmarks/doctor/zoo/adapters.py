"""Fine-tuning: frozen parts, low-rank updates, small added layers, several learning rates, tied weights."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import forge
from benchmarks.doctor.zoo.common import (
    Classify,
    Entry,
    accuracy,
    adamw,
    clusters,
    generator,
    gratings,
    mlp,
    tensor_loaders,
    topics,
    walks,
)
from forge.data import Splits

MODELS: dict[str, Entry] = {}


def entry(function: Entry) -> Entry:
    MODELS[function.__name__] = function
    return function


def pretrain(net: nn.Module, inputs: Tensor, labels: Tensor, steps: int = 30, lr: float = 1e-2) -> nn.Module:
    """A stand-in for downloaded weights: a short training on a related task."""
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for step in range(steps):
            part = slice(step * 32 % 256, step * 32 % 256 + 32)
            optimizer.zero_grad()
            F.cross_entropy(net(inputs[part]), labels[part]).backward()
            optimizer.step()
    net.zero_grad()
    return net


def conv_net(classes: int) -> nn.Sequential:
    conv = functools.partial(nn.Conv2d, kernel_size=3, stride=2, padding=1)
    return nn.Sequential(
        conv(3, 16),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        conv(16, 32),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, classes),
    )


class LowRank(nn.Module):
    """LoRA: a frozen layer plus B A; B starts at zero, so A has no gradient in the first update."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.down.T) @ self.up.T


class Tuned(Classify):
    """Only what requires a gradient is given to the optimizer."""

    def configure_optimizers(self):
        return adamw([p for p in self.parameters() if p.requires_grad], self.lr, 0.0)


def trained_mlp() -> nn.Sequential:
    inputs, labels = clusters(300, 12, 6, seed=1)
    return pretrain(mlp(12, 48, 48, 6), inputs, labels)


def new_task() -> Splits:
    inputs, labels = clusters(400, 12, 4, seed=2)
    return tensor_loaders(inputs, labels)


@entry
def lora_by_hand() -> tuple[forge.TaskModule, Splits]:
    net = trained_mlp()
    net[0], net[2] = LowRank(net[0]), LowRank(net[2])
    net[4] = nn.Linear(48, 4)
    return Tuned(net, 5e-3), new_task()


class LowRankWeight(nn.Module):
    def __init__(self, outputs: int, inputs: int, rank: int = 4):
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


@entry
def lora_as_parametrisation() -> tuple[forge.TaskModule, Splits]:
    net = trained_mlp().requires_grad_(False)
    for layer in (net[0], net[2]):
        parametrize.register_parametrization(layer, "weight", LowRankWeight(*layer.weight.shape))
    net[4] = nn.Linear(48, 4)
    return Tuned(net, 5e-3), new_task()


@entry
def bias_only_tuning() -> tuple[forge.TaskModule, Splits]:
    net = trained_mlp()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    net[4] = nn.Linear(48, 4)
    return Tuned(net, 1e-2), new_task()


class FrozenBackbone(forge.TaskModule):
    """A frozen convolutional network in eval mode, without a graph, and a new head."""

    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        net = conv_net(6)
        pretrain(net, *gratings(288, 24, classes=6, seed=5))
        net[-1] = nn.Identity()
        self.backbone = net.requires_grad_(False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 4)

    def train(self, mode: bool = True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(images)
        return self.head(self.norm(features))

    def training_step(self, batch):
        images, labels = batch
        logits = self(images)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw([*self.norm.parameters(), *self.head.parameters()], self.lr)


@entry
def frozen_backbone_new_head() -> tuple[forge.TaskModule, Splits]:
    return FrozenBackbone(), tensor_loaders(*gratings(200, 24), val=40)


class TwoRates(forge.TaskModule):
    """The pretrained body learns at a tenth of the head's rate, with a warmup over both groups."""

    def __init__(self):
        super().__init__()
        self.body, self.head = trained_mlp()[:4], nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch):
        x, labels = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    validation_step = training_step

    def configure_optimizers(self):
        groups = [
            {"params": self.body.parameters(), "lr": 1e-3},
            {"params": self.head.parameters(), "lr": 1e-2},
        ]
        optimizer = torch.optim.AdamW(groups)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)


@entry
def two_learning_rates() -> tuple[forge.TaskModule, Splits]:
    return TwoRates(), new_task()


class LayerDecay(Classify):
    """Learning rates fall by 0.7 per layer towards the input, as for fine-tuned transformers."""

    def configure_optimizers(self):
        layers = [layer for layer in self.net if any(True for _ in layer.parameters())]
        groups = [
            {"params": layer.parameters(), "lr": self.lr * 0.7 ** (len(layers) - 1 - i)}
            for i, layer in enumerate(layers)
        ]
        return torch.optim.AdamW(groups, lr=self.lr)


@entry
def layerwise_rate_decay() -> tuple[forge.TaskModule, Splits]:
    net = trained_mlp()
    net[4] = nn.Linear(48, 4)
    return LayerDecay(net, 5e-3), new_task()


class Thaw(Classify):
    """The body stays frozen for the first ten updates, then everything learns."""

    def __init__(self):
        net = trained_mlp()
        net[4] = nn.Linear(48, 4)
        super().__init__(net, 5e-3)
        self.net[:4].requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    @forge.hookimpl
    def forge_step_end(self, step):
        self.updates += 1
        if self.updates == 10:
            self.net.requires_grad_(True)


@entry
def gradual_unfreezing() -> tuple[forge.TaskModule, Splits]:
    return Thaw(), new_task()


class Prompted(forge.TaskModule):
    """Prompt tuning: a frozen transformer reads a few trained vectors before the text."""

    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(32, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embed.requires_grad_(False)
        self.encoder.requires_grad_(False)
        self.prompt = nn.Parameter(0.5 * torch.randn(4, 32))
        self.head = nn.Linear(32, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        words = torch.cat([self.prompt.expand(len(tokens), -1, -1), self.embed(tokens)], 1)
        padded = torch.cat([torch.zeros(len(tokens), 4, dtype=torch.bool), tokens == 0], 1)
        states = self.encoder(words, src_key_padding_mask=padded)
        return self.head(states[:, :4].mean(1))

    def training_step(self, batch):
        tokens, labels = batch
        logits = self(tokens)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW([self.prompt, *self.head.parameters()], lr=self.lr)


@entry
def prompt_tuning() -> tuple[forge.TaskModule, Splits]:
    tokens, _, labels = topics(320)
    return Prompted(), tensor_loaders(tokens, labels)


class Bottleneck(nn.Module):
    """An adapter: a frozen layer and a small residual network that begins at zero."""

    def __init__(self, layer: nn.Module, width: int):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 8), nn.Linear(8, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x + self.up(F.gelu(self.down(x)))


@entry
def bottleneck_adapters() -> tuple[forge.TaskModule, Splits]:
    net = trained_mlp()
    net[0], net[2] = Bottleneck(net[0], 48), Bottleneck(net[2], 48)
    net[4] = nn.Linear(48, 4)
    return Tuned(net, 5e-3), new_task()


class TiedWords(forge.TaskModule):
    """Input and output embeddings are one parameter, scaled on the way in."""

    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(24, 24)
        nn.init.normal_(self.embed.weight, std=24**-0.5)
        self.gru = nn.GRU(24, 24, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(24))

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.gru(self.embed(tokens) * 24**0.5)
        return F.linear(states, self.embed.weight, self.bias)

    def training_step(self, batch):
        (tokens,) = batch
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def tied_embeddings() -> tuple[forge.TaskModule, Splits]:
    return TiedWords(), tensor_loaders(walks(320, 12))


class Elastic(Classify):
    """Elastic weight consolidation: stay near old weights where they mattered. The penalty is zero at first."""

    def __init__(self):
        net = trained_mlp()
        net[4] = nn.Linear(48, 4)
        super().__init__(net, 5e-3)
        g = generator(4)
        for name, parameter in net[:4].named_parameters():
            key = name.replace(".", "_")
            self.register_buffer(f"old_{key}", parameter.detach().clone())
            self.register_buffer(f"worth_{key}", torch.rand(parameter.shape, generator=g))

    def training_step(self, batch):
        out = super().training_step(batch)
        penalty = torch.zeros(())
        for name, parameter in self.net[:4].named_parameters():
            key = name.replace(".", "_")
            gap = (parameter - getattr(self, f"old_{key}")).square()
            penalty = penalty + (getattr(self, f"worth_{key}") * gap).sum()
        return {"loss": out["loss"] + 0.5 * penalty, "accuracy": out["accuracy"], "penalty": penalty}


@entry
def elastic_weight_consolidation() -> tuple[forge.TaskModule, Splits]:
    return Elastic(), new_task()


class StillStatistics(Classify):
    """A convolutional network is tuned while its BatchNorm keeps its statistics (small batches)."""

    def train(self, mode: bool = True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


@entry
def batchnorm_kept_in_eval() -> tuple[forge.TaskModule, Splits]:
    net = conv_net(6)
    pretrain(net, *gratings(288, 24, classes=6, seed=5))
    net[-1] = nn.Linear(32, 4)
    return StillStatistics(net, 5e-3), tensor_loaders(*gratings(200, 24), batch_size=4, val=40)
