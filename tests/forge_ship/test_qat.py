"""qat: what trains is what a hand-written loop with int8's rounding trains, bit for bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.errors import CheckpointError, RecipeError, StackError, TaskError
from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import DDP, EMA, FSDP, Accumulate, Checkpoint, TensorParallel
from forge_ship.qat import QAT, RANGE, SEEN, install
from tests.support import reference
from tests.support.averages import loss_of
from tests.support.lasting_ranks import ranks as pair
from tests.support.profiles import some


def by_hand(window: int = 1) -> TinyTask:
    """Train a TinyTask with rounded layers in a plain loop."""
    task = TinyTask()
    reference.round_layers(task)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9)
    reference.train(task, loss_of, optimizer, tiny_batches(), 2, window=window, seed=0)
    return task


class Validated(TinyTask):
    """Keeps the logits of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def validation_step(self, batch: Any) -> dict[str, Tensor]:
        self.kept.append(self(batch[0]))
        return {"loss": F.cross_entropy(self.kept[-1], batch[1])}


class Images(forge.TaskModule):
    """A convolution, batch norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def first_layer(step: forge.Step) -> nn.Module:
    return step.trainer.task.get_submodule("net.0")


def images() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4, 1, 6, 6, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(3)
    ]


# -- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", some([1, 2], quick=1))
def test_a_fit_is_a_plain_loop_that_rounds(window: int) -> None:
    task, _ = fit_tiny([QAT(), Accumulate(window)])
    assert_same(task, by_hand(window))


def test_a_validation_is_that_of_the_rounded_model() -> None:
    task = Validated()
    fit_tiny([QAT()], task=task)
    expected = by_hand().eval()
    with torch.no_grad():
        logits = [expected(x) for x, _ in tiny_batches(seed=1)]
    for found, wanted in zip(task.kept[-len(logits) :], logits, strict=True):
        assert torch.equal(found, wanted)


def test_convolutions_are_rounded_per_channel() -> None:
    task, grids = Images(), []

    @forge.on("step_end", mutates=True)
    def look(step: forge.Step) -> None:
        layer: Any = first_layer(step)
        weight = layer.weight.detach()
        scale = weight.abs().amax((1, 2, 3), keepdim=True) / 127
        exact = torch.round(weight / scale) * scale
        x = images()[0][0]
        low, high, _ = layer.get_buffer(RANGE)
        step_of_x = (high - low) / 255
        rounded = ((x / step_of_x).round().clamp(low / step_of_x, high / step_of_x)) * step_of_x
        with torch.no_grad():
            grids.append((layer(x) - F.conv2d(rounded, exact, layer.bias)).abs().max())

    fit_tiny([QAT(), look], task=task, train=images(), val=images(), max_epochs=1)
    assert len(grids) == 3
    assert max(grids) < 0.05


# -- the task ---------------------------------------------------------------------------------------------------------


def test_the_task_is_itself_again_after_a_fit() -> None:
    before = TinyTask()
    task, _ = fit_tiny([QAT()])
    assert task.state_dict().keys() == before.state_dict().keys()
    for layer, plain in zip(task.modules(), before.modules(), strict=True):
        assert vars(layer).keys() - {"trainer"} == vars(plain).keys() - {"trainer"}
        assert layer._buffers.keys() == plain._buffers.keys()


def test_layers_can_be_kept_in_float() -> None:
    plugin, seen = QAT(keep="net.4"), []

    @forge.on("step_end", mutates=True)
    def look(step: forge.Step) -> None:
        seen.append(set(plugin.forge_state_dict()["ranges"]))

    fit_tiny([plugin, look], max_updates=1)
    assert seen == [{"net.0"}]


# -- resume -----------------------------------------------------------------------------------------------------------


def test_a_resume_with_other_layers_is_refused(tmp_path: Path) -> None:
    fit_tiny([QAT(), Checkpoint()], run_dir=tmp_path, max_updates=2)
    with pytest.raises(CheckpointError, match=r"qat: the run to be resumed rounded other layers.*net\.4"):
        fit_tiny([QAT(keep="net.4"), Checkpoint()], run_dir=tmp_path, resume="auto")


# -- beside others ----------------------------------------------------------------------------------------------------


def test_an_average_is_rounded_when_it_is_evaluated() -> None:
    task, ema = Validated(), EMA(0.5)
    fit_tiny([QAT(), ema], task=task)
    expected = by_hand().eval()
    ema.apply_to(expected)
    with torch.no_grad():
        logits = [expected(x) for x, _ in tiny_batches(seed=1)]
    for found, wanted in zip(task.kept[-len(logits) :], logits, strict=True):
        assert torch.equal(found, wanted)


def test_split_layers_are_refused() -> None:
    with pytest.raises(StackError, match=r"(?s)qat.*tensor_parallel|tensor_parallel.*qat"):
        fit_tiny([QAT(), FSDP(), TensorParallel(size=2, plan={"net.0": "column"})])


# -- several ranks ----------------------------------------------------------------------------------------------------


class Remembers(TinyTask):
    """Keeps the least and the largest input of each training batch. No dropout, whose numbers depend on the rank."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.seen: list[tuple[float, float]] = []

    def training_step(self, batch: Any) -> Any:
        self.seen.append((batch[0].min().item(), batch[0].max().item()))
        return super().training_step(batch)


def fit_on_this_rank() -> tuple[list[tuple[float, float]], list[list[float]], dict[str, Tensor]]:
    """Fit; return what the task has seen, the range of its first layer after each update, and its weights."""
    ranges: list[list[float]] = []

    @forge.on("step_end")
    def keep(step: forge.Step) -> None:
        ranges.append(first_layer(step).get_buffer(RANGE).tolist())

    task = Remembers()
    fit_tiny([QAT(), DDP(), keep], task=task)
    return task.seen, ranges, {name: value.detach().clone() for name, value in task.state_dict().items()}


@pytest.mark.slow
def test_two_ranks_have_one_range_and_the_same_weights() -> None:
    (seen, ranges, weights), (seen2, ranges2, weights2) = pair(2)(fit_on_this_rank)
    assert seen != seen2  # each has its share of a batch
    assert ranges == ranges2
    assert ranges[0][:2] == pytest.approx([(a + b) / 2 for a, b in zip(seen[0], seen2[0], strict=True)])
    assert all(torch.equal(value, weights2[name]) for name, value in weights.items() if "running" not in name)


def test_a_rank_without_a_batch_takes_the_others_range() -> None:
    here, there = nn.Linear(2, 2), torch.tensor([[-1.0, 3.0, 4.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    unreached, qat = nn.Linear(2, 2), QAT()
    qat._layers = {"here": here, "unreached": unreached}
    for layer in qat._layers.values():
        install(layer)
    env = SimpleNamespace(sum=lambda own: own + there)
    qat._average_over_ranks(SimpleNamespace(env=env))  # pyright: ignore[reportArgumentType]
    assert here.get_buffer(RANGE).tolist() == [-1.0, 3.0, 4.0]
    assert [vars(layer)[SEEN] for layer in (here, unreached)] == [True, False]


# -- refusals ---------------------------------------------------------------------------------------------------------


class Nothing(TinyTask):
    """No layer to quantise."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(3, 3))


@pytest.mark.parametrize(
    ("make", "task", "error", "message"),
    [
        (lambda: QAT(keep="nat.*"), TinyTask, RecipeError, r"qat.keep: 'nat.\*' matches no layer.*net.0, net.4"),
        (lambda: QAT(keep="net.*"), TinyTask, TaskError, "has nothing to quantise: no layer but qat.keep"),
        (QAT, Nothing, TaskError, "Nothing has nothing to quantise: no layer is one of nn.Linear"),
    ],
)
def test_what_cannot_be_rounded_is_refused(make: Any, task: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fit_tiny([make()], task=task())
