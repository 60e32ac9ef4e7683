"""cuda_graph on a CUDA device: replayed updates are the updates, bit for bit."""

from __future__ import annotations

import gc
import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

from forge.errors import StackError
from forge.testing import assert_same, tiny_batches
from forge_plugins import (
    AMP,
    EMA,
    Accumulate,
    Anomaly,
    Clip,
    Compile,
    CudaGraph,
    Guard,
    Prefetch,
    Schedule,
)
from tests.support import emulated_graphs
from tests.support.emulated_graphs import Net

pytestmark = pytest.mark.gpu


LR = 2.0**-7
ON_THE_DEVICE: dict[str, Any] = {"device": "cuda", "log_every": 7, "max_epochs": 2}


def batches(count: int = 20, size: int = 16, last: int | None = None) -> list[Any]:
    made = tiny_batches([size] * (count - 1) + [last or size], seed=1)
    return [(x.pin_memory(), y.pin_memory()) for x, y in made]


def run(plugins: list[Any], data: Any = None, task: Any = None, **options: Any) -> tuple[Any, list[Any]]:
    return emulated_graphs.run(plugins, data or batches(), task, **{**ON_THE_DEVICE, **options})


def compare(plugins: Any, least: int, data: Any = None, task: Any = Net, **options: Any) -> CudaGraph:
    """The run with and without capture: weights, buffers and logs are equal, and so many updates were replayed."""
    return emulated_graphs.compare(plugins, least, data or batches(), task, **{**ON_THE_DEVICE, **options})


STACKS = {
    "nothing": lambda: [],
    "clip": lambda: [Clip(0.1)],
    "accumulate": lambda: [Accumulate(3), Clip(0.1)],
    "bf16": lambda: [AMP("bf16")],
    "ema": lambda: [EMA(0.9), Clip(0.1)],
    "guard": lambda: [Guard(), Clip(0.1)],
    "prefetch": lambda: [Prefetch()],
    "all": lambda: [Guard(), AMP("bf16"), Accumulate(2), Clip(0.1), EMA(0.9), Prefetch()],
}


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS.keys())
def test_replayed_updates_are_the_updates_bit_for_bit(stack: Any, kind: str) -> None:
    options = {"momentum": 0.9} if kind == "SGD" else {}
    compare(stack, 8, task=lambda: Net(kind, **options))


def test_a_compiled_model_is_captured_too() -> None:
    compare(lambda: [Compile(), Clip(0.1)], 30)


def test_a_schedule_moves_the_rate_inside_the_graph() -> None:
    plain_rates = [log["lr"] for _, log in run([Schedule("cosine", warmup=5), Clip(0.1)])[1] if "lr" in log]
    graph = CudaGraph(strict=True)
    task, logs = run([Schedule("cosine", warmup=5), Clip(0.1), graph])
    assert graph.replayed > 30
    assert [log["lr"] for _, log in logs if "lr" in log] == plain_rates
    reference = by_hand(40, lambda i: _factor(i, 40, 5))
    for name, weight in task.state_dict().items():
        torch.testing.assert_close(weight, reference[name], rtol=0, atol=0)


def _factor(i: int, planned: int, warmup: int) -> float:
    if i < warmup:
        return (i + 1) / warmup
    share = (i - (warmup - 1)) / (planned - (warmup - 1))
    return (1 + math.cos(math.pi * share)) / 2


def by_hand(updates: int, factor: Any) -> dict[str, torch.Tensor]:
    """A loop in plain torch whose rate is a float32 tensor."""
    task = Net().cuda().train()
    rate = torch.tensor(LR, device="cuda")
    optimizer = torch.optim.AdamW(task.parameters(), lr=rate, fused=True, capturable=True)
    torch.manual_seed(3)
    data = batches()
    for i in range(updates):
        rate.fill_(LR * factor(i))
        x, y = (t.cuda() for t in data[i % len(data)])
        loss = task.training_step((x, y))["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(task.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return dict(task.state_dict())


def test_a_read_of_the_device_is_found_and_named(caplog: pytest.LogCaptureFixture) -> None:
    class Reads(Net):
        def training_step(self, batch: Any) -> Any:
            out = super().training_step(batch)
            out["loss"].item()
            return out

    with caplog.at_level(logging.INFO, logger="forge"):
        graph = CudaGraph()
        task, _ = run([graph], task=Reads())
    assert graph.replayed == 0
    assert 'out["loss"].item()' in caplog.text
    plain, _ = run([], task=Reads())
    assert_same(task, plain)
    with pytest.raises(StackError, match=r"updates run uncaptured.*\.item\(\)"):
        run([CudaGraph(strict=True)], task=Reads())


def test_a_plugin_that_cannot_be_captured_is_named(caplog: pytest.LogCaptureFixture) -> None:
    graph = CudaGraph()
    run([graph, Anomaly()])
    assert graph.replayed == 0
    assert "'anomaly' acts inside every update" in caplog.text


def test_a_wait_of_which_torch_does_not_warn_is_found_too(caplog: pytest.LogCaptureFixture) -> None:
    class Waits(Net):
        def training_step(self, batch: Any) -> Any:
            out = super().training_step(batch)
            torch.cuda.synchronize()
            return out

    graph = CudaGraph()
    run([graph], task=Waits())
    assert graph.replayed == 0
    assert "(torch.cuda.synchronize())" in caplog.text


def test_a_capture_that_breaks_off_leaves_a_run_that_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(Net):
        def training_step(self, batch: Any) -> Any:
            out = super().training_step(batch)
            if torch.cuda.is_current_stream_capturing():
                out["loss"].item()
            return out

    graph = CudaGraph()
    task, logs = run([graph], task=Breaks())
    assert graph.replayed == 0
    assert "it cannot be captured at" in caplog.text
    assert '(out["loss"].item())' in caplog.text
    plain, plain_logs = run([], task=Breaks())
    assert_same(task, plain)
    assert logs == plain_logs


class Wide(Net):
    """Batches of more than 1 MiB, which are copied beside the computing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8192, 6)

    def training_step(self, batch: Any) -> Any:
        return super().training_step((self.first(batch[0]), batch[1]))


def wide(count: int = 20) -> list[Any]:
    make = torch.Generator().manual_seed(2)
    made = [(torch.randn(64, 8192, generator=make), torch.randint(3, (64,), generator=make)) for _ in range(count)]
    return [(x.pin_memory(), y) for x, y in made]


@pytest.mark.parametrize("stack", [lambda: [], lambda: [Accumulate(2)], lambda: [Prefetch()]])
def test_large_batches_come_by_a_stream_of_their_own(stack: Any) -> None:
    compare(stack, 15, wide(), Wide)


def test_garbage_of_an_earlier_run_is_not_collected_in_a_capture() -> None:
    """Each run leaves cycles that hold pinned memory, which the graph's stream has used."""
    threshold = gc.get_threshold()
    gc.enable()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(4):
            run([Guard(), CudaGraph(strict=True)], max_epochs=1)
    finally:
        gc.set_threshold(*threshold)
    torch.cuda.synchronize()
    assert all(torch.empty(2**20, dtype=torch.uint8, pin_memory=True).is_pinned() for _ in range(8))
