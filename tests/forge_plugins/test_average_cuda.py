"""ema and swa on a CUDA device: nothing waits, the bits are torch's own, and captured graphs see what is in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from forge.data import TensorLoader
from forge_plugins import EMA, SWA, Prefetch
from forge_plugins.averaging.average import Average
from tests.support.tasks import Classifier, fit, make_batches

pytestmark = pytest.mark.gpu


class Normed(Classifier):
    """Dropout, batch normalisation, a fused optimizer."""

    def __init__(self, dropout: float = 0.2):
        super().__init__()
        self.dropout = dropout
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.dropout(self.norm(x), self.dropout, self.training))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def made(kind: Any = Normed, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(**options)


def batches(count: int = 8) -> list[Any]:
    return [(x.pin_memory(), y.pin_memory()) for x, y in make_batches(count)]


def same(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(ours[name].cpu(), theirs[name].cpu()) for name in {**ours, **theirs})


def applied(plugin: Any, task: nn.Module) -> nn.Module:
    task = copy.deepcopy(task)
    plugin.apply_to(task)
    return task


def by_hand(model: Any, average: AveragedModel | None, epochs: int = 1) -> None:
    """A plain loop on the device."""
    optimizer = model.configure_optimizers()
    torch.manual_seed(1)
    model.train()
    for x, y in batches() * epochs:
        optimizer.zero_grad()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(model)


def test_the_average_is_torchs_own_bit_for_bit() -> None:
    plugin, task, model = EMA(0.9), made(), made().cuda()
    fit(task, batches(), device="cuda", seed=1, max_epochs=2, plugins=[plugin])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    by_hand(model, average, epochs=2)
    assert same(task.state_dict(), model.state_dict())
    assert same(applied(plugin, task).state_dict(), average.module.state_dict())


def test_a_captured_graph_sees_what_is_in_place() -> None:
    task = made().cuda().eval()
    average = Average(task)
    average.take(1.0)
    trained = [p.detach().clone() for p in task.parameters()]
    for tensor in average.tensors.values():
        tensor.mul_(0.5)
    x = torch.randn(4, 8, device="cuda")
    with torch.no_grad():
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            task(x)  # what is made at the first call must not be made in the capture
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = task(x)

        def replayed() -> Tensor:
            graph.replay()
            torch.cuda.synchronize()
            return captured.clone()

        before = replayed()
        with average.in_place():
            torch.testing.assert_close(replayed(), task(x))
            assert not torch.equal(captured, before)
        assert torch.equal(replayed(), before)
    assert all(torch.equal(a, b) for a, b in zip(trained, task.parameters(), strict=True))


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_run_does_not_notice_the_estimate(prefetch: bool) -> None:
    """The device's random numbers, and batches that are on their way in the middle of an epoch."""

    def trained(plugins: list[Any]) -> Any:
        task = made()
        x, y = (torch.cat(parts) for parts in zip(*make_batches(8), strict=True))
        loader = TensorLoader(x, y, batch_size=4, shuffle=True)
        plugins = [*plugins, Prefetch()] if prefetch else plugins
        options = {"max_epochs": 3, "validate_every": "3 updates", "val": batches(2)}
        fit(task, loader, device="cuda", seed=1, plugins=plugins, **options)
        return task.state_dict()

    plugin = SWA(2, every="2 updates")
    assert same(trained([plugin]), trained([]))
    assert plugin._average.count == 11
