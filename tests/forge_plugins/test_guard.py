"""guard: what is not finite never reaches the weights, and what is finite is left alone."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import forge
from forge.errors import NonFiniteError, RecipeError
from forge.snapshot.non_finite import all_finite
from forge.testing import TinyGAN, TinyTask, assert_same, tiny_batches
from forge_plugins import Accumulate, Anomaly, Checkpoint, Guard
from forge_plugins.guard import DeviceFlag


def batches(*bad: int, count: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Batches of which those at `bad` hold a NaN."""
    made = tiny_batches([8] * count)
    for index in bad:
        made[index][0][3, 2] = math.nan
    return made


def without(*left_out: int, count: int = 6) -> list[tuple[Tensor, Tensor]]:
    return [batch for index, batch in enumerate(batches(count=count)) if index not in left_out]


def fit(plugins: list[Any], train: Any, task: Any = None, **options: Any) -> tuple[forge.TaskModule, forge.FitResult]:
    settings = {"max_epochs": 1, "seed": 0, "run_dir": False, "device": "cpu", "log_every": 2, **options}
    task = task or TinyTask()
    return task, forge.Trainer(plugins=plugins, **settings).fit(task, train)


def saving(every: str = "1 updates") -> Checkpoint:
    """In the foreground, so that a checkpoint is there as soon as its update is over."""
    return Checkpoint(every=every, background=False)


# -- finite numbers ---------------------------------------------------------------------------------------------------


class Large(forge.TaskModule):
    """Gradients of 1e38: finite, but their sum is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Any) -> Tensor:
        return (self.weight * 1e38).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-39)


def test_gradients_whose_sum_overflows_are_no_alarm() -> None:
    _, result = fit([Guard()], tiny_batches(), Large())
    assert result.updates == 5


numbers = st.floats(width=16) | st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 6e4, 3e38])
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
tensors = st.tuples(st.lists(numbers, max_size=5), dtypes).map(lambda drawn: torch.tensor(drawn[0], dtype=drawn[1]))


@given(st.lists(tensors, max_size=4))
def test_all_finite_is_exactly_that(drawn: list[Tensor]) -> None:
    assert all_finite(drawn) == all(bool(torch.isfinite(tensor).all()) for tensor in drawn)


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_sparse_and_complex_gradients_are_looked_at_too(value: float) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([value]), (3,), check_invariants=True)
    for tensor in (sparse, torch.tensor([complex(1.0, value)])):
        assert all_finite([tensor]) == math.isfinite(value)


# -- stop -------------------------------------------------------------------------------------------------------------


def test_stop_names_update_epoch_and_parameters() -> None:
    task = TinyTask()
    with pytest.raises(NonFiniteError) as caught:
        fit([Guard()], batches(3), task)
    text = str(caught.value)
    assert "Update 3 (epoch 0): the loss and the gradients of net.0.weight, net.0.bias, net.1.weight and 3 more" in text
    assert "-p anomaly" in text
    assert "--resume" not in text
    before, _ = fit([], batches(3), max_epochs=None, max_updates=3)
    names = dict(task.named_parameters())
    assert_same(names, {name: p for name, p in before.state_dict().items() if name in names})


class NaNLoss(TinyTask):
    """In its second update the loss is NaN, but every gradient is finite."""

    def training_step(self, batch: Any) -> Any:
        metrics = super().training_step(batch)
        late = self.trainer is not None and self.trainer.progress.update == 1
        return {**metrics, "loss": metrics["loss"] + (math.nan if late else 0.0)}


class NaNMetric(TinyTask):
    def training_step(self, batch: Any) -> Any:
        return {**super().training_step(batch), "odd": torch.tensor(math.nan)}


class RootOfZero(TinyTask):
    """The loss is finite, the gradient of the root is not."""

    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch)["loss"] + (self.net(batch[0]) * 0).abs().sqrt().sum()


@pytest.mark.parametrize("window", [1, 2])
def test_a_bad_loss_with_finite_gradients_is_caught(window: int) -> None:
    with pytest.raises(NonFiniteError, match=r"Update 1 \(epoch 0\): the loss is not finite\. The weights"):
        fit([Guard(), Accumulate(window)], tiny_batches([8] * 6), NaNLoss())


def test_a_bad_gradient_with_a_finite_loss_is_caught() -> None:
    with pytest.raises(NonFiniteError, match="the loss is finite, but the gradients of net"):
        fit([Guard()], tiny_batches(), RootOfZero())


def test_a_metric_that_is_nan_is_nobodys_fault() -> None:
    _, result = fit([Guard()], tiny_batches(), NaNMetric())
    assert result.updates == 5
    assert math.isnan(result.metrics["train/odd"])


def test_stop_names_the_checkpoint_that_meets_it_again(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError) as first:
        fit([Guard(), saving("2 updates")], batches(5), run_dir=tmp_path)
    assert "--resume -p anomaly" in str(first.value)
    assert str(tmp_path / "checkpoints" / "update-00000004") in str(first.value)
    again = Anomaly()
    with pytest.raises(NonFiniteError, match="Update 5"):
        fit([Guard(), saving("2 updates"), again], batches(5), run_dir=tmp_path, resume="auto")
    assert again.findings[0]["name"] == "batch[0]"


# -- skip -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2])
def test_a_skipped_window_leaves_no_trace(window: int) -> None:
    bad = (2, 3)[:window]
    once = {"log_every": 100}  # one log, at the epoch's end
    skipped, result = fit([Guard("skip"), Accumulate(window)], batches(bad[0]), TinyTask(dropout=0.0), **once)
    expected, reference = fit([Accumulate(window)], without(*bad), TinyTask(dropout=0.0), **once)
    assert_same(skipped, expected)  # buffers too
    assert result.updates == reference.updates + 1
    assert result.metrics["train/loss"] == reference.metrics["train/loss"]


def test_each_skip_is_one_line_and_makes_no_other_update_bad(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forge")
    fit([Guard("skip")], batches(1, 3), log_every=100)
    told = [line.partition(": ")[0] for line in caplog.messages if "not finite" in line]
    assert told == ["guard skips update 1", "guard skips update 3"]


def test_more_skips_in_a_row_than_allowed_stop_the_run() -> None:
    with pytest.raises(NonFiniteError, match=r"number 3 in a row, more than guard\.max_skips=2"):
        fit([Guard("skip", max_skips=2)], batches(1, 2, 3))
    assert fit([Guard("skip", max_skips=2)], batches(0, 1, 3, 4))[1].updates == 6


def test_no_limit_lets_everything_be_skipped() -> None:
    task = TinyTask()
    before = copy.deepcopy(task)
    fit([Guard("skip", max_skips=0)], batches(*range(12), count=12), task)
    assert_same(task, before)


def test_skips_in_a_row_are_counted_across_a_resume(tmp_path: Path) -> None:
    stack: Any = lambda: [Guard("skip", max_skips=2), saving()]  # noqa: E731
    fit(stack(), batches(1, 2, 3), run_dir=tmp_path, max_epochs=None, max_updates=3)
    with pytest.raises(NonFiniteError, match="number 3 in a row"):
        fit(stack(), batches(1, 2, 3), run_dir=tmp_path, resume="auto", max_epochs=None, max_updates=6)


def test_a_run_without_skips_has_no_state(tmp_path: Path) -> None:
    fit([Guard("skip"), saving()], batches(), run_dir=tmp_path, max_epochs=None, max_updates=3)
    assert fit([saving()], batches(), run_dir=tmp_path, resume="auto")[1].updates == 6


class HalfBadGAN(TinyGAN):
    """The discriminator's loss is NaN in every update."""

    def training_step(self, batch: Any, name: str) -> Any:
        loss = super().training_step(batch, name)["loss"]
        return loss * math.nan if name == "discriminator" else loss


def test_each_optimizer_is_skipped_on_its_own() -> None:
    task = HalfBadGAN()
    before = copy.deepcopy(task)
    fit([Guard("skip", max_skips=0)], tiny_batches(), task)
    assert_same(task.discriminator, before.discriminator)
    with pytest.raises(AssertionError):
        assert_same(task.generator, before.generator)
    with pytest.raises(NonFiniteError, match=r"discriminator\.0\.weight.*number 3 in a row"):
        fit([Guard("skip", max_skips=2)], tiny_batches(), HalfBadGAN())


class WithLBFGS(TinyTask):
    bad_from = 0
    "Which evaluation of the closure is the first bad one."

    def training_step(self, batch: Any) -> Any:
        self.evaluations = getattr(self, "evaluations", -1) + 1
        loss = super().training_step(batch)["loss"]
        return loss * math.nan if self.evaluations >= self.bad_from else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


def test_a_closure_optimizer_is_skipped_before_its_step_only() -> None:
    task = WithLBFGS(dropout=0.0)
    before = copy.deepcopy(task)
    fit([Guard("skip")], tiny_batches([8]), task)
    assert_same(task, before)
    late = WithLBFGS(dropout=0.0)
    late.bad_from = 1
    with pytest.raises(NonFiniteError, match="inside the optimizer's closure"):
        fit([Guard("skip")], tiny_batches([8]), late)


# -- rewind -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "options", "left_out"),
    [((3,), {}, (3,)), ((3,), {"leave_out": 2}, (2, 3)), ((2, 3, 5), {}, (2, 3, 5))],
    ids=["one window", "one before it too", "several"],
)
def test_rewind_ends_as_if_the_bad_windows_had_never_been_there(
    bad: tuple[int, ...], options: dict[str, Any], left_out: tuple[int, ...], tmp_path: Path
) -> None:
    rewound, result = fit([Guard("rewind", **options), saving("2 updates")], batches(*bad), run_dir=tmp_path)
    expected, _ = fit([], without(*left_out))
    assert_same(rewound, expected)  # dropout too: the window that is left out draws nothing
    assert result.updates == 6


def test_more_rewinds_than_allowed_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"been rewound 2 times already \(guard\.max_rewinds=2\)"):
        fit([Guard("rewind", max_rewinds=2), saving("2 updates")], batches(2, 3, 5), run_dir=tmp_path)


def test_rewind_without_a_checkpoint_plugin_says_so() -> None:
    with pytest.raises(NonFiniteError, match="Policy rewind needs checkpoints: add -p checkpoint"):
        fit([Guard("rewind")], batches(3))


def test_rewind_before_the_first_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="No checkpoint exists yet to rewind to"):
        fit([Guard("rewind"), saving("4 updates")], batches(3), run_dir=tmp_path)


# -- one update late, as on a CUDA device -----------------------------------------------------------------------------


class HostFlag(DeviceFlag):
    """The device's flag in host memory; what was sent arrives when it is asked for."""

    def __init__(self) -> None:
        self._both, self._one, self._sent = torch.zeros(2), torch.ones(()), torch.zeros(())
        self.value, self._count = self._both

    def send(self) -> None:
        self._sent.copy_(self._count)

    def is_captured(self) -> bool:
        return False

    def arrived(self) -> int:
        return int(self._sent.item())


class LateGuard(Guard):
    """guard as it works with fused optimizers on a CUDA device; torch's fused ones take the flag on the CPU too."""

    def _prepare(self, trainer: forge.Run) -> None:
        super()._prepare(trainer)
        trainer.means.on_host = False
        self._on_device, self._flag = set(trainer.optimizers), HostFlag()


class Fused(TinyTask):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1, fused=True)


class FusedNaNLoss(NaNLoss, Fused):
    pass


class Hear(forge.Plugin):
    """Notes the update at which an error ends the run, and how many were logged by then."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[int] = []
        self.logs: list[int] = []

    @forge.hookimpl
    def forge_log(self, update: int) -> None:
        self.logs.append(update)

    @forge.hookimpl
    def forge_exception(self, trainer: forge.Trainer) -> None:
        self.at.append(trainer.progress.update)


class InfiniteGradient(Fused):
    """The gradients of update 3 are infinite, its loss is not."""

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)["loss"]
        assert self.trainer is not None
        if self.trainer.progress.update == 3:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss


@pytest.mark.parametrize(
    ("make", "bad", "what"), [(Fused, (3,), "the loss"), (InfiniteGradient, (), "a gradient")], ids=["loss", "gradient"]
)
@pytest.mark.parametrize("log_every", [1000, 10])
def test_the_host_hears_late_of_weights_that_stayed(
    make: type[Fused], bad: tuple[int, ...], what: str, log_every: int
) -> None:
    hear, task, before = Hear(), make(), Fused()
    train = batches(*bad, count=30)
    with pytest.raises(NonFiniteError, match=rf"Update 3 \(epoch 0\): {what} is not finite"):
        fit([LateGuard(), hear], train, task, log_every=log_every)
    fit([], train, before, max_epochs=None, max_updates=3)
    assert hear.at == [11 if log_every == 10 else 17]  # sixteen updates are read at once, and before a log
    assert not hear.logs
    names = dict(task.named_parameters())
    assert_same(names, {name: p for name, p in before.state_dict().items() if name in names})


def test_a_late_finding_comes_before_a_validation() -> None:
    hear = Hear()
    trainer = forge.Trainer(max_epochs=1, plugins=[LateGuard(), hear], run_dir=False, validate_every="5 updates")
    with pytest.raises(NonFiniteError, match="Update 3"):
        trainer.fit(Fused(), batches(3, count=30), val=batches())
    assert hear.at == [5]
    assert not any("val/loss" in metrics for metrics in trainer.metrics)


def test_a_bad_loss_alone_is_heard_of_late_too() -> None:
    with pytest.raises(NonFiniteError, match=r"Update 1 \(epoch 0\): the loss is not finite"):
        fit([LateGuard()], tiny_batches([8] * 6), FusedNaNLoss())


@pytest.mark.parametrize("bad", [(2, 4), (4, 5)], ids=["apart", "in a row"])
def test_a_late_rewind_ends_as_without_the_bad_windows(bad: tuple[int, int], tmp_path: Path) -> None:
    rewound, _ = fit([LateGuard("rewind"), saving("2 updates")], batches(*bad), Fused(), run_dir=tmp_path)
    expected, _ = fit([], without(*bad), Fused())
    assert_same(rewound, expected)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("bad", [3, 5])
def test_what_is_not_heard_of_yet_is_not_saved(order: int, bad: int, tmp_path: Path) -> None:
    from forge.checkpoint import Checkpoints

    with pytest.raises(NonFiniteError, match=f"Update {bad}"):
        fit([LateGuard(), saving()][::order], batches(bad), Fused(), run_dir=tmp_path)
    newest = Checkpoints(tmp_path / "checkpoints").newest_valid()
    assert newest is not None
    assert newest.update == bad
    assert not (tmp_path / "weights.safetensors").exists()


@pytest.mark.parametrize("ends", [{"max_epochs": 1}, {"max_epochs": None, "max_updates": 6}])
def test_a_bad_last_update_writes_no_weights(ends: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="Update 5"):
        fit([LateGuard()], batches(5, count=6 if ends["max_epochs"] else 9), Fused(), run_dir=tmp_path, **ends)
    assert not (tmp_path / "weights.safetensors").exists()


def test_a_stop_that_comes_first_does_not_hide_a_bad_last_update() -> None:
    @forge.on("boundary")
    def stop(trainer: forge.Trainer) -> None:
        if trainer.progress.update == 4:
            trainer.request_stop("enough")

    with pytest.raises(NonFiniteError, match=r"Update 3 .*It was the run's last update"):
        fit([LateGuard(), stop], batches(3), Fused())


def test_the_optimizer_is_handed_back_as_it_was() -> None:
    optimizers: list[Any] = []

    @forge.on("step_end")
    def keep(step: forge.Step) -> None:
        optimizers.append(step.optimizer)
        assert hasattr(step.optimizer, "found_inf")

    fit([LateGuard(), keep], batches(), Fused())
    assert not hasattr(optimizers[0], "found_inf")


# -- the plugin itself ------------------------------------------------------------------------------------------------


def test_one_object_serves_another_run_after_a_failed_one() -> None:
    guard = Guard("skip", max_skips=1)
    with pytest.raises(NonFiniteError):
        fit([guard], batches(0, 1, 2))
    assert fit([guard], batches(0))[1].updates == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_skips": -1}, r"guard\.max_skips is -1; it must be at least 0"),
        ({"leave_out": 0}, r"guard\.leave_out is 0; it must be at least 1"),
        ({"max_rewinds": 0}, r"guard\.max_rewinds is 0; it must be at least 1"),
        ({"policy": "hope"}, "stop.*skip.*rewind"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Guard(**options)
