"""What the tests of monitor share."""

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
from tests.support.tasks import Classifier, fit


class Keep(forge.Plugin):
    """Keeps everything that is logged: {update: {name: value}}."""

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[int, dict[str, Any]] = {}

    @forge.hookimpl
    def forge_log(self, update: int, metrics: dict[str, Any]) -> None:
        self.logged.setdefault(update, {}).update(metrics)

    def of(self, update: int) -> dict[str, Any]:
        """What monitor said after an update, without its prefix."""
        found = self.logged.get(update, {})
        return {name.removeprefix("monitor/"): value for name, value in found.items() if name.startswith("monitor/")}

    @property
    def updates(self) -> list[int]:
        """The updates that monitor looked at."""
        return [update for update in self.logged if self.of(update)]


def quiet(every: str = "1 updates", **options: Any) -> Monitor:
    """A monitor without its table."""
    return Monitor(every=every, **{"shapes": False, **options})


def made(task: Callable[[], Any] = Classifier) -> Any:
    torch.manual_seed(0)
    return task()


def watched(
    task: forge.TaskModule, train: Any, *plugins: forge.Plugin, monitor: Monitor | None = None, **options: Any
) -> Keep:
    """Fit with a monitor that looks at every update; what was logged."""
    keep = Keep()
    fit(task, train, plugins=[monitor or quiet(), *plugins, keep], **options)
    return keep


class Spy(Classifier):
    """Counts, in every training_step, the hooks that stand on its modules."""

    check_first_batch = False  # it has hooks of its own

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any) -> Any:
        self.seen.append(hooks_on(self))
        return super().training_step(batch)


def hooks_on(task: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in task.modules())


class Net(forge.TaskModule):
    """Any network, trained to tell classes apart."""

    def __init__(self, net: nn.Module, lr: float = 1e-3, optimizer: str = "Adam"):
        super().__init__()
        self.net, self.lr, self.optimizer = net, lr, optimizer

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self.net(batch[0]).flatten(0, -2), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=self.lr)


def vectors(count: int = 4, size: int = 32) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 16, generator=generator), torch.randint(4, (size,), generator=generator))
        for _ in range(count)
    ]


def mlp(activation: Callable[[], nn.Module], depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [part for _ in range(depth) for part in (nn.Linear(16, 16), activation())]
    return nn.Sequential(*hidden, nn.Linear(16, 4))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(9, 16), nn.LSTM(16, 16, 2, batch_first=True), nn.Linear(16, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(x))[0])


def words() -> list[Any]:
    tokens = torch.randint(9, (16, 6), generator=torch.Generator().manual_seed(0))
    return [(tokens, tokens.roll(1, 1))]


def table(task: forge.TaskModule, caplog: pytest.LogCaptureFixture, train: Any = None, **options: Any) -> list[str]:
    """The lines of the table that is logged."""
    caplog.set_level(logging.INFO)
    fit(task, train, plugins=[Monitor(every="1000 updates", **options)])
    (text,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("monitor: the model")]
    return text.splitlines()[1:]
