"""The classic mistakes of PyTorch training: each is refused at the start or at the first batch, by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge_plugins import Schedule
from tests.support.checks_kit import assert_refused, said_by
from tests.support.tasks import Classifier, fit, make_batches


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
