"""channels_last, fused_optimizer and backends: each changes one thing of a run, and puts it back."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.errors import RecipeError
from forge.testing import TinyTask, tiny_batches
from forge_plugins import Backends


class Pictures(forge.TaskModule):
    """A small convolution over pictures; notes the strides that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.seen: list[bool] = []

    def training_step(self, batch: Any) -> Any:
        x, y = batch["x"], batch["y"]
        self.seen.append(x.is_contiguous(memory_format=torch.channels_last))
        self.seen.append(self.conv.weight.is_contiguous(memory_format=torch.channels_last))
        return F.cross_entropy(self.head(self.conv(x).mean((2, 3))), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def pictures(count: int = 4) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(4, 3, 8, 8, generator=draw), "y": torch.randint(2, (4,), generator=draw)}
        for _ in range(count)
    ]


def trained(task: forge.TaskModule, train: Any, *plugins: Any, **options: Any) -> forge.TaskModule:
    trainer = forge.Trainer(plugins=list(plugins), max_epochs=1, seed=0, run_dir=False, device="cpu", **options)
    trainer.fit(task, train)
    return task


def test_channels_last_converts_and_puts_back() -> None:
    plain, changed = Pictures(), Pictures()
    changed.load_state_dict(plain.state_dict())
    trained(plain, pictures())
    trained(changed, pictures(), "channels_last")
    assert not any(plain.seen)
    assert all(changed.seen)
    assert changed.conv.weight.is_contiguous()
    torch.testing.assert_close(changed.state_dict(), plain.state_dict())


def test_fused_steps_keep_class_and_state_and_are_close() -> None:
    plain = Pictures()
    changed = copy.deepcopy(plain)
    kept: list[Any] = []

    @forge.on("step_end")
    def look(step: forge.Step) -> None:
        kept.append((type(step.optimizer), dict(step.optimizer.param_groups[0])))

    trained(plain, pictures())
    trained(changed, pictures(), "fused_optimizer", look)
    kind, group = kept[0]
    assert kind is torch.optim.Adam
    assert group["fused"] is True
    torch.testing.assert_close(changed.state_dict(), plain.state_dict())


def test_an_optimizer_without_a_fused_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Other(TinyTask):
        def configure_optimizers(self) -> Any:
            return torch.optim.RMSprop(self.parameters(), lr=1e-3)

    class Chosen(TinyTask):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3, foreach=True)

    caplog.set_level(logging.INFO, "forge")
    trained(Other(), tiny_batches(), "fused_optimizer")
    trained(Chosen(), tiny_batches(), "fused_optimizer")
    assert "RMSprop runs as written: torch has no fused step for it" in caplog.text
    assert "SGD runs as written: it chooses its step itself" in caplog.text


def test_measured_convolutions_are_refused_if_deterministic() -> None:
    with pytest.raises(RecipeError, match="cudnn_benchmark"):
        trained(TinyTask(), tiny_batches(), Backends(cudnn_benchmark=True), deterministic=True)
