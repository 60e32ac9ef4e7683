"""Coordinates, equations and dynamics: derivatives in the loss, implicit layers, integrators, double precision."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from benchmarks.doctor.zoo.common import Entry, Regress, adamw, generator, mlp, tensor_loaders
from forge.data import Splits

MODELS: dict[str, Entry] = {}


def entry(function: Entry) -> Entry:
    MODELS[function.__name__] = function
    return function


def picture(count: int = 600) -> tuple[Tensor, Tensor]:
    """Places in the plane and the brightness there."""
    places = 2 * torch.rand(count, 2, generator=generator(0)) - 1
    bright = torch.sin(6 * places[:, :1]) * torch.cos(5 * places[:, 1:]) + (places.norm(dim=1, keepdim=True) < 0.5)
    return places, (bright - bright.mean()) / bright.std()


class Fourier(nn.Module):
    """Sines and cosines of doubling frequencies."""

    def __init__(self, bands: int):
        super().__init__()
        self.register_buffer("speeds", math.pi * 2.0 ** torch.arange(bands))

    def forward(self, x: Tensor) -> Tensor:
        angles = (x[..., None] * self.speeds).flatten(-2)
        return torch.cat([x, angles.sin(), angles.cos()], -1)


@entry
def positional_encoding_mlp() -> tuple[forge.TaskModule, Splits]:
    return Regress(nn.Sequential(Fourier(4), *mlp(18, 64, 64, 1)), 3e-3), tensor_loaders(*picture(), batch_size=64)


class Field(forge.TaskModule):
    """A small NeRF: densities and brightness along rays are summed up to pixels; samples are jittered in training."""

    def __init__(self, samples: int = 12, lr: float = 3e-3):
        super().__init__()
        self.samples, self.lr = samples, lr
        self.net = nn.Sequential(Fourier(3), *mlp(14, 48, 48, 2))

    def forward(self, start: Tensor, direction: Tensor) -> Tensor:
        edges = torch.linspace(0, 2, self.samples + 1)
        shift = torch.rand(len(start), self.samples) if self.training else torch.full((len(start), self.samples), 0.5)
        depth = edges[:-1] + shift * 2 / self.samples
        points = start[:, None] + depth[..., None] * direction[:, None]
        density, bright = self.net(points).unbind(-1)
        opacity = 1 - torch.exp(-F.softplus(density) * 2 / self.samples)
        left = torch.cumprod(torch.cat([torch.ones(len(start), 1), 1 - opacity[:, :-1]], 1), 1)
        return (opacity * left * bright.sigmoid()).sum(1)

    def training_step(self, batch):
        start, direction, pixel = batch
        error = F.mse_loss(self(start, direction), pixel)
        return {"loss": error, "psnr": -10 * error.log10()}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@entry
def nerf_rays() -> tuple[forge.TaskModule, Splits]:
    g = generator(1)
    angle = 2 * math.pi * torch.rand(480, generator=g)
    start = torch.stack([angle.cos(), angle.sin()], 1)
    aim = 0.8 * torch.randn(480, 2, generator=g) - start
    direction = F.normalize(aim, dim=1)
    depth = torch.linspace(0, 2, 60)
    points = start[:, None] + depth[:, None] * direction[:, None]
    inside = (points.norm(dim=-1) < 0.4).float()
    pixel = 1 - torch.exp(-3 * inside.mean(1) * 2)
    return Field(), tensor_loaders(start, direction, pixel, batch_size=48)


class Sine(nn.Module):
    """A layer of SIREN with the initialisation of its paper: the first layer's frequency is 15."""

    def __init__(self, inputs: int, outputs: int, speed: float = 15.0, first: bool = False):
        super().__init__()
        self.speed = speed
        self.linear = nn.Linear(inputs, outputs)
        bound = 1 / inputs if first else math.sqrt(6 / inputs) / speed
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.speed * self.linear(x))


@entry
def siren() -> tuple[forge.TaskModule, Splits]:
    last = nn.Linear(48, 1)
    nn.init.uniform_(last.weight, -math.sqrt(6 / 48) / 15, math.sqrt(6 / 48) / 15)
    net = nn.Sequential(Sine(2, 48, first=True), Sine(48, 48), last)
    return Regress(net, 1e-3), tensor_loaders(*picture(), batch_size=64)


class Heat(forge.TaskModule):
    """A physics-informed network for u_t = 0.1 u_xx: the residual, the start and the walls; second derivatives."""

    evaluation = "grad"

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(2, 32, 32, 1, activation=nn.Tanh)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.stack([2 * x - 1, 2 * t - 1], 1)).squeeze(1)

    def training_step(self, batch):
        (points,) = batch
        x, t = (part.clone().requires_grad_() for part in points.unbind(1))
        u = self(x, t)
        u_t, u_x = torch.autograd.grad(u.sum(), (t, x), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        residual = (u_t - 0.1 * u_xx).square().mean()
        begin = (self(x, torch.zeros_like(t)) - torch.sin(math.pi * x)).square().mean()
        walls = self(torch.zeros_like(x), t).square().mean() + self(torch.ones_like(x), t).square().mean()
        return {"loss": residual + 10 * begin + 10 * walls, "residual": residual}

    def validation_step(self, batch):
        x, t = batch[0].unbind(1)
        exact = torch.exp(-0.1 * math.pi**2 * t) * torch.sin(math.pi * x)
        return {"error": (self(x, t) - exact).abs().mean()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@entry
def physics_informed_heat() -> tuple[forge.TaskModule, Splits]:
    return Heat(), tensor_loaders(torch.rand(480, 2, generator=generator(2)), batch_size=48)


class Inverse(forge.TaskModule):
    """Find the damping of a spring from measurements: a lone parameter of the equation is trained with the network."""

    evaluation = "grad"

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.net = mlp(1, 32, 32, 1, activation=nn.Tanh)
        self.damping = nn.Parameter(torch.tensor(0.1))

    def forward(self, t: Tensor) -> Tensor:
        return self.net(t - 1)

    def training_step(self, batch):
        t, measured = batch
        t = t.clone().requires_grad_()
        u = self(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), t, create_graph=True)
        residual = (ddu + self.damping * du + 4 * u).square().mean()
        return {"loss": F.mse_loss(u, measured) + 0.05 * residual, "damping": self.damping}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@entry
def physics_inverse_problem() -> tuple[forge.TaskModule, Splits]:
    t = 2 * torch.rand(320, 1, generator=generator(3))
    pace = math.sqrt(4 - 0.25**2)
    u = torch.exp(-0.25 * t) * torch.cos(pace * t) + 0.02 * torch.randn(t.shape, generator=generator(4))
    return Inverse(), tensor_loaders(t, u, batch_size=32)


class Equilibrium(nn.Module):
    """A DEQ: the fixed point is found without a graph, and one more step gives the gradient (Jacobian-free)."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.inward = nn.Linear(inputs, width)
        self.around = nn.Linear(width, width, bias=False)
        nn.init.orthogonal_(self.around.weight, gain=0.7)

    def step(self, state: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.around(state) + self.inward(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            state = torch.zeros(len(x), self.around.in_features)
            for _ in range(30):
                state = self.step(state, x)
        return self.step(state.clone(), x)


def wavy(count: int = 480) -> tuple[Tensor, Tensor]:
    g = generator(5)
    x = torch.randn(count, 4, generator=g)
    y = torch.sin(1.5 * x[:, :1]) + x[:, 1:2] + torch.tanh(x[:, 1:2] * x[:, 2:3])
    return x, (y - y.mean()) / y.std()


@entry
def deep_equilibrium() -> tuple[forge.TaskModule, Splits]:
    return Regress(nn.Sequential(Equilibrium(4, 48), nn.Linear(48, 1)), 5e-3), tensor_loaders(*wavy(), batch_size=32)


class ImplicitPoint(torch.autograd.Function):
    """The fixed point of z = tanh(W z + b), with the exact gradient from the implicit function theorem."""

    @staticmethod
    def forward(ctx, weight: Tensor, drive: Tensor) -> Tensor:
        state = torch.zeros_like(drive)
        for _ in range(40):
            state = torch.tanh(state @ weight.T + drive)
        ctx.save_for_backward(weight, state)
        return state

    @staticmethod
    def backward(ctx, grad: Tensor):
        weight, state = ctx.saved_tensors
        slope = 1 - state.square()
        adjoint = grad
        for _ in range(40):
            adjoint = grad + (adjoint * slope) @ weight
        scaled = adjoint * slope
        return scaled.T @ state, scaled


class Implicit(nn.Module):
    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.inward = nn.Linear(inputs, width)
        self.weight = nn.Parameter(torch.empty(width, width))
        nn.init.orthogonal_(self.weight, gain=0.6)

    def forward(self, x: Tensor) -> Tensor:
        return ImplicitPoint.apply(self.weight, self.inward(x))


@entry
def implicit_layer_custom_function() -> tuple[forge.TaskModule, Splits]:
    return Regress(nn.Sequential(Implicit(4, 32), nn.Linear(32, 1)), 5e-3), tensor_loaders(*wavy(), batch_size=32)


class Orbits(forge.TaskModule):
    """A neural ODE with Runge-Kutta steps: from the first point of a path to all others."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.speed = mlp(2, 48, 2, activation=nn.Tanh)

    def forward(self, start: Tensor, steps: int = 8, dt: float = 0.2) -> Tensor:
        state, path = start, []
        for _ in range(steps):
            k1 = self.speed(state)
            k2 = self.speed(state + dt / 2 * k1)
            k3 = self.speed(state + dt / 2 * k2)
            k4 = self.speed(state + dt * k3)
            state = state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            path.append(state)
        return torch.stack(path, 1)

    def training_step(self, batch):
        start, path = batch
        return F.mse_loss(self(start), path)

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


def pendulum(start: Tensor, steps: int = 8, dt: float = 0.2, parts: int = 20) -> Tensor:
    state, path = start.clone(), []
    for _ in range(steps):
        for _ in range(parts):
            speed = state[:, 1] - dt / parts * torch.sin(state[:, 0])
            state = torch.stack([state[:, 0] + dt / parts * speed, speed], 1)
        path.append(state)
    return torch.stack(path, 1)


@entry
def neural_ode() -> tuple[forge.TaskModule, Splits]:
    start = torch.randn(240, 2, generator=generator(6))
    path = pendulum(start)
    return Orbits(), tensor_loaders(start, path + 0.02 * torch.randn(path.shape, generator=generator(7)))


class Hamiltonian(forge.TaskModule):
    """The network is an energy; its derivatives, not its value, are compared."""

    evaluation = "grad"

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.energy = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1, False))

    def forward(self, state: Tensor) -> Tensor:
        state = state.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(state).sum(), state, create_graph=True)
        return torch.stack([slope[:, 1], -slope[:, 0]], 1)

    def training_step(self, batch):
        state, change = batch
        return F.mse_loss(self(state), change)

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def hamiltonian_network() -> tuple[forge.TaskModule, Splits]:
    state = 1.5 * torch.randn(400, 2, generator=generator(8))
    change = torch.stack([state[:, 1], -torch.sin(state[:, 0])], 1)
    return Hamiltonian(), tensor_loaders(state, change + 0.05 * torch.randn(change.shape, generator=generator(9)))


class Operator(forge.TaskModule):
    """DeepONet: from samples of a function to its integral at any place."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.branch, self.trunk = mlp(20, 48, 24), mlp(1, 48, 24, activation=nn.Tanh)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, function: Tensor, place: Tensor) -> Tensor:
        return (self.branch(function) * self.trunk(place)).sum(1) / 24**0.5 + self.bias

    def training_step(self, batch):
        function, place, value = batch
        return F.mse_loss(self(function, place), value)

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


def curves(count: int, points: int, seed: int) -> Tensor:
    g = generator(seed)
    grid = torch.linspace(0, 1, points)
    waves = torch.stack([torch.sin(math.pi * k * grid) / k for k in range(1, 6)])
    return torch.randn(count, 5, generator=g) @ waves


@entry
def deep_o_net() -> tuple[forge.TaskModule, Splits]:
    functions = curves(480, 20, 10)
    sums = functions.cumsum(1) / 20
    place = torch.randint(20, (480,), generator=generator(11))
    value = sums.gather(1, place[:, None]).squeeze(1)
    return Operator(), tensor_loaders(functions, place[:, None] / 10 - 1, value / value.std(), batch_size=32)


class Spectral(nn.Module):
    """A layer of the Fourier neural operator: complex weights on the low frequencies."""

    def __init__(self, width: int, modes: int):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)
        self.local = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)[..., : self.modes]
        mixed = torch.einsum("bik,iok->bok", spectrum, self.weight)
        return F.gelu(torch.fft.irfft(mixed, n=x.size(-1)) + self.local(x))


class FourierOperator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(2, 16, 1), Spectral(16, 6), Spectral(16, 6), nn.Conv1d(16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        grid = torch.linspace(-1, 1, x.size(1)).expand(len(x), -1)
        return self.net(torch.stack([x, grid], 1)).squeeze(1)


@entry
def fourier_operator_complex_weights() -> tuple[forge.TaskModule, Splits]:
    functions = curves(320, 32, 12)
    solved = functions.cumsum(1) / 32
    return Regress(FourierOperator(), 3e-3), tensor_loaders(functions / functions.std(), solved / solved.std())


@entry
def double_precision() -> tuple[forge.TaskModule, Splits]:
    x, y = wavy()
    return Regress(mlp(4, 48, 1, activation=nn.Tanh).double(), 5e-3), tensor_loaders(
        x.double(), y.double(), batch_size=32
    )


class Unrolled(forge.TaskModule):
    """A learned solver: several steps of gradient descent on a known problem, with trained step sizes and a prior."""

    def __init__(self, steps: int = 5, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.register_buffer("matrix", torch.randn(12, 20, generator=generator(13)) / 12**0.5)
        self.pace = nn.Parameter(torch.full((steps,), 0.1))
        self.shrink = nn.Parameter(torch.full((steps,), 0.05))

    def forward(self, seen: Tensor) -> Tensor:
        guess = torch.zeros(len(seen), 20)
        for pace, shrink in zip(self.pace, self.shrink, strict=True):
            guess = guess - pace * (guess @ self.matrix.T - seen) @ self.matrix
            guess = torch.sign(guess) * F.relu(guess.abs() - shrink)
        return guess

    def training_step(self, batch):
        seen, code = batch
        return F.mse_loss(self(seen), code)

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@entry
def unrolled_ista_ten_parameters() -> tuple[forge.TaskModule, Splits]:
    g = generator(14)
    task = Unrolled()
    code = torch.randn(320, 20, generator=g) * (torch.rand(320, 20, generator=g) < 0.15)
    seen = code @ task.matrix.T + 0.02 * torch.randn(320, 12, generator=g)
    return task, tensor_loaders(seen, code)
