"""What a plain loop can do is not refused: forge gives the weights of that loop, or a note."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import forge
from forge.data import Loader
from forge_plugins import AMP, Accumulate, Clip, Guard
from tests.support.tasks import Classifier, fit, make_batches


class Given(Classifier):
    """A step that takes a batch as it comes."""

    def __init__(self, of: Callable[[Any, Any], Any] | None = None):
        torch.manual_seed(0)
        super().__init__()
        self.of = of or (lambda task, batch: F.cross_entropy(task(batch[0]), batch[1]))

    def training_step(self, batch: Any) -> Any:
        return self.of(self, batch)

    validation_step = training_step


def plain(task: forge.TaskModule, batches: list[Any], epochs: int = 1) -> dict[str, Any]:
    """The weights after a loop by hand."""
    twin = copy.deepcopy(task)
    optimizer = twin.configure_optimizers()
    for batch in batches * epochs:
        twin.training_step(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return twin.state_dict()


def assert_equal(task: forge.TaskModule, weights: dict[str, Any]) -> None:
    assert all(torch.equal(weights[name], value) for name, value in task.state_dict().items())


# -- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1)])
def test_a_loss_of_one_element(shape: tuple[int, ...]) -> None:
    task = Given(lambda task, batch: F.cross_entropy(task(batch[0]), batch[1]).reshape(shape))
    weights = plain(task, make_batches(3))
    result = fit(task, make_batches(3), make_batches(2))
    assert_equal(task, weights)
    assert {"train/loss", "val/loss"} <= result.metrics.keys()


@pytest.mark.parametrize("plugins", [[Accumulate(2)], [Guard()], [Clip(1.0)], [AMP(dtype="bf16")]])
def test_plugins_take_it_too(plugins: list[Any]) -> None:
    ends = []
    for shape in ((), (1,)):
        task = Given(lambda task, batch, shape=shape: F.cross_entropy(task(batch[0]), batch[1]).reshape(shape))
        fit(task, make_batches(3), plugins=[copy.deepcopy(each) for each in plugins])
        ends.append(task.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


# -- loaders ----------------------------------------------------------------------------------------------------------


class Rewinds:
    """`__iter__` begins again and returns the loader itself."""

    def __iter__(self) -> Any:
        self.left = make_batches(3)
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


class Unready(Rewinds):
    """A length that is known only after `iter`."""

    def __len__(self) -> int:
        raise RuntimeError("Please call iter first")


@pytest.mark.parametrize("make", [Rewinds, Unready])
def test_a_loader_that_begins_again(make: Callable[[], Any]) -> None:
    task = Given()
    weights = plain(task, make_batches(3), epochs=3)
    fit(task, make(), make(), max_epochs=3)
    assert_equal(task, weights)


def test_lightnings_combined_loader() -> None:
    combined = pytest.importorskip("lightning.pytorch.utilities").CombinedLoader
    loaders = {"a": DataLoader(make_batches(3), batch_size=None), "b": DataLoader(make_batches(2), batch_size=None)}  # pyright: ignore[reportArgumentType]

    def step(task: Any, given: Any) -> Any:
        both, _, _ = given
        return sum(F.cross_entropy(task(x), y) for x, y in both.values())

    task = Given(step)
    weights = plain(task, [*combined(loaders, "min_size")], epochs=2)
    fit(task, combined(loaders, "min_size"), combined(loaders, "min_size"), max_epochs=2)
    assert_equal(task, weights)


DATA = TensorDataset(torch.randn(8, 8, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 3)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_sampler": BatchSampler(SequentialSampler(DATA), 3, drop_last=False)},
        {"batch_sampler": [[0, 1], [5, 6, 7], [2]]},
        {"batch_size": 3, "sampler": [7, 3, 1, 0]},
        {"batch_size": 3, "sampler": SequentialSampler(DATA)},
    ],
)
def test_a_sampler_of_torchs_in_a_loader(options: dict[str, Any]) -> None:
    theirs = list(DataLoader(DATA, **options))
    ours = list(Loader(DATA, **options))
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True))
    task = Given()
    weights = plain(task, theirs)
    fit(task, Loader(DATA, **options), plugins=["checkpoint"], allow_inexact=False)
    assert_equal(task, weights)


# -- batches ----------------------------------------------------------------------------------------------------------


def test_arrays_of_numpy() -> None:
    arrays = [(x.numpy(), y.numpy()) for x, y in make_batches(3)]
    task = Given(lambda task, b: F.cross_entropy(task(torch.from_numpy(b[0])), torch.from_numpy(b[1])))
    weights = plain(task, arrays)
    fit(task, arrays)
    assert_equal(task, weights)


def test_arrays_that_meet_a_layer_are_named_with_the_cure() -> None:
    with pytest.raises(TypeError) as caught:
        fit(Given(), [(np.zeros((4, 8), "float32"), np.zeros(4, "int64"))])
    assert "torch.as_tensor" in "\n".join(caught.value.__notes__)


def test_batches_without_a_size_count_as_one(caplog: pytest.LogCaptureFixture) -> None:
    task = Given(lambda task, batch: task(torch.full((2, 8), float(len(batch["text"])))).square().mean())
    batches = [{"text": "a"}, {"text": "bcd"}]
    weights = plain(task, batches)
    with caplog.at_level(logging.WARNING, "forge"):
        fit(task, batches)
    assert_equal(task, weights)
    assert sum("Every batch counts as one" in line for line in caplog.messages) == 1


# -- steps ------------------------------------------------------------------------------------------------------------


def test_a_validation_step_that_returns_nothing_has_metrics_at_its_end() -> None:
    class Collects(Given):
        def __init__(self) -> None:
            super().__init__()
            self.hits: list[float] = []

        def validation_step(self, batch: Any) -> None:
            self.hits += (self(batch[0]).argmax(1) == batch[1]).float().tolist()

        def evaluation_end(self, stage: str) -> dict[str, float]:
            hits, self.hits = self.hits, []
            return {"accuracy": sum(hits) / len(hits)}

    class Counts(Given):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(num_classes=3, average="micro")

        def validation_step(self, batch: Any) -> None:
            self.accuracy.update(self(batch[0]), batch[1])

    ends = [fit(task, make_batches(2), make_batches(3)).metrics["val/accuracy"] for task in (Collects(), Counts())]
    assert ends[0] == pytest.approx(ends[1])


def test_one_that_forgets_its_return_is_refused() -> None:
    class Forgets(Given):
        def validation_step(self, batch: Any) -> None:
            self(batch[0])

    with pytest.raises(forge.TaskError, match="returned NoneType"):
        fit(Forgets(), make_batches(1), make_batches(1))


# -- optimizers -------------------------------------------------------------------------------------------------------


class Called(torch.optim.SGD):
    """Calls what it is given, without a look: sharpness-aware optimizers need it, though it has a default."""

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is not None, "requires closure"
        with torch.enable_grad():
            closure()
        return super().step()


def test_an_optimizer_that_needs_a_closure() -> None:
    class Uses(Given):
        def configure_optimizers(self) -> Any:
            return Called(self.parameters(), lr=0.1)

    task = Uses()
    twin = copy.deepcopy(task)
    fit(task, make_batches(3), plugins=[])
    optimizer = twin.configure_optimizers()
    for batch in make_batches(3):

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = twin.training_step(batch)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()
    assert_equal(task, twin.state_dict())


# -- tasks ------------------------------------------------------------------------------------------------------------


def test_a_name_that_nearly_is_one_of_forges_is_told() -> None:
    class Misspelt(Given):
        def evaluation_ends(self, stage: str) -> Any:
            return {}

        def take_turn(self, name: str, update: int) -> bool:
            return True

        def evaluate(self) -> None: ...

    with pytest.warns(UserWarning, match="forge never calls") as said:
        fit(Misspelt(), make_batches(1))
    (text,) = (str(each.message) for each in said if "forge never calls" in str(each.message))
    assert "Misspelt.evaluation_ends: did you mean evaluation_end?" in text
    assert "Misspelt.take_turn: did you mean takes_turn?" in text
    assert "evaluate:" not in text
