"""anomaly: real mistakes are named by operation, module, line and sample, and looking leaves no trace."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.errors import NonFiniteError
from forge.testing import TinyGAN, TinyTask, assert_same, tiny_batches
from forge_plugins import Accumulate, Anomaly, Clip, Guard
from tests.support.profiles import some


class Head(nn.Module):
    def __init__(self, last: Callable[[Tensor], Tensor]):
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(x))


class Net(forge.TaskModule):
    """A body with batch normalisation and dropout, and a head that makes the mistake."""

    def __init__(self, last: Any = nn.Identity()) -> None:  # noqa: B008
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
            self.head = Head(last)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self.head(self.body(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def only_row(row: int, changed: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Change one row of a batch, leave the others."""
    return lambda x: torch.cat([x[:row], changed(x[row : row + 1]), x[row + 1 :]])


def log_of_zero(x: Tensor) -> Tensor:
    return torch.log(only_row(5, torch.zeros_like)(x.exp()))


def root_of_zero(x: Tensor) -> Tensor:
    root = only_row(3, lambda row: row * 0.0)(x.abs() + 1.0).sqrt()
    assert bool((root.detach() * 2.0 >= 0.0).all())  # needs no gradient, so it has no part in the backward
    return x + root


def root_that_where_hides(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.sqrt(x), x * 0.0)


def overflow(x: Tensor) -> Tensor:
    return torch.exp(only_row(4, lambda row: row.abs() + 200.0)(x))


def mask_over_everything(x: Tensor) -> Tensor:
    hidden = torch.zeros_like(x, dtype=torch.bool)
    hidden[1] = True
    scores = x.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1)


def innocent_mask(x: Tensor) -> Tensor:
    hidden = torch.zeros_like(x, dtype=torch.bool)
    hidden[:, 0] = True
    weights = torch.softmax(x.masked_fill(hidden, -math.inf), -1)
    return weights + torch.log(x.abs() * 0.0) * 0.0


class Root(torch.autograd.Function):
    """A backward of the user's own that divides by zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] / 0.0


@dataclass
class Mistake:
    last: Callable[[Tensor], Tensor]
    kind: str
    op: str
    code: str
    rows: list[int]
    made: str = "infinity"


MISTAKES = [
    Mistake(log_of_zero, "forward", "aten.log", "return torch.log(only_row(5", [5]),
    Mistake(root_that_where_hides, "forward", "aten.sqrt", "return torch.where(x > 0, torch.sqrt(x)", [], "NaN"),
    Mistake(root_of_zero, "backward", "aten.div", "root = only_row(3", [3]),
    Mistake(overflow, "forward", "aten.exp", "return torch.exp(only_row(4", [4]),
    Mistake(mask_over_everything, "forward", "aten._softmax", "return torch.softmax(scores, -1)", [1], "NaN"),
    Mistake(innocent_mask, "forward", "aten.log", "return weights + torch.log(x.abs() * 0.0) * 0.0", list(range(8))),
    Mistake(lambda x: Root.apply(x), "backward", "aten.div", "return gradients[0] / 0.0", []),
]


def fit(plugins: list[Any], train: Any, task: Any = None, **options: Any) -> tuple[forge.TaskModule, forge.FitResult]:
    settings = {"max_epochs": 1, "seed": 0, "run_dir": False, "device": "cpu", **options}
    task = task or Net()
    return task, forge.Trainer(plugins=plugins, **settings).fit(task, train)


def found(task: Any, train: Any = None, *beside: forge.Plugin, **options: Any) -> tuple[dict[str, Any], str]:
    """The finding, and what a user reads."""
    anomaly = Anomaly()
    with pytest.raises(NonFiniteError) as caught:
        fit([anomaly, *beside], tiny_batches([8] * 4) if train is None else train, task, **options)
    return anomaly.findings[0], "\n".join([str(caught.value), *caught.value.__notes__])


def with_bad(value: float, *, index: int = 2, row: int = 5) -> list[tuple[Tensor, Tensor]]:
    made = tiny_batches([8] * 5)
    made[index][0][row, 1] = value
    return made


# -- real mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: getattr(mistake.last, "__name__", "function"))
def test_the_first_op_is_named_with_module_line_and_samples(mistake: Mistake) -> None:
    finding, text = found(Net(mistake.last))
    assert (finding["kind"], finding["op"]) == (mistake.kind, mistake.op)
    assert (finding["module"], finding["class"]) == ("head", "Head")
    assert finding["place"]["file"] == __file__
    assert finding["place"]["code"].startswith(mistake.code)
    if mistake.rows:
        assert finding["rows"] == mistake.rows
    assert mistake.made in text
    assert f"test_anomaly.py:{finding['place']['line']} in " in text


def test_a_hidden_sample_is_named_by_row_and_dataset_index() -> None:
    inputs, labels = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(24, dtype=torch.long)
    inputs[17, 3] = math.inf
    loader = forge.data.Loader(torch.utils.data.TensorDataset(inputs, labels), 4, shuffle=True, seed=7)
    finding, text = found(Net(), loader, Accumulate(2))
    assert (finding["kind"], finding["name"], finding["samples"]) == ("batch", "batch[0]", [17])
    assert "batch[0], as the loader gave it, is not finite: 1 infinite" in text
    assert "index 17 of the dataset" in text
    assert f"row {finding['rows'][0]} of micro-batch {finding['micro'] + 1} of 2 (1 of 4)" in text


@pytest.mark.parametrize("sample", [5, 9, 13, 17])
@pytest.mark.parametrize("window", [1, 2])
def test_the_dataset_index_is_right_in_every_micro_batch(sample: int, window: int) -> None:
    inputs, labels = torch.randn(18, 6), torch.zeros(18, dtype=torch.long)
    inputs[sample] = math.nan
    loader = forge.data.Loader(torch.utils.data.TensorDataset(inputs, labels), 4)
    finding, _ = found(Net(), loader, Accumulate(window))
    assert finding["samples"] == [sample]


def test_a_parameter_that_was_bad_before_is_named() -> None:
    task = Net()
    with torch.no_grad():
        task.head.linear.weight[1, 1] = math.nan
    finding, text = found(task)
    assert (finding["kind"], finding["name"], finding["weights"]) == (
        "parameter",
        "head.linear.weight",
        finding["weights"],
    )
    assert finding["weights"] == ["head.linear.weight"]
    assert "the parameter head.linear.weight was not finite before this window" in text
    assert "met by    addmm in head.linear (Linear)" in text


def test_a_backward_is_named_by_node_and_forward_line() -> None:
    _, text = found(Net(root_of_zero))
    assert "the loss is finite, but 6 of 6 gradients are not finite" in text
    assert "in SqrtBackward0, the backward of head (Head)" in text


def test_random_numbers_are_those_of_the_first_run() -> None:
    class Unlucky(Net):
        def training_step(self, batch: Any) -> Any:
            drawn = torch.rand(8, 1)
            self.drawn = drawn if not hasattr(self, "drawn") else self.drawn
            return super().training_step(batch) / (drawn > 0.9).float().sum()

    torch.manual_seed(0)
    task = Unlucky()
    finding, _ = found(task, tiny_batches([8] * 40))
    assert finding["op"] == "aten.div"


class BadTurn(TinyGAN):
    def training_step(self, batch: Any, name: str) -> Any:
        loss = super().training_step(batch, name)["loss"]
        return loss.log() * 0.0 / 0.0 if name == "discriminator" else loss


def test_the_turn_of_one_of_several_optimizers_is_named() -> None:
    finding, text = found(BadTurn(), None, Accumulate(2))
    assert finding["optimizer"] == "discriminator"
    assert "update 0 (epoch 0, optimizer 'discriminator')" in text.lower()
    assert all(name.startswith("discriminator.") for name in finding["gradients"])


def test_what_does_not_happen_again_is_told_as_that() -> None:
    class Once(Net):
        def training_step(self, batch: Any) -> Any:
            self.runs = getattr(self, "runs", 0) + 1
            return super().training_step(batch) * (math.nan if self.runs == 2 else 1.0)

    finding, text = found(Once())
    assert finding["kind"] == "none"
    assert "not deterministic" in text


def test_a_batch_that_the_step_changes_in_place_is_told() -> None:
    class InPlace(Net):
        def training_step(self, batch: Any) -> Any:
            batch[0].div_(batch[0].abs().amin())
            return super().training_step(batch)

    batches = tiny_batches([8] * 2)
    batches[1][0][0, 0] = 0.0
    _, text = found(InPlace(), batches)
    assert "the step changes its batch in place" in text


# -- who stops the run ------------------------------------------------------------------------------------------------


def test_the_weights_are_as_before_the_bad_update() -> None:
    task = Net()
    found(task, with_bad(math.nan))
    expected, _ = fit([], with_bad(math.nan), max_epochs=None, max_updates=2)
    parameters = dict(task.named_parameters())
    assert_same(parameters, {n: v for n, v in expected.state_dict().items() if n in parameters})


@pytest.mark.parametrize("order", [1, -1])
def test_guards_error_carries_the_report_wherever_it_is(order: int) -> None:
    anomaly = Anomaly()
    with pytest.raises(NonFiniteError) as caught:
        fit([anomaly, Guard()][::order], with_bad(math.nan), run_dir="run")
    assert "guard.policy=skip" in str(caught.value)
    assert "run again with -p anomaly" not in str(caught.value)
    assert len(anomaly.findings) == len(caught.value.__notes__) == 1
    assert "batch[0], as the loader gave it" in caught.value.__notes__[0]


def test_a_skipped_update_is_reported_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    _, result = fit([Guard("skip"), Anomaly()], with_bad(math.nan))
    assert result.updates == 5
    assert "update 2 (epoch 0): the loss is nan" in caplog.text
    assert "row 5 of the batch" in caplog.text


# -- no trace ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", some([1, -1], quick=1))
@pytest.mark.parametrize("kind", [TinyTask, TinyGAN])
@pytest.mark.parametrize("window", some([1, 2], quick=1))
def test_an_analysis_changes_nothing(order: int, kind: Any, window: int) -> None:
    beside: Any = lambda: [Accumulate(window), Clip(1.0)]  # noqa: E731
    plain, expected = fit([Guard("skip"), *beside()], with_bad(math.nan), kind())
    anomaly = Anomaly()
    looked_at, result = fit([*[Guard("skip"), anomaly][::order], *beside()], with_bad(math.nan), kind())
    assert anomaly.findings
    assert_same(looked_at, plain)
    assert result.metrics == expected.metrics
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in looked_at.modules())
