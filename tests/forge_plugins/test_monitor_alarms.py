"""monitor: it names sick layers, and no healthy ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge_plugins import Monitor
from tests.support.monitor_kit import Net, Recurrent, mlp, quiet, vectors, words
from tests.support.tasks import fit

# ---------------------------------------------------------------------------------------------------------------------
# Alarms


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def look(
    net: nn.Module,
    every: str = "1 updates",
    updates: int = 20,
    train: Any = None,
    *plugins: forge.Plugin,
    warn: bool = True,
    **options: Any,
) -> None:
    fit(
        Net(net, **options),
        vectors() if train is None else train,
        plugins=[quiet(every, alarms=warn), *plugins],
        max_epochs=None,
        max_updates=updates,
    )


class Residual(nn.Module):
    """A small convolutional network with all that is usual: biases before normalisation, functional ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(9, 16), nn.Parameter(torch.zeros(6, 16))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 9))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def pictures() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 3, 8, 8, generator=generator), torch.randint(4, (16,), generator=generator))]


HEALTHY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (lambda: mlp(nn.ReLU), vectors),
    "deep mlp": (lambda: mlp(nn.ReLU, 6), vectors),
    "tanh": (lambda: mlp(nn.Tanh, 3), vectors),
    "sigmoid": (lambda: mlp(nn.Sigmoid, 2), vectors),
    "convolutions": (Residual, pictures),
    "transformer": (Transformer, words),
    "lstm": (Recurrent, words),
}


class TestAlarms:
    @pytest.mark.parametrize(
        ("name", "optimizer", "updates"),
        [
            ("deep mlp", "SGD", 24),
            ("convolutions", "Adam", 24),
            *(pytest.param(name, how, 60, marks=pytest.mark.slow) for name in HEALTHY for how in ("Adam", "SGD")),
        ],
    )
    def test_a_healthy_network_is_left_in_peace(
        self, name: str, optimizer: str, updates: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        net, train = HEALTHY[name]
        torch.manual_seed(0)
        lr = 1e-2 if optimizer == "Adam" else 0.1
        look(net(), "1 updates", updates, train(), lr=lr, optimizer=optimizer)
        assert alarms(caplog) == []

    @pytest.mark.slow
    def test_the_quickstart_is_healthy(self, caplog: pytest.LogCaptureFixture) -> None:
        trainer = forge.Trainer(recipe="quickstart", max_epochs=2, plugins=[Monitor("5 updates")], run_dir=False)
        task, data = trainer.build()
        trainer.fit(task, data.train, data.val)
        assert [text for text in alarms(caplog) if text.startswith("monitor")] == []

    def test_a_vanishing_gradient_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        look(mlp(nn.Sigmoid, 12))
        text = alarms(caplog)[0]
        assert text.startswith("monitor: after update 13: the gradient vanishes in net.0 (Linear, norm ")
        assert "Try ReLU or GELU in place of sigmoid and tanh" in text
        assert not [text for text in alarms(caplog) if "net.24" in text or "vanishes" not in text]

    def test_alarms_can_be_switched_off(self, caplog: pytest.LogCaptureFixture) -> None:
        look(mlp(nn.Sigmoid, 12), warn=False)
        assert alarms(caplog) == []

    def test_an_exploding_gradient_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        class Steep(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.steep = mlp(nn.Tanh), nn.Linear(16, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.net(x) + torch.sin(1e4 * self.steep(x))

        look(Steep(), optimizer="Adam", lr=1e-6)
        assert [text.partition("(")[0] for text in alarms(caplog)] == [
            "monitor: after update 13: the gradient explodes in net.steep "
        ]
        assert "Try -p clip" in alarms(caplog)[0]

    def test_a_missing_gradient_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        class Unused(nn.Sequential):
            def __init__(self) -> None:
                super().__init__(*mlp(nn.ReLU))
                self.extra = nn.Linear(3, 3)

            def forward(self, input: Tensor) -> Tensor:
                for part in list(self)[:-1]:
                    input = part(input)
                return input

        look(Unused())
        (text,) = alarms(caplog)
        assert text.startswith("monitor: after update 15: no gradient reached net.extra.weight, net.extra.bias.")
