"""The classic mistakes in losses and data: each is refused at the first batch, by name."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge_plugins import Accumulate
from tests.support.checks_kit import assert_refused, said_by
from tests.support.tasks import Classifier, fit, make_batches


def with_loss(loss: Any) -> forge.TaskModule:
    """A Classifier whose training_step is `loss(task, x, y)`."""

    class Custom(Classifier):
        def training_step(self, batch: Any) -> Any:
            return loss(self, *batch)

    return Custom()


def padded(labels: Any) -> Any:
    return labels.index_fill(0, torch.tensor([0]), -1)


def gaussian(mean: Any, target: Any) -> Any:
    return F.gaussian_nll_loss(mean, target, torch.ones_like(mean))


class TestLoss:
    @pytest.mark.parametrize(
        ("loss", "message"),
        [
            (lambda t, x, y: None, "is its `return` missing"),
            (lambda t, x, y: {"accuracy": 1.0}, "a dict without 'loss'"),
            (lambda t, x, y: F.cross_entropy(t(x), y).item(), "returned .*Return the loss"),
            (lambda t, x, y: {"loss": F.cross_entropy(t(x), y).item()}, "a loss of type float"),
            (lambda t, x, y: F.cross_entropy(t(x), y, reduction="none"), r"a loss of shape \(4,\)"),
            (lambda t, x, y: F.cross_entropy(t(x), y).detach(), "a loss without a gradient"),
            (lambda t, x, y: {"loss": F.cross_entropy(t(x), y), "p": t(x)}, r"metric 'p' with shape \(4, 3\)"),
            (lambda t, x, y: {"loss": F.cross_entropy(t(x), y), "p": "high"}, "returned str for the metric 'p'"),
        ],
    )
    def test_a_loss_that_cannot_train_is_refused_at_the_first_batch(self, loss: Any, message: str) -> None:
        assert_refused(with_loss(loss), message)

    @pytest.mark.parametrize(
        ("loss", "message"),
        [
            (lambda t, x, y: F.cross_entropy(t(x), y + 5), r"labels from \d to \d, but the model has 3 outputs"),
            (lambda t, x, y: F.cross_entropy(t(x), y - 9), r"labels from -\d to -\d.*Renumber them from 0\.$"),
            (
                lambda t, x, y: F.cross_entropy(t(x), padded(y)),
                r"labels from -1 to .* pass ignore_index=-1; else renumber",
            ),
            (lambda t, x, y: F.cross_entropy(t(x), y.float()), "labels of type float32.*y.long"),
            (lambda t, x, y: F.cross_entropy(t(x), y.int()), "labels of type int32.*y.long"),
            (lambda t, x, y: F.cross_entropy(t(x), F.one_hot(y, 3)), "one-hot labels of type int64.*argmax"),
            (lambda t, x, y: F.cross_entropy(t(x), y[:, None]), r"labels must have shape \(4,\)"),
            (lambda t, x, y: F.cross_entropy(t(x).softmax(1), y), "applies softmax itself.*remove the softmax"),
            (lambda t, x, y: nn.CrossEntropyLoss()(t(x).softmax(1), y), "applies softmax itself"),
            (lambda t, x, y: F.mse_loss(t(x)[:, :1], y.float()), "broadcasting would compare everything"),
            (lambda t, x, y: F.mse_loss(t(x)[:, 0], y.float()[:, None]), "everything.*y.view_as"),
            (lambda t, x, y: F.mse_loss(t(x)[:, None, :, None], torch.ones(4, 1, 3)), "one shape.*y.unsqueeze.-1"),
            (lambda t, x, y: F.mse_loss(t(x), torch.ones(4, 2)), "they must have one shape"),
            (
                lambda t, x, y: gaussian(t(x)[:, :1], y.float()),
                r"gaussian_nll_loss got .*\(4, 1\) and .*\(4,\): broadcast",
            ),
            (
                lambda t, x, y: F.kl_div(t(x).softmax(1), F.one_hot(y, 3).float()),
                "kl_div got probabilities.*log_softmax",
            ),
            (lambda t, x, y: F.kl_div(t(x).softmax(1)[None], torch.ones(1, 4, 3)), "kl_div got probabilities"),
            (lambda t, x, y: F.binary_cross_entropy_with_logits(t(x), torch.ones(1)), r"y\.expand_as\(prediction\)"),
            (lambda t, x, y: F.binary_cross_entropy_with_logits(t(x)[:, 0], y), "it wants floats"),
            (lambda t, x, y: F.binary_cross_entropy(t(x)[:, 0] + 5, (y > 1).float()), "_with_logits on the raw"),
            (lambda t, x, y: F.binary_cross_entropy_with_logits(t(x)[:, 0], y.float() + 3), r"they lie in \[0, 1\]"),
        ],
    )
    def test_labels_and_scores_that_the_loss_cannot_mean_are_refused(self, loss: Any, message: str) -> None:
        assert_refused(with_loss(loss), message)

    def test_the_message_points_at_the_users_line(self) -> None:
        assert_refused(
            with_loss(lambda t, x, y: F.cross_entropy(t(x), y + 5)), r"test_loss_checks.py:\d+: cross_entropy"
        )

    def test_right_uses_of_the_same_losses_pass(self) -> None:
        def every_loss(task: Any, x: Any, y: Any) -> Any:
            logits = task(x)
            ignored = y.clone()
            ignored[0] = -100
            return (
                F.cross_entropy(logits, y)
                + F.cross_entropy(logits, ignored)
                + F.cross_entropy(logits, F.one_hot(y, 3).float())
                + F.cross_entropy(logits[0], y[0])
                + F.cross_entropy(logits.T[None], torch.zeros(1, 4, dtype=torch.long))
                + F.nll_loss(logits.log_softmax(1), y)
                + F.mse_loss(logits[:, 0], y.float())
                + F.mse_loss(logits, torch.ones(1)).detach()
                + F.cross_entropy(logits, padded(y), ignore_index=-1)
                + gaussian(logits[:, :1], y.float()[:, None])
                + F.kl_div(logits.log_softmax(1), logits.softmax(1), reduction="batchmean")
                + F.kl_div(logits.log_softmax(1), logits.log_softmax(1), reduction="sum", log_target=True)
                + F.binary_cross_entropy_with_logits(logits[:, 0] * 9, (y > 1).float())
            )

        assert said_by(with_loss(every_loss), max_updates=1) == []

    @pytest.mark.parametrize("target", [torch.ones(1, 3), torch.ones(3), torch.ones(4, 1)])
    def test_a_target_that_is_repeated_may_be_meant_and_is_warned_of(self, target: Any) -> None:
        said = said_by(with_loss(lambda t, x, y: F.mse_loss(t(x), target)), max_updates=1)
        assert len(said) == 1
        assert "the targets are repeated to fit. If that is intended, write target.expand_as(prediction)" in said[0]
        meant = said_by(with_loss(lambda t, x, y: F.mse_loss(t(x), target.expand(4, 3))), max_updates=1)
        assert meant == []

    def test_a_warning_points_at_the_users_line(self) -> None:
        def loss(task: Any, x: Any, y: Any) -> Any:
            return F.nll_loss(task(x).exp(), y) + F.mse_loss(task(x), torch.ones(1, 3))

        first, second = said_by(with_loss(loss), max_updates=1)
        assert first.startswith("test_loss_checks.py: nll_loss got positive scores")
        assert second.startswith("test_loss_checks.py: mse_loss got predictions")

    def test_probabilities_into_a_loss_with_logits_are_warned_of(self) -> None:
        def loss(task: Any, x: Any, y: Any) -> Any:
            return F.binary_cross_entropy_with_logits(task(x).sigmoid(), F.one_hot(y, 3).float())

        with pytest.warns(UserWarning, match="if there is a sigmoid before it, remove it"):
            fit(with_loss(loss), make_batches(1, size=8))

    def test_what_a_layer_gives_is_no_activation_wherever_it_lies(self) -> None:
        def loss(task: Any, x: Any, y: Any) -> Any:
            return F.binary_cross_entropy_with_logits(task(1e-3 * x)[:, 0], (y > 1).float())

        task: Any = with_loss(loss)
        task.net[2].bias.data.fill_(0.5)
        assert said_by(task, make_batches(1, size=16)) == []
        task.net[2] = torch.nn.Linear(8, 3, bias=False)
        task.net[2].weight.data.abs_()
        assert said_by(task, make_batches(1, size=16)) == []

    def test_a_number_as_target_a_constant_head_and_vmap_are_fine(self) -> None:
        def loss(task: Any, x: Any, y: Any) -> Any:
            constant = torch.full((4, 2), 0.5) + task(x)[:, :2] * 0
            each = torch.func.vmap(lambda row, label: F.cross_entropy(row, label))(task(x), y)
            return F.mse_loss(task(x), torch.tensor(1.0)) + F.cross_entropy(constant, y.clamp(max=1)) + each.mean()

        assert fit(with_loss(loss), max_updates=1).updates == 1

    def test_a_validation_batch_is_checked_too(self) -> None:
        class Validates(Classifier):
            def validation_step(self, batch: Any) -> Any:
                return F.cross_entropy(self(batch[0]).softmax(1), batch[1])

        with pytest.raises(forge.TaskError, match="applies softmax itself"):
            fit(Validates(), val=make_batches(1))

    def test_a_task_can_switch_the_look_at_its_losses_off(self) -> None:
        class Sure(Classifier):
            check_first_batch = False

            def training_step(self, batch: Any) -> Any:
                return F.cross_entropy(self(batch[0]).softmax(1), batch[1])

        assert fit(Sure(), max_updates=1).updates == 1

    def test_a_run_without_mistakes_warns_of_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fit(val=make_batches(1))
        assert [str(each.message) for each in said] == []
        assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []


class TestData:
    def test_a_bare_dataset_is_refused_with_the_loader_to_use(self) -> None:
        dataset = torch.utils.data.TensorDataset(torch.zeros(4, 8))
        assert_refused(
            None, r"forge.data.Loader\(tensordataset, batch_size=\.\.\., shuffle=True\)", dataset, forge.DataError
        )

    def test_an_empty_loader_is_refused(self) -> None:
        assert_refused(None, "The train loader is empty", [], forge.DataError)

    def test_persistent_workers_cannot_train_and_validate_at_once(self) -> None:
        data = torch.utils.data.TensorDataset(torch.randn(8, 8), torch.zeros(8, dtype=torch.long))
        loader = forge.data.Loader(data, 2, num_workers=1)
        with pytest.raises(forge.DataError, match="Make a loader for each"):
            fit(train=loader, val=loader)

    def test_windows_and_weights_that_hold_nothing_are_refused(self) -> None:
        class Nothing(forge.Plugin):
            @forge.hookimpl
            def forge_plan_step(self, trainer: forge.Trainer) -> int:
                return 1 - trainer.progress.update

        class Weightless(Classifier):
            def num_items(self, batch: Any) -> int:
                return 0

        with pytest.raises(forge.DataError, match="a window of 0 micro-batches"):
            fit(plugins=[Nothing()])
        with pytest.raises(forge.DataError, match="nothing to average"):
            fit(Weightless(), plugins=[Accumulate(2)])
