"""Generative models: autoencoders, adversarial pairs, diffusion, flows, and energies."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import forge
from benchmarks.doctor.zoo.common import Entry, adamw, generator, gratings, mlp, tensor_loaders
from forge.data import Splits

MODELS: dict[str, Entry] = {}


def entry(function: Entry) -> Entry:
    MODELS[function.__name__] = function
    return function


def pictures(count: int = 320, size: int = 12) -> Tensor:
    """Bright discs on black, between 0 and 1."""
    g = generator(1)
    ys, xs = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre = 3 + (size - 7) * torch.rand(count, 2, 1, 1, generator=g)
    radius = 1.5 + 2 * torch.rand(count, 1, 1, generator=g)
    distance = ((xs - centre[:, 0]) ** 2 + (ys - centre[:, 1]) ** 2).sqrt()
    return torch.sigmoid(2 * (radius - distance))[:, None]


def moons(count: int = 512) -> Tensor:
    """Two half circles in the plane, standardised."""
    g = generator(2)
    angle = math.pi * torch.rand(count, generator=g)
    upper = torch.rand(count, generator=g) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    points = torch.stack([x, y], 1) + 0.05 * torch.randn(count, 2, generator=g)
    return (points - points.mean(0)) / points.std(0)


class VAE(forge.TaskModule):
    """Bernoulli pixels, Gaussian code; the loss is the negative ELBO per picture. Validation uses the mean code."""

    def __init__(self, beta: float = 1.0, lr: float = 2e-3):
        super().__init__()
        self.beta, self.lr = beta, lr
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 144), nn.Unflatten(1, (1, 12, 12)))

    def forward(self, pictures: Tensor) -> Tensor:
        return self.decoder(self.encoder(pictures).chunk(2, 1)[0]).sigmoid()

    def training_step(self, batch):
        (images,) = batch
        mean, logvar = self.encoder(images).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * logvar).exp() if self.training else mean
        rebuilt = F.binary_cross_entropy_with_logits(self.decoder(code), images, reduction="sum") / len(images)
        divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum() / len(images)
        return {"loss": rebuilt + self.beta * divergence, "rebuilt": rebuilt, "divergence": divergence}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def vae() -> tuple[forge.TaskModule, Splits]:
    return VAE(), tensor_loaders(pictures())


@entry
def beta_vae() -> tuple[forge.TaskModule, Splits]:
    return VAE(beta=4.0), tensor_loaders(pictures())


class Autoencoder(forge.TaskModule):
    """A convolutional autoencoder with a bottleneck."""

    def __init__(self, noise: float = 0.0, lr: float = 3e-3):
        super().__init__()
        self.noise, self.lr = noise, lr
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(288, 12)
        )
        self.decoder = nn.Sequential(
            nn.Linear(12, 288), nn.ReLU(), nn.Unflatten(1, (8, 6, 6)), nn.ConvTranspose2d(8, 1, 4, 2, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))

    def training_step(self, batch):
        (images,) = batch
        shown = images + self.noise * torch.randn_like(images) if self.training and self.noise else images
        return F.mse_loss(self(shown), images)

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def autoencoder() -> tuple[forge.TaskModule, Splits]:
    return Autoencoder(), tensor_loaders(pictures())


@entry
def denoising_autoencoder() -> tuple[forge.TaskModule, Splits]:
    """Noise is added in training only."""
    return Autoencoder(noise=0.3), tensor_loaders(pictures())


class Sparse(forge.TaskModule):
    """A sparse autoencoder: ReLU codes with an L1 penalty, decoder columns kept at length one after each update."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Linear(16, 64)
        self.decoder = nn.Linear(64, 16)
        self.normalise()

    @torch.no_grad()
    def normalise(self) -> None:
        self.decoder.weight.copy_(F.normalize(self.decoder.weight, dim=0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = F.relu(self.encoder(x - self.decoder.bias))
        return self.decoder(code), code

    def training_step(self, batch):
        (x,) = batch
        rebuilt, code = self(x)
        error = (rebuilt - x).square().sum(1).mean()
        return {"loss": error + 0.3 * code.sum(1).mean(), "error": error, "active": (code > 0).float().mean()}

    validation_step = training_step

    @forge.hookimpl
    def forge_step_end(self, step):
        self.normalise()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@entry
def sparse_autoencoder_unit_norm() -> tuple[forge.TaskModule, Splits]:
    g = generator(3)
    features = F.normalize(torch.randn(32, 16, generator=g), dim=1)
    use = (torch.rand(480, 32, generator=g) < 0.1) * (1 + torch.rand(480, 32, generator=g))
    return Sparse(), tensor_loaders(use @ features, batch_size=32)


class VQVAE(forge.TaskModule):
    """Codes are the nearest vectors of a codebook; the gradient passes straight through, plus the commitment loss."""

    def __init__(self, codes: int = 32, width: int = 8, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, width, 1)
        )
        self.decoder = nn.Sequential(nn.Conv2d(width, 16, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1))
        self.codebook = nn.Embedding(codes, width)
        nn.init.normal_(self.codebook.weight, std=0.3)

    def quantise(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        flat = encoded.permute(0, 2, 3, 1)
        distance = torch.cdist(flat.flatten(0, 2), self.codebook.weight)
        nearest = distance.argmin(1)
        chosen = self.codebook(nearest).view_as(flat).permute(0, 3, 1, 2)
        loss = F.mse_loss(chosen, encoded.detach()) + 0.25 * F.mse_loss(encoded, chosen.detach())
        return encoded + (chosen - encoded).detach(), loss

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.quantise(self.encoder(images))[0])

    def training_step(self, batch):
        (images,) = batch
        quantised, extra = self.quantise(self.encoder(images))
        rebuilt = F.mse_loss(self.decoder(quantised), images)
        return {"loss": rebuilt + extra, "rebuilt": rebuilt}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@entry
def vq_vae() -> tuple[forge.TaskModule, Splits]:
    return VQVAE(), tensor_loaders((pictures() - 0.2) / 0.35)


class EmaVQVAE(VQVAE):
    """The codebook is a buffer: moving averages of what was assigned to a code, without any gradient."""

    def __init__(self):
        super().__init__(lr=3e-3)
        g = generator(4)
        del self.codebook
        self.register_buffer("vectors", 0.1 * torch.randn(32, 8, generator=g))
        self.register_buffer("sums", self.vectors.clone())
        self.register_buffer("counts", torch.ones(32))

    def quantise(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        flat = encoded.permute(0, 2, 3, 1)
        rows = flat.flatten(0, 2)
        nearest = torch.cdist(rows.detach(), self.vectors).argmin(1)
        chosen = self.vectors[nearest].view_as(flat).permute(0, 3, 1, 2)
        if self.training:
            with torch.no_grad():
                hits = F.one_hot(nearest, 32).float()
                self.counts.lerp_(hits.sum(0), 0.1)
                self.sums.lerp_(hits.T @ rows, 0.1)
                self.vectors.copy_(self.sums / self.counts.clamp(min=0.1)[:, None])
        return encoded + (chosen - encoded).detach(), 0.25 * F.mse_loss(encoded, chosen.clone())


@entry
def vq_vae_moving_average() -> tuple[forge.TaskModule, Splits]:
    return EmaVQVAE(), tensor_loaders((pictures() - 0.2) / 0.35)


class GAN(forge.TaskModule):
    """The first GAN, with the generator's loss that does not saturate."""

    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.generator = mlp(4, 32, 32, 2)
        self.critic = mlp(2, 32, 32, 1, activation=lambda: nn.LeakyReLU(0.2))

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch, name):
        (real,) = batch
        fake = self(torch.randn(len(real), 4))
        if name == "generator":
            return {"loss": F.softplus(-self.critic(fake)).mean()}
        loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        return {"loss": loss}

    def validation_step(self, batch):
        (real,) = batch
        fake = self(torch.randn(len(real), 4, generator=generator(5)))
        between = torch.cdist(real, fake).mean()
        within = (torch.cdist(real, real).mean() + torch.cdist(fake, fake).mean()) / 2
        return {"energy_distance": between - within}

    def configure_optimizers(self):
        return {
            "critic": torch.optim.Adam(self.critic.parameters(), lr=self.lr, betas=(0.5, 0.9)),
            "generator": torch.optim.Adam(self.generator.parameters(), lr=self.lr, betas=(0.5, 0.9)),
        }


@entry
def gan() -> tuple[forge.TaskModule, Splits]:
    return GAN(), tensor_loaders(moons(), batch_size=32, val=64)


class WGANGP(GAN):
    """Wasserstein GAN with gradient penalty: five updates of the critic for each of the generator."""

    def training_step(self, batch, name):
        (real,) = batch
        fake = self(torch.randn(len(real), 4))
        if name == "generator":
            return -self.critic(fake).mean()
        fake = fake.detach()
        mix = torch.rand(len(real), 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
        return {"loss": self.critic(fake).mean() - self.critic(real).mean() + penalty, "penalty": penalty}

    def takes_turn(self, name, update):
        return name == "critic" or update % 5 == 4

    def configure_optimizers(self):
        return {
            "critic": torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.0, 0.9)),
            "generator": torch.optim.Adam(self.generator.parameters(), lr=5e-4, betas=(0.0, 0.9)),
        }


@entry
def wgan_gradient_penalty() -> tuple[forge.TaskModule, Splits]:
    return WGANGP(), tensor_loaders(moons(), batch_size=32, val=64)


class WGANClip(GAN):
    """The first Wasserstein GAN: the critic's weights are clipped after every update."""

    def training_step(self, batch, name):
        (real,) = batch
        fake = self(torch.randn(len(real), 4))
        if name == "generator":
            return -self.critic(fake).mean()
        return self.critic(fake).mean() - self.critic(real).mean()

    def takes_turn(self, name, update):
        return name == "critic" or update % 5 == 4

    @forge.hookimpl
    def forge_step_end(self, step):
        with torch.no_grad():
            for weight in self.critic.parameters():
                weight.clamp_(-0.1, 0.1)

    def configure_optimizers(self):
        return {
            "critic": torch.optim.RMSprop(self.critic.parameters(), lr=1e-3),
            "generator": torch.optim.RMSprop(self.generator.parameters(), lr=5e-4),
        }


@entry
def wgan_clipped() -> tuple[forge.TaskModule, Splits]:
    return WGANClip(), tensor_loaders(moons(), batch_size=32, val=64)


class Drawn(forge.TaskModule):
    """A convolutional GAN with hinge loss: spectral norm in the critic, BatchNorm in the generator."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(8, 16 * 9),
            nn.Unflatten(1, (16, 3, 3)),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 16, 4, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, 2, 1),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(
            spectral_norm(nn.Conv2d(1, 16, 4, 2, 1)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Conv2d(16, 32, 4, 2, 1)),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            spectral_norm(nn.Linear(288, 1)),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch, name):
        (real,) = batch
        fake = self(torch.randn(len(real), 8))
        if name == "generator":
            return -self.critic(fake).mean()
        return F.relu(1 - self.critic(real)).mean() + F.relu(1 + self.critic(fake.detach())).mean()

    def validation_step(self, batch):
        (real,) = batch
        fake = self(torch.randn(len(real), 8, generator=generator(6)))
        return {"mean_gap": (fake.mean(0) - real.mean(0)).abs().mean()}

    def configure_optimizers(self):
        return {
            "critic": torch.optim.Adam(self.critic.parameters(), lr=4e-4, betas=(0.0, 0.9)),
            "generator": torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.0, 0.9)),
        }


@entry
def spectral_norm_gan() -> tuple[forge.TaskModule, Splits]:
    return Drawn(), tensor_loaders(2 * pictures() - 1)


class Translated(forge.TaskModule):
    """pix2pix: a paired translation, least squares for the critic plus an L1 loss for the generator."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.InstanceNorm2d(16), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1)
        )
        self.critic = nn.Sequential(nn.Conv2d(2, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 3, padding=1))

    def forward(self, source: Tensor) -> Tensor:
        return self.generator(source)

    def training_step(self, batch, name):
        source, target = batch
        fake = self(source)
        if name == "generator":
            judged = self.critic(torch.cat([source, fake], 1))
            return (judged - 1).square().mean() + 10 * F.l1_loss(fake, target)
        good = self.critic(torch.cat([source, target], 1))
        bad = self.critic(torch.cat([source, fake.detach()], 1))
        return ((good - 1).square().mean() + bad.square().mean()) / 2

    def validation_step(self, batch):
        source, target = batch
        return {"l1": F.l1_loss(self(source), target)}

    def configure_optimizers(self):
        return {
            "critic": torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.5, 0.999)),
            "generator": torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        }


@entry
def pix2pix() -> tuple[forge.TaskModule, Splits]:
    images = 2 * pictures() - 1
    edges = F.conv2d(images, torch.tensor([[[[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]]]), padding=1)
    return Translated(), tensor_loaders(edges, images)


class Times(nn.Module):
    """Sines of the time step."""

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("speeds", torch.exp(torch.linspace(0, math.log(1000), width // 2)))

    def forward(self, times: Tensor) -> Tensor:
        angles = times[:, None] * self.speeds
        return torch.cat([angles.sin(), angles.cos()], 1)


class DDPM(forge.TaskModule):
    """Predict the noise at a random step; the last layer starts at zero. Validation draws from a fixed generator."""

    def __init__(self, steps: int = 100, lr: float = 2e-3):
        super().__init__()
        self.steps, self.lr = steps, lr
        self.times = Times(32)
        self.net = mlp(34, 64, 64, 2, activation=nn.SiLU)
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.1, steps), 0))

    def forward(self, points: Tensor, step: Tensor) -> Tensor:
        return self.net(torch.cat([points, self.times(step / self.steps)], 1))

    def loss(self, points: Tensor, g: torch.Generator | None) -> Tensor:
        step = torch.randint(self.steps, (len(points),), generator=g)
        noise = torch.randn(points.shape, generator=g)
        kept = self.kept[step][:, None]
        return F.mse_loss(self(kept.sqrt() * points + (1 - kept).sqrt() * noise, step), noise)

    def training_step(self, batch):
        return self.loss(batch[0], None)

    def validation_step(self, batch):
        return self.loss(batch[0], generator(7))

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def ddpm() -> tuple[forge.TaskModule, Splits]:
    return DDPM(), tensor_loaders(moons(), batch_size=32, val=64)


class Guided(DDPM):
    """Classifier-free guidance: one label in ten is dropped in training; kept in validation."""

    def __init__(self):
        super().__init__()
        self.labels = nn.Embedding(3, 34)
        nn.init.normal_(self.labels.weight, std=0.02)

    def loss_with(self, points: Tensor, labels: Tensor, g: torch.Generator | None) -> Tensor:
        step = torch.randint(self.steps, (len(points),), generator=g)
        noise = torch.randn(points.shape, generator=g)
        kept = self.kept[step][:, None]
        noisy = kept.sqrt() * points + (1 - kept).sqrt() * noise
        inputs = torch.cat([noisy, self.times(step / self.steps)], 1) + self.labels(labels)
        return F.mse_loss(self.net(inputs), noise)

    def training_step(self, batch):
        points, labels = batch
        labels = torch.where(torch.rand(len(labels)) < 0.1, 2, labels)
        return self.loss_with(points, labels, None)

    def validation_step(self, batch):
        return self.loss_with(*batch, generator(7))


@entry
def guided_diffusion() -> tuple[forge.TaskModule, Splits]:
    points = moons()
    return Guided(), tensor_loaders(points, (points[:, 1] > 0).long(), batch_size=32, val=64)


class Matched(forge.TaskModule):
    """Flow matching: regress the straight velocity from noise to data."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.times = Times(16)
        self.net = mlp(18, 64, 64, 2, activation=nn.SiLU)

    def forward(self, points: Tensor, time: Tensor) -> Tensor:
        return self.net(torch.cat([points, self.times(time)], 1))

    def loss(self, points: Tensor, g: torch.Generator | None) -> Tensor:
        noise = torch.randn(points.shape, generator=g)
        time = torch.rand(len(points), generator=g)
        between = time[:, None] * points + (1 - time[:, None]) * noise
        return F.mse_loss(self(between, time), points - noise)

    def training_step(self, batch):
        return self.loss(batch[0], None)

    def validation_step(self, batch):
        return self.loss(batch[0], generator(8))

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def flow_matching() -> tuple[forge.TaskModule, Splits]:
    return Matched(), tensor_loaders(moons(), batch_size=64, val=64)


class Coupling(nn.Module):
    def __init__(self, mask: Tensor):
        super().__init__()
        self.register_buffer("mask", mask)
        self.net = mlp(2, 32, 32, 4)
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.net(x * self.mask).chunk(2, 1)
        scale, shift = torch.tanh(scale) * (1 - self.mask), shift * (1 - self.mask)
        return x * scale.exp() + shift, scale.sum(1)


class RealNVP(forge.TaskModule):
    """A normalising flow that begins as the identity. The loss is a log-density and may be negative."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        masks = [torch.tensor([float(i % 2), float((i + 1) % 2)]) for i in range(6)]
        self.layers = nn.ModuleList(Coupling(mask) for mask in masks)

    def forward(self, points: Tensor) -> Tensor:
        """Return the log-density of points."""
        total = torch.zeros(len(points))
        for layer in self.layers:
            points, change = layer(points)
            total = total + change
        return total - 0.5 * points.square().sum(1) - math.log(2 * math.pi)

    def training_step(self, batch):
        return -self(batch[0]).mean()

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def real_nvp() -> tuple[forge.TaskModule, Splits]:
    return RealNVP(), tensor_loaders(moons(), batch_size=32, val=64)


class MaskedLinear(nn.Linear):
    """A linear layer of MADE: some weights are never used, by design."""

    def __init__(self, inputs: int, outputs: int, mask: Tensor):
        super().__init__(inputs, outputs)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class MADE(forge.TaskModule):
    """An autoregressive density of eight numbers with masked weights; Gaussians per dimension."""

    def __init__(self, size: int = 8, hidden: int = 64, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        order, inner = torch.arange(size), torch.arange(hidden) % (size - 1)
        first = (inner[:, None] >= order[None]).float()
        last = (order[:, None] > inner[None]).float().repeat(2, 1)
        self.net = nn.Sequential(MaskedLinear(size, hidden, first), nn.ReLU(), MaskedLinear(hidden, 2 * size, last))

    def forward(self, x: Tensor) -> Tensor:
        mean, logvar = self.net(x).chunk(2, 1)
        return -0.5 * ((x - mean).square() * (-logvar).exp() + logvar + math.log(2 * math.pi)).sum(1)

    def training_step(self, batch):
        return -self(batch[0]).mean()

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def made_masked_weights() -> tuple[forge.TaskModule, Splits]:
    g = generator(9)
    values = torch.randn(480, 8, generator=g).cumsum(1)
    return MADE(), tensor_loaders(values / values.std(0), batch_size=32)


class MaskedConv(nn.Conv2d):
    def __init__(self, kind: str, *args, **options):
        super().__init__(*args, **options)
        size = self.kernel_size[0]
        mask = torch.ones(size, size)
        mask[size // 2, size // 2 + (kind == "B") :] = 0
        mask[size // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


class PixelCNN(forge.TaskModule):
    """Each pixel from those before it: the loss is in nats per pixel."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            MaskedConv("A", 1, 24, 5, padding=2),
            nn.ReLU(),
            MaskedConv("B", 24, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 1, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images * 2 - 1)

    def training_step(self, batch):
        (images,) = batch
        return F.binary_cross_entropy_with_logits(self(images), images)

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def pixel_cnn() -> tuple[forge.TaskModule, Splits]:
    return PixelCNN(), tensor_loaders((pictures() > 0.5).float())


class Energy(forge.TaskModule):
    """An energy trained by contrast with samples of a short Langevin chain. Its loss moves around zero."""

    evaluation = "grad"

    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(2, 64, 64, 1, activation=nn.SiLU)

    def forward(self, points: Tensor) -> Tensor:
        return self.net(points).squeeze(1)

    def chain(self, start: Tensor, g: torch.Generator | None) -> Tensor:
        points = start
        for _ in range(10):
            points = points.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self(points).sum(), points)
            points = points - 0.1 * slope + 0.1 * torch.randn(points.shape, generator=g)
        return points.detach()

    def loss(self, real: Tensor, g: torch.Generator | None) -> dict[str, Tensor]:
        fake = self.chain(torch.randn(real.shape, generator=g), g)
        good, bad = self(real), self(fake)
        return {"loss": good.mean() - bad.mean() + 0.1 * (good.square() + bad.square()).mean()}

    def training_step(self, batch):
        return self.loss(batch[0], None)

    def validation_step(self, batch):
        return self.loss(batch[0], generator(10))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr, betas=(0.0, 0.999))


@entry
def energy_model_langevin() -> tuple[forge.TaskModule, Splits]:
    return Energy(), tensor_loaders(moons(), batch_size=32, val=64)


class ScoreMatching(forge.TaskModule):
    """Sliced score matching: the loss holds derivatives of the network and falls below zero."""

    evaluation = "grad"

    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(2, 64, 64, 2, activation=nn.Softplus)

    def forward(self, points: Tensor) -> Tensor:
        return self.net(points)

    def loss(self, points: Tensor, g: torch.Generator | None) -> Tensor:
        points = points.clone().requires_grad_()
        direction = torch.randn(points.shape, generator=g)
        score = self(points)
        (slope,) = torch.autograd.grad((score * direction).sum(), points, create_graph=True)
        return ((slope * direction).sum(1) + 0.5 * (score * direction).sum(1).square()).mean()

    def training_step(self, batch):
        return self.loss(batch[0], None)

    def validation_step(self, batch):
        return self.loss(batch[0], generator(11))

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def sliced_score_matching() -> tuple[forge.TaskModule, Splits]:
    return ScoreMatching(), tensor_loaders(moons(), batch_size=64, val=64)


class MaskedPatches(forge.TaskModule):
    """A masked autoencoder: the encoder sees a quarter of the patches, the loss counts the others only."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Linear(16, 32)
        self.positions = nn.Parameter(0.02 * torch.randn(16, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.blank = nn.Parameter(0.02 * torch.randn(32))
        self.decoder = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 16)

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(self.embed(patches(images)) + self.positions).mean(1)

    def loss(self, images: Tensor, g: torch.Generator | None) -> Tensor:
        pieces = patches(images)
        order = torch.rand(len(images), 16, generator=g).argsort(1)
        seen, hidden = order[:, :4], order[:, 4:]
        shown = (self.embed(pieces) + self.positions).gather(1, seen[..., None].expand(-1, -1, 32))
        encoded = self.encoder(shown)
        whole = self.blank.expand(len(images), 16, -1).scatter(1, seen[..., None].expand(-1, -1, 32), encoded)
        rebuilt = self.head(self.decoder(whole + self.positions))
        pick = hidden[..., None].expand(-1, -1, 16)
        return F.mse_loss(rebuilt.gather(1, pick), pieces.gather(1, pick))

    def training_step(self, batch):
        return self.loss(batch[0], None)

    def validation_step(self, batch):
        return self.loss(batch[0], generator(12))

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


def patches(images: Tensor) -> Tensor:
    return F.unfold(images, 4, stride=4).transpose(1, 2)


@entry
def masked_autoencoder() -> tuple[forge.TaskModule, Splits]:
    images, _ = gratings(320, 16, channels=1, noise=0.1)
    return MaskedPatches(), tensor_loaders(images)


class Gumbel(forge.TaskModule):
    """A discrete VAE: relaxed one-hot codes in training, hard ones in validation."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 6 * 8))
        self.decoder = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 144), nn.Unflatten(1, (1, 12, 12)))

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(images).view(-1, 6, 8)

    def training_step(self, batch):
        (images,) = batch
        logits = self(images)
        if self.training:
            codes = F.gumbel_softmax(logits, tau=1.0)
        else:
            codes = F.one_hot(logits.argmax(-1), 8).float()
        chances = logits.softmax(-1)
        divergence = (chances * (chances.clamp(min=1e-8).log() + math.log(8))).sum((1, 2)).mean()
        rebuilt = F.binary_cross_entropy_with_logits(self.decoder(codes.flatten(1)), images, reduction="sum")
        return {"loss": rebuilt / len(images) + divergence}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def gumbel_softmax_vae() -> tuple[forge.TaskModule, Splits]:
    return Gumbel(), tensor_loaders(pictures())
