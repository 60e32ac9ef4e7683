"""The classic mistakes of PyTorch training: each is refused at the start or at the first batch, by name."""

from __future__ import annotations

import functools
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge_plugins import Accumulate, Schedule
from tests.support.tasks import Classifier, fit, make_batches


def assert_refused(task: Any, message: str, train: Any = None, error: type[Exception] = forge.TaskError) -> None:
    with pytest.raises(error, match=message):
        fit(task, train)


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


def said_by(*args: Any, **options: Any) -> list[str]:
    """What a fit warns of, with the name of the file that each warning is about."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(*args, **options)
    return [f"{Path(each.filename).name}: {each.message}" for each in said]


class TestRegistration:
    def test_a_forgotten_super_init_is_named(self) -> None:
        class Layered(forge.TaskModule):
            def __init__(self) -> None:
                self.layer = nn.Linear(2, 2)

        class Plain(forge.TaskModule):
            def __init__(self) -> None:
                self.size = 3

        for broken in (Layered, Plain):
            with pytest.raises(forge.TaskError, match=rf"{broken.__name__}.__init__ does not call super"):
                broken()

    @pytest.mark.parametrize(
        ("hide", "better"),
        [
            (lambda layer: [layer], "nn.ModuleList"),
            (lambda layer: (layer,), "nn.ModuleList"),
            (lambda layer: {"a": layer}, "nn.ModuleDict"),
            (lambda layer: [[layer]], "nn.ModuleList"),
            (lambda layer: [layer.weight], "nn.ParameterList"),
        ],
    )
    def test_layers_in_a_plain_container_are_named(self, hide: Any, better: str) -> None:
        class Hidden(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = hide(nn.Linear(8, 8))

        assert_refused(Hidden(), rf"Hidden.blocks is a plain .* hides 1 trainable .* Use {better}")

    def test_hidden_layers_are_found_inside_submodules(self) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = [nn.Linear(8, 8)]

        class Outer(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.block = Block()

        assert_refused(Outer(), "Outer.block.parts is a plain list")

    def test_a_list_of_layers_registered_elsewhere_or_frozen_is_fine(self) -> None:
        class Fine(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.shortcuts = [self.net[0]]
                self.teacher = [nn.Linear(2, 2).requires_grad_(False)]
                self.blocks = [nn.Sequential(self.net[0], nn.ReLU())]

        assert fit(Fine()).updates == 4

    def test_layers_passed_to_the_task_are_not_hidden(self) -> None:
        class Transfer(Classifier):
            def __init__(self, backbone: nn.Sequential):
                super().__init__()
                self.net = nn.Sequential(*list(backbone.children())[:-1], nn.Linear(8, 3))

        assert fit(Transfer(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 99)))).updates == 4

    def test_a_tensor_that_should_be_a_parameter_is_warned_of(self) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = torch.ones(3, requires_grad=True)

        class Scaled(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.block = Block()

        (said,) = said_by(Scaled(), max_updates=1)
        assert said.startswith(
            "test_checks.py: Scaled.block.scale is a tensor that requires a gradient, but no nn.Para"
        )
        assert "self.scale = nn.Parameter(...)" in said

    def test_kept_or_registered_tensors_are_not_forgotten(self) -> None:
        class Keeps(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.constant, self.scale = torch.ones(3), nn.Parameter(torch.ones(3))
                self.register_buffer("mean", torch.zeros(3))
                self.normed = nn.utils.weight_norm(nn.Linear(3, 3))

            def training_step(self, batch: Any) -> Any:
                self.last = F.cross_entropy(self.normed(self(batch[0]) * self.scale), batch[1])
                return self.last

        with pytest.warns(FutureWarning, match="weight_norm"):
            task = Keeps()
        assert said_by(task) + said_by(task) == []
        vars(task.normed)["weight"] = torch.ones(3, 3, requires_grad=True)  # as it is after unpickling
        assert said_by(task) == []

    @pytest.mark.parametrize("replaced", [False, True])
    def test_a_parameter_made_in_the_step_is_warned_of(self, replaced: bool) -> None:
        class Late(Classifier):
            def training_step(self, batch: Any) -> Any:
                if replaced:
                    self.net[2].bias = nn.Parameter(torch.zeros(3))
                elif not hasattr(self, "extra"):
                    self.extra = nn.Linear(3, 3)
                return F.cross_entropy(self(batch[0]), batch[1])

        (said,) = said_by(Late(), max_updates=2)
        what = "replaced the parameters net.2.bias" if replaced else "made the parameters extra.weight, extra.bias"
        assert said.startswith(f"test_checks.py: Late.training_step {what}, which no optimizer has")

    def test_lazy_layers_and_late_parameters_are_fine(self) -> None:
        class Lazy(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.LazyLinear(3))

        class Grows(Classifier):
            def training_step(self, batch: Any) -> Any:
                if not hasattr(self, "scale"):
                    assert self.trainer is not None
                    self.scale = nn.Parameter(torch.ones(3))
                    self.trainer.optimizers[None].add_param_group({"params": [self.scale]})
                return F.cross_entropy(self(batch[0]) * self.scale, batch[1])

        assert said_by(Lazy(), max_updates=2) == []
        assert said_by(Grows(), max_updates=2) == []

    def test_a_task_with_nothing_to_train_is_refused(self) -> None:
        class Empty(forge.TaskModule):
            def training_step(self, batch: Any) -> Any: ...
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters())

        assert_refused(Empty(), "Empty has nothing to train: it has no registered parameters")
        assert_refused(Classifier().requires_grad_(False), "nothing to train: all 4 of its parameters")

    def test_an_optimizer_over_another_models_parameters_is_refused(self) -> None:
        class Foreign(Classifier):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(Classifier().parameters())

        assert_refused(Foreign(), "SGD has 4 parameters, but none of them belong to Foreign")

    def test_parameters_in_no_optimizer_are_warned_of(self) -> None:
        class Partial(Classifier):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.net[2].parameters(), lr=0.1)

        task = Partial()
        with pytest.warns(UserWarning, match=r"2 trainable parameters of Partial are in no optimizer.*net.0.weight"):
            fit(task)
        assert task.net[0].weight.grad is None

    def test_a_class_a_plain_module_and_a_missing_method_are_refused(self) -> None:
        assert_refused(Classifier, "pass an instance: Classifier")
        assert_refused(nn.Linear(2, 2), "Linear is no forge.TaskModule")
        mine = type("Mine", (type("LightningModule", (nn.Module,), {}),), {})
        assert_refused(mine(), r"Mine is a LightningModule.*forge\.LightningAdapter")
        assert_refused(mine, r"pass an instance: forge\.LightningAdapter\(Mine\(\)\)")

        class Stepless(forge.TaskModule):
            pass

        assert_refused(Stepless(), r"Stepless defines no training_step")

    def test_validation_without_a_step_is_refused(self) -> None:
        class NoValidation(forge.TaskModule):
            def training_step(self, batch: Any) -> Any:
                raise AssertionError("training began")

        with pytest.raises(forge.TaskError, match="NoValidation defines no validation_step"):
            fit(NoValidation(), val=make_batches())


class TestOptimizers:
    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            (lambda o: None, "returned NoneType. Return an optimizer"),
            (lambda o: [o, o], "returned a list of 2"),
            (lambda o: {"optimizer": o, "lr_scheduler": None}, "Lightning's dict"),
            (lambda o: {}, "a dict without names"),
            (lambda o: (o, 3), "returned int where a schedule belongs"),
        ],
    )
    def test_what_is_no_optimizer_is_refused_with_what_to_return(self, returned: Any, message: str) -> None:
        class Odd(Classifier):
            def configure_optimizers(self) -> Any:
                return returned(torch.optim.SGD(self.parameters()))

        assert_refused(Odd(), message)

    def test_a_schedule_of_another_optimizer_is_refused(self) -> None:
        class Crossed(Classifier):
            def configure_optimizers(self) -> Any:
                ours, other = (torch.optim.SGD(self.parameters()) for _ in range(2))
                return ours, torch.optim.lr_scheduler.StepLR(other, 1)

        assert_refused(Crossed(), "drives another optimizer")

    def test_one_parameter_twice_in_an_optimizer_is_refused(self) -> None:
        class Twice(Classifier):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD([*self.parameters(), *self.net[2].parameters()], lr=0.1)

        with pytest.warns(UserWarning, match="duplicate parameters"):  # torch's own word
            assert_refused(Twice(), "SGD has net.2.weight, net.2.bias more than once")

    def test_a_shared_layer_and_shared_parameters_are_fine(self) -> None:
        class Shared(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.tied = nn.Linear(8, 8)
                self.tied.register_parameter("weight", self.net[0].get_parameter("weight"))

        class Both(Classifier):
            def training_step(self, batch: Any, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
                return F.cross_entropy(self(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return {name: torch.optim.SGD(self.parameters(), lr=0.1) for name in ("a", "b")}

        assert said_by(Shared()) == []
        assert said_by(Both()) == []

    def test_a_schedule_that_was_made_and_not_returned_is_warned_of(self) -> None:
        class Drops(Classifier):
            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                torch.optim.lr_scheduler.StepLR(optimizer, 1)
                return optimizer

        (said,) = said_by(Drops())
        assert said.startswith(
            "test_checks.py: Drops.configure_optimizers made a schedule for SGD and did not return it"
        )

    def test_a_schedule_returned_or_stepped_by_the_task_is_fine(self) -> None:
        class Returns(Classifier):
            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

        class Steps(Classifier):
            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
                return optimizer

            @forge.hookimpl
            def forge_step_end(self) -> None:
                self.schedule.step()

        class Keeps(Classifier):
            optimizer: Any = None

            def configure_optimizers(self) -> Any:
                self.optimizer = self.optimizer or torch.optim.SGD(self.parameters(), lr=0.1)
                return self.optimizer

        assert said_by(Returns()) + said_by(Steps()) == []
        kept = Keeps()
        assert said_by(kept, plugins=[Schedule("cosine")]) == []
        assert all("[learning_rate_low]" in said for said in said_by(kept))  # the schedule has left it at 0

    @pytest.mark.parametrize(
        ("total", "when", "message"),
        [
            (
                3,
                (),
                r"OneCycleLR of SGD has total_steps=3, but this run steps it 8 times.*self\.trainer\.planned_updates",
            ),
            (3, ("2 updates",), r"steps it 4 times \(once every 2 updates\).*Write total_steps=4"),
            (1, ("1 epoch",), r"steps it 2 times \(once every 1 epoch\)"),
            (8, (), None),
            (4, ("2 updates",), None),
            (2, ("1 epoch",), None),
        ],
    )
    def test_a_one_cycle_that_ends_before_the_run_is_refused(self, total: int, when: Any, message: str | None) -> None:
        class Cycles(Classifier):
            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
                return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total), *when

        if message is None:
            assert fit(Cycles(), max_epochs=2).updates == 8
        else:
            with pytest.raises(forge.TaskError, match=message):
                fit(Cycles(), max_epochs=2)

    def test_how_often_a_schedule_steps_is_not_guessed(self) -> None:
        class Grows(forge.Plugin):
            @forge.hookimpl
            def forge_plan_step(self, trainer: forge.Trainer) -> int:
                return 1 + trainer.progress.update

        class Cycles(Classifier):
            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
                return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 3)

        assert fit(Cycles(), make_batches(6), plugins=[Grows()]).updates == 3


class TestSignatures:
    @pytest.mark.parametrize(
        ("verb", "method"),
        [
            ("validate", "validation_step"),
            ("test", "test_step"),
            ("test", "validation_step"),
            ("predict", "predict_step"),
        ],
    )
    def test_a_step_that_wants_an_index_is_refused_at_the_start(self, verb: str, method: str) -> None:
        def step(self: Any, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("it was called")

        task = type("Indexed", (Classifier,), {method: step})()
        trainer = forge.Trainer(max_epochs=1, plugins=[], run_dir=False)
        with pytest.raises(
            forge.TaskError, match=rf"test_checks.py:\d+: Indexed.{method}\(batch, batch_idx\).*Drop batch"
        ):
            getattr(trainer, verb)(task, make_batches())

    def test_training_and_validation_are_looked_at_before_the_fit(self) -> None:
        def step(self: Any, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("it was called")

        training = type("Indexed", (Classifier,), {"training_step": step})()
        assert_refused(
            training, r"Indexed.training_step\(batch, batch_idx\).*the batch alone.*step\.index.*LightningAdapter"
        )
        validating = type("Indexed", (Classifier,), {"validation_step": step})()
        with pytest.raises(
            forge.TaskError, match=r"Indexed.validation_step\(batch, batch_idx\).*self\.trainer\.evaluated"
        ):
            fit(validating, val=make_batches())

    def test_a_name_goes_with_a_dict_of_optimizers(self) -> None:
        class Named(Classifier):
            def training_step(self, batch: Any, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
                raise AssertionError("it was called")

        class Unnamed(Classifier):
            def configure_optimizers(self) -> Any:
                return {"a": torch.optim.SGD(self.parameters(), lr=0.1)}

        assert_refused(Named(), "returned one optimizer, so it passes the batch alone. Drop name, or return a dict")
        assert_refused(Unnamed(), r"returned a dict, so it is called with \(batch, name\)")

    def test_defaults_varargs_and_decorators_are_fine(self) -> None:
        def wrapped(function: Any) -> Any:
            @functools.wraps(function)
            def call(self: Any, batch: Any) -> Any:
                return function(self, batch, 0)

            return call

        class Default(Classifier):
            def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
                return super().training_step(batch)

        class Star(Classifier):
            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                return super().training_step(*args)

        class Decorated(Classifier):
            @wrapped
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return Classifier.training_step(self, batch)

            validation_step = training_step

        for task in (Default(), Star(), Decorated()):
            assert fit(task, val=make_batches(1), max_updates=1).updates == 1


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
        assert_refused(with_loss(lambda t, x, y: F.cross_entropy(t(x), y + 5)), r"test_checks.py:\d+: cross_entropy")

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
        assert first.startswith("test_checks.py: nll_loss got positive scores")
        assert second.startswith("test_checks.py: mse_loss got predictions")

    def test_probabilities_into_a_loss_with_logits_are_warned_of(self) -> None:
        def loss(task: Any, x: Any, y: Any) -> Any:
            return F.binary_cross_entropy_with_logits(task(x).sigmoid(), F.one_hot(y, 3).float())

        with pytest.warns(UserWarning, match="if there is a sigmoid before it, remove it"):
            fit(with_loss(loss), make_batches(1, size=8))

    def test_positive_scores_into_nll_loss_are_warned_of(self) -> None:
        with pytest.warns(UserWarning, match="if these are logits, use cross_entropy"):
            fit(with_loss(lambda t, x, y: F.nll_loss(t(x).exp(), y)), max_updates=1)

    def test_a_number_as_target_a_constant_head_and_vmap_are_fine(self) -> None:
        def loss(task: Any, x: Any, y: Any) -> Any:
            constant = torch.full((4, 2), 0.5) + task(x)[:, :2] * 0
            each = torch.func.vmap(lambda row, label: F.cross_entropy(row, label))(task(x), y)
            return F.mse_loss(task(x), torch.tensor(1.0)) + F.cross_entropy(constant, y.clamp(max=1)) + each.mean()

        assert fit(with_loss(loss), max_updates=1).updates == 1

    @pytest.mark.slow
    def test_a_compiled_module_sees_the_first_batch_unwatched(self) -> None:
        class Compiled(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.fast = torch.compile(self.net, backend="eager", fullgraph=True)

            def forward(self, x: Any) -> Any:
                return self.fast(x)

        assert fit(Compiled(), max_updates=2).updates == 2

    def test_a_step_that_goes_wrong_on_a_later_batch_is_named_too(self) -> None:
        class Later(Classifier):
            def training_step(self, batch: Any) -> Any:
                good = self.trainer is not None and self.trainer.progress.update < 2
                return super().training_step(batch) if good else None

        assert_refused(Later(), "Later.training_step returned None: is its `return` missing")

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

    def test_what_cannot_be_iterated_is_refused(self) -> None:
        assert_refused(None, "train got a int, which cannot be iterated", 3, forge.DataError)

    def test_a_dict_of_training_loaders_is_refused(self) -> None:
        assert_refused(None, "training takes one loader", {"a": make_batches()}, forge.DataError)

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

    def test_a_batch_whose_size_nobody_knows_names_num_items(self) -> None:
        assert_refused(None, r"Define num_items\(self, batch\) on Classifier", ["text"], forge.DataError)
