"""On a CUDA device: the same bits as a hand-written loop, and no host sync outside log intervals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import forge
from forge_plugins import Accumulate, Clip
from tests.support import reference
from tests.support.tasks import Classifier, fit, make_batches

pytestmark = pytest.mark.gpu


class Dropping(Classifier):
    """Dropout draws from the device's generator, Adam keeps its state there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(torch.nn.functional.dropout(x, 0.3, self.training))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return model.training_step(batch)["loss"]


def test_weights_equal_the_hand_written_loop_bit_for_bit() -> None:
    torch.manual_seed(0)
    ours = Dropping()
    theirs = copy.deepcopy(ours).cuda()
    data = make_batches(5)
    fit(ours, data, val=make_batches(1), max_epochs=2, seed=3, device="cuda", plugins=[Clip(0.1), Accumulate(2)])
    moved = [(x.cuda(), y.cuda()) for x, y in data]
    reference.train(theirs, loss_of, theirs.configure_optimizers(), moved, 2, window=2, clip_norm=0.1, seed=3)
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert a.is_cuda
        assert torch.equal(a, b), name


@pytest.mark.parametrize("window", [1, 3])
def test_nothing_between_logs_waits_for_the_device(window: int, syncs_are_errors: forge.Plugin) -> None:
    pinned = [(x.pin_memory(), y.pin_memory()) for x, y in make_batches(30)]
    plugins = [Clip(0.1), Accumulate(window), syncs_are_errors]
    # no epoch ends and no log falls due before the last update, so any read would be one that nobody asked for
    assert fit(Dropping(), pinned, max_updates=8, device="cuda", plugins=plugins, log_every=1000).updates == 8


def test_a_log_is_read_without_waiting_one_update_later() -> None:
    delivered: list[tuple[int, int]] = []

    class Sink(forge.Plugin):
        @forge.hookimpl
        def forge_log(self, trainer: forge.Trainer, update: int, metrics: dict[str, Any]) -> None:
            delivered.append((update, trainer.progress.update))

    fit(train=make_batches(7), max_updates=5, device="cuda", plugins=[Sink()], log_every=2)
    assert delivered == [(2, 3), (4, 5), (5, 5)]


def test_metrics_equal_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    task = Classifier()
    twin = copy.deepcopy(task)
    on_cpu = fit(task, val=make_batches(2), device="cpu").metrics
    on_gpu = fit(twin, val=make_batches(2), device="cuda").metrics
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3)


def test_validation_leaves_the_devices_random_numbers_alone() -> None:
    class Draws(Dropping):
        def validation_step(self, batch: Any) -> Any:
            torch.rand(3, device="cuda")
            return super().training_step(batch)

    torch.manual_seed(0)
    task = Draws()
    twin = copy.deepcopy(task)
    fit(task, seed=1, device="cuda")
    fit(twin, seed=1, device="cuda", val=make_batches(1), validate_every="1 updates")
    assert all(torch.equal(a, b) for a, b in zip(task.parameters(), twin.parameters(), strict=True))


def test_memory_stays_flat_over_many_updates() -> None:
    used: list[int] = []

    @forge.on("step_end", every="100 updates")
    def watch(step: forge.Step) -> None:
        used.append(torch.cuda.memory_allocated())

    fit(Dropping(), make_batches(50), max_epochs=10, device="cuda", plugins=[watch], log_every=10**6)
    assert max(used[1:]) - min(used[1:]) < 600_000  # a kept scalar takes an allocator block of 512 bytes, until folded


def test_labels_out_of_range_are_named_before_the_assert() -> None:
    bad = [(x, y + 7) for x, y in make_batches(1)]
    with pytest.raises(forge.TaskError, match="but the model has 3 outputs"):
        fit(train=bad, device="cuda")
    assert fit(device="cuda").updates == 4


def test_predictions_have_arrived_when_predict_returns() -> None:
    class Slow(Classifier):
        def predict_step(self, batch: Any) -> Any:
            out = torch.ones(4096, 4096, device="cuda")
            for _ in range(20):
                out = (out @ out).clamp(max=1)
            return out

    outputs = forge.Trainer(plugins=[], device="cuda").predict(Slow(), make_batches(2))
    assert all(bool((output == 1).all()) for output in outputs)
