"""compile on a CUDA device: every mode trains as eager does, and what lies in a CUDA graph's memory survives."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forge
from forge.testing import TinyGAN, TinyTask, tiny_batches
from forge_plugins import Compile, Guard, Remat
from tests.forge_plugins.test_remat_cuda import Autocast, made, sequences
from tests.support.tasks import fit

pytestmark = pytest.mark.gpu

MODES = ["default", "reduce-overhead", "max-autotune"]


@pytest.fixture(autouse=True)
def every_line(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, logger="forge")
    yield
    torch.compiler.reset()


class Losses(forge.Plugin):
    """The loss of every micro-batch, read at once, before anything can overwrite it."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    @forge.hookimpl(wrapper=True)
    def forge_backward(self, loss: Tensor) -> Any:
        self.values.append(float(loss.detach()))
        return (yield)


class Graphs(forge.Plugin):
    """How many graphs there are after each update."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    @forge.hookimpl
    def forge_step_end(self) -> None:
        from torch._dynamo.utils import counters

        self.counts.append(counters["stats"]["unique_graphs"])


def assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


# ---------------------------------------------------------------------------------------------------------------------
# Modes


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_as_eager_does(mode: str) -> None:
    plain = TinyTask(dropout=0.0)
    compiled = copy.deepcopy(plain)
    data, graphs, losses = tiny_batches([8] * 10), Graphs(), Losses()
    eagerly = fit(plain, data, data[:2], device="cuda", seed=0, log_every=1000)
    plugins = [Compile(mode), graphs, losses]
    result = fit(compiled, data, data[:2], device="cuda", seed=0, log_every=1000, plugins=plugins)
    assert_close(compiled, plain)
    # kept unread on the device for ten updates, in which a CUDA graph has written over its results nine times
    assert result.metrics["train/loss"] == pytest.approx(sum(losses.values) / 10, rel=1e-5)
    for name, value in eagerly.metrics.items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-3), name
    assert [result.metrics[f"compile/{name}"] for name in ("graphs", "breaks", "recompiles")] == [1, 0, 0]
    assert set(graphs.counts[1:]) == {graphs.counts[0]}  # nothing was compiled after the first update


@pytest.mark.parametrize("mode", MODES[:2])
def test_a_transformer_trains_in_bf16_without_recompiles(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    plain, compiled = made(Autocast, blocks=2, dropout=0.0), made(Autocast, blocks=2, dropout=0.0)
    data = sequences(6)
    eagerly = fit(plain, data, data[:1], device="cuda", seed=0)
    result = fit(compiled, data, data[:1], device="cuda", seed=0, plugins=[Compile(mode)])
    assert result.metrics["train/loss"] == pytest.approx(eagerly.metrics["train/loss"], rel=2e-2)
    assert result.metrics["val/loss"] == pytest.approx(eagerly.metrics["val/loss"], rel=5e-2)
    assert "no breaks, no recompiles" in caplog.text
    assert " break at " not in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# What lies in a CUDA graph's memory


def test_a_shorter_batch_and_validation_do_not_mix_memory() -> None:
    plain = TinyTask(dropout=0.0)
    compiled = copy.deepcopy(plain)
    data = tiny_batches()
    options: dict[str, Any] = {"device": "cuda", "seed": 0, "max_epochs": 4, "validate_every": "2 updates"}
    eagerly = fit(plain, data, data, **options)
    result = fit(compiled, data, data, plugins=[Compile("reduce-overhead")], **options)
    assert_close(compiled, plain)
    for name in ("train/loss", "val/loss", "val/accuracy"):
        assert result.metrics[name] == pytest.approx(eagerly.metrics[name], rel=1e-3)


def test_two_optimizers_replay_graphs_of_their_own() -> None:
    class Steady(TinyGAN):
        """Draws its noise from the batch, so that both ways see the same."""

        def training_step(self, batch: Any, name: str) -> Any:
            real = batch[0]
            fake = self.generator(real[:, :4])
            scores = self.discriminator(fake if name == "generator" else fake.detach())
            if name == "generator":
                return {"loss": nn.functional.softplus(-scores).mean()}
            return {"loss": (nn.functional.softplus(scores) + nn.functional.softplus(-self.discriminator(real))).mean()}

    plain = Steady()
    compiled = copy.deepcopy(plain)
    data = tiny_batches([8] * 8)
    fit(plain, data, device="cuda", seed=0)
    fit(compiled, data, device="cuda", seed=0, plugins=[Compile("reduce-overhead")])
    assert_close(compiled, plain)


def test_predictions_survive_the_next_batch() -> None:
    class Predicts(TinyTask):
        def predict_step(self, batch: Any) -> Any:
            return self(batch[0])

    task, data = Predicts(), tiny_batches([8] * 6)
    plain = forge.Trainer(plugins=[], device="cuda").predict(task, data)
    replayed = forge.Trainer(plugins=[Compile("reduce-overhead")], device="cuda").predict(task, data)
    for ours, theirs in zip(replayed, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_guard_with_a_fused_optimizer_works_on_replayed_graphs() -> None:
    class Fused(TinyTask):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)

    plain = Fused(dropout=0.0)
    compiled = copy.deepcopy(plain)
    data = tiny_batches([8] * 8)
    fit(plain, data, device="cuda", seed=0, plugins=[Guard()])
    fit(compiled, data, device="cuda", seed=0, plugins=[Compile("reduce-overhead"), Guard()])
    assert_close(compiled, plain)


# ---------------------------------------------------------------------------------------------------------------------
# With others


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("blocks", [None, "Block"])
def test_blocks_that_are_computed_again_train_as_without(mode: str, blocks: str | None) -> None:
    plain, compiled = made(blocks=4, dropout=0.0), made(blocks=4, dropout=0.0)
    data = sequences(5, size=4)
    fit(plain, data, device="cuda", seed=0)
    result = fit(compiled, data, device="cuda", seed=0, plugins=[Remat(), Compile(mode, blocks=blocks)])
    assert_close(compiled, plain)
    assert result.metrics["compile/breaks"] == 0


def test_nothing_waits_for_the_device_once_it_is_compiled() -> None:
    modes: list[int] = []

    @forge.on("step_end")
    def strict(step: forge.Step) -> None:
        modes.append(torch.cuda.get_sync_debug_mode())
        if step.index == 2:
            torch.cuda.set_sync_debug_mode("error")

    pinned = [(x.pin_memory(), y.pin_memory()) for x, y in tiny_batches([8] * 10)]
    try:
        result = fit(TinyTask(), pinned, device="cuda", max_updates=8, log_every=1000, plugins=[Compile(), strict])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert modes == 3 * [0] + 5 * [2]  # torch's numbers for "default" and "error"
    assert result.metrics["compile/graphs"] > 0
