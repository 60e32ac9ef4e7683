"""Each probe names its mistake, and says nothing about a healthy neighbour."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

from forge_doctor.experiments import equivariance, influence, motion, stages, values
from forge_doctor.findings import FINDINGS, LEVELS
from forge_doctor.probes import aliases, class_labels, data, graph, measures, start
from tests.support.patients import Healthy, Keeps, found, loader, numbers, said, splits, task_with


def test_every_finding_has_a_level_and_a_cure() -> None:
    assert all(level in LEVELS and cure.endswith(".") for level, cure in FINDINGS.values())


# -- the graph --------------------------------------------------------------------------------------------------------


class Holder:
    """No module."""

    def __init__(self) -> None:
        self.layer = nn.Linear(8, 8)


class HiddenLayer(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.holder.layer(x))


class Cut(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.backbone(x)
        return self.net(h)


class Frozen(Cut):
    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)


class Idle(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)


class Half(Healthy):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[2].parameters())


REACH = {
    "unregistered_parameters": HiddenLayer,
    "no_gradient": Cut,
    "not_in_optimizer": Half,
    "unused_parameters": Idle,
}


@pytest.mark.parametrize("name", REACH)
@pytest.mark.filterwarnings("ignore")
def test_what_the_loss_reaches(name: str) -> None:
    assert name in found(REACH[name](), graph.reach)


def test_a_frozen_backbone_is_meant() -> None:
    assert found(Frozen(), graph.reach) == {}


class Noisy(Healthy):
    def training_step(self, batch: Any) -> Any:
        x, y = batch
        x += 0.1
        return self.loss(self(x), y)


class Sleeps(Healthy):
    def validation_step(self, batch: Any) -> Any:
        self.net.train()
        return super().validation_step(batch)


@pytest.mark.parametrize(("task", "name"), [(Noisy, "batch_changed"), (Sleeps, "mode_changed")])
def test_what_a_step_changes(task: type[Healthy], name: str) -> None:
    assert name in found(task(), graph.purity)


class WithDropout(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


class ValidatesAwake(WithDropout):
    """Leaves no trace: the modes are put back."""

    def validation_step(self, batch: Any) -> Any:
        self.net.train()
        result = super().validation_step(batch)
        self.net.eval()
        return result


def test_validation_in_train_mode() -> None:
    probes = graph.validation_modes, graph.purity, stages.drawn
    assert set(found(ValidatesAwake(), *probes)) == {"validated_in_train_mode"}
    assert "validated_in_train_mode" in said(ValidatesAwake())
    assert found(WithDropout(), *probes) == {}


class Backward(Healthy):
    def training_step(self, batch: Any) -> Any:
        super().training_step(batch).backward()
        return super().training_step(batch)


def test_a_step_that_calls_backward() -> None:
    assert "backward_in_step" in found(Backward(), graph.purity)


class Square(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return Square.factor * x * gradients[0]


class Squares(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(Square.apply(self.net[0](x)[:, :8]))


@pytest.mark.parametrize("factor", [2.0, 1.0])
def test_a_wrong_backward_is_found(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Square, "factor", factor)
    assert set(found(Squares(), influence.weights)) == (set() if factor == 2 else {"gradient_is_cut"})


# -- independence -----------------------------------------------------------------------------------------------------


class OverTheBatch(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - x.mean(0)) / (x.std(0) + 1e-5))


class Normalised(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(8), *self.net)


@pytest.mark.parametrize(("task", "names"), [(OverTheBatch, {"batch_dependence"}), (Normalised, set())])
def test_samples_are_independent(task: type[Healthy], names: set[str]) -> None:
    assert set(found(task(), equivariance.samples)) == names


class AlwaysDrops(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.dropout(x, 0.3))


def test_dropout_in_evaluation() -> None:
    assert found(AlwaysDrops(), stages.drawn)["random_evaluation"].level == "warning"


# -- data -------------------------------------------------------------------------------------------------------------


class Draws(Healthy):
    """Draws in evaluation what it draws in training."""

    draws_in_training = True

    def forward(self, x: Tensor) -> Tensor:
        is_noisy = self.draws_in_training or not self.training
        return self.net(x + torch.randn_like(x) if is_noisy else x)


class DrawsInEvaluation(Draws):
    draws_in_training = False


@pytest.mark.parametrize(("task", "names"), [(Draws, set()), (DrawsInEvaluation, {"random_evaluation"})])
def test_what_draws_in_training_too_is_meant_to_draw(task: type[Healthy], names: set[str]) -> None:
    assert set(found(task(), stages.drawn)) == names


class Repeats(Healthy):
    """Learns its inputs by themselves; the second tensor of a batch is for others."""

    def training_step(self, batch: Any) -> Any:
        return (self.net(batch[0])[:, 0] - batch[0][:, 0]).square().mean()

    validation_step = training_step


class Masked(Repeats):
    """Has a mask beside its inputs, which it forgets."""

    def training_step(self, batch: Any) -> Any:
        return (self.net(batch[0])[:, 0] - batch[1]).square().mean()

    validation_step = training_step


def test_labels_of_a_model_that_learns_from_its_input_alone_are_left() -> None:
    x, y = numbers()
    assert "tensor_ignored" not in found(Repeats(), influence.inputs, after=2)
    data = loader(x, x[:, 1], (y > 1).long())
    assert "tensor_ignored" in found(Masked(), influence.inputs, data=(data, None), after=2)


def test_an_eps_that_is_nothing_in_the_type_of_the_weights_is_the_cause() -> None:
    said_of = found(Healthy().half(), start.optimizer, motion.losses, data=(loader(*halves()), None))
    assert "-p amp" in said_of["optimizer_options"].cure
    assert found(Healthy(), start.optimizer) == {}


def halves() -> tuple[Tensor, Tensor]:
    x, y = numbers()
    return x.half(), y


def test_copies_and_leaks_are_found() -> None:
    x, y = numbers()
    assert "val_is_train" in found(Healthy(), data.copies, data=(loader(x, y), loader(x[:48], y[:48])))
    assert "leakage" in found(Healthy(), data.copies, data=(loader(x, y), loader(*mixed(x, y))))
    assert "duplicates" in found(Healthy(), data.copies, data=(loader(x[:4].repeat(40, 1), y[:4].repeat(40)), None))
    assert found(Healthy(), data.copies) == {}


def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    other, labels = numbers(40, seed=9)
    return torch.cat([x[:8], other]), torch.cat([y[:8], labels])


def test_scales_are_judged() -> None:
    x, y = numbers()
    assert "constant_input" in found(Healthy(), data.scales, data=(loader(torch.ones_like(x), y), None))
    regression = task_with(lambda s, y: F.mse_loss(s[:, 0], 1e5 + 1e4 * y.float()))
    assert "target_scale" in found(regression, data.targets)


def test_labels_are_judged() -> None:
    x, y = numbers(400)
    order = y.argsort()
    assert "not_shuffled" in found(
        Healthy(), class_labels.labels, data=(loader(x[order], y[order], shuffle=False), None)
    )
    prices = (x[:, 0] + 0.1 * x[:, 1])[:, None]
    order = prices[:, 0].argsort()
    task = task_with(lambda s, y: (s[:, :1] - y).pow(2).mean())
    in_order = loader(x[order], prices[order], shuffle=False)
    assert "not_shuffled" in found(task, values.order, data=(in_order, None))
    assert not found(task, values.order, data=(loader(x[order], prices[order]), None))
    assert found(task, values.order, data=(loader(x, prices, shuffle=False), None))["not_shuffled"].level == "note"
    rare = torch.where(torch.arange(400) % 50 == 0, 1, 0)
    assert "imbalance" in found(Healthy(), class_labels.labels, data=(loader(x, rare), None))
    five = Healthy()
    five.net[2] = nn.Linear(16, 5)
    assert "missing_class" in found(five, class_labels.labels, data=(loader(x, y + 1), None))


def test_what_drop_last_drops() -> None:
    x, y = numbers(100)
    assert "dropped_data" in found(Healthy(), data.dropped, data=(loader(x, y, batch=60, drop_last=True), None))
    assert found(Healthy(), data.dropped, data=(loader(x, y, batch=16, drop_last=True), None)) == {}


def test_val_that_was_prepared_otherwise() -> None:
    x, y = numbers(48, seed=5)
    assert "split_statistics" in found(Healthy(), data.splits, data=(splits()[0], loader(x * 5, y)))
    broken = x.clone()
    broken[3] = float("nan")  # says nothing about how the others were prepared
    assert found(Healthy(), data.splits, data=(splits()[0], loader(broken, y))) == {}


# -- start and motion -------------------------------------------------------------------------------------------------


class Scheduled(Healthy):
    make: Any = None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return optimizer, type(self).make(optimizer)


SCHEDULES = {
    "schedule_zero": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: n // 50),
    "schedule_spent": lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.1),
    "schedule_rises": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "schedule_still": lambda o: torch.optim.lr_scheduler.StepLR(o, 10_000, 0.1),
    "": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 100),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_rehearsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduled, "make", staticmethod(SCHEDULES[name]))
    assert set(found(Scheduled(), start.schedules)) == ({name} - {""})


def changed(**options: Any) -> Healthy:
    task = Healthy()
    task.configure_optimizers = lambda: torch.optim.Adam(task.parameters(), **options)  # pyright: ignore[reportAttributeAccessIssue]
    return task


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"betas": (0.999, 0.9)}, "optimizer_options"),
        ({"eps": 1.0}, "optimizer_options"),
    ],
)
def test_options_of_the_optimizer(options: dict[str, Any], name: str) -> None:
    assert name in found(changed(**options), start.optimizer)


@pytest.mark.parametrize(("lr", "name"), [(3.0, "learning_rate_high"), (1e-10, "learning_rate_low")])
def test_the_size_of_updates(lr: float, name: str) -> None:
    assert name in found(changed(lr=lr), motion.rates, after=4)


def test_layers_that_do_nothing() -> None:
    task = Healthy()
    task.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.95), nn.BatchNorm1d(16, momentum=0.0), nn.Linear(16, 4))
    assert set(found(task, start.layers)) == {"dropout_rate", "batch_norm_momentum"}
    for momentum, names in ((0.99, {"batch_norm_momentum"}), (0.1, set())):
        task.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=momentum), nn.Linear(16, 4))
        assert set(found(task, start.layers)) == names


def test_weights_that_start_wrong() -> None:
    task = Healthy()
    for p in task.parameters():
        nn.init.constant_(p, 0.1)
    assert "equal_rows" in found(task, start.equal_rows, after=3)
    dead = Healthy()
    nn.init.constant_(dead.net[0].bias, -50.0)  # pyright: ignore[reportArgumentType]
    assert "dead_units" in found(dead, start.activations)


def test_units_that_are_saturated() -> None:
    task = Healthy()
    task.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    assert found(task, start.activations) == {}
    nn.init.normal_(task.net[0].weight, std=50.0)  # pyright: ignore[reportArgumentType]
    assert "saturated" in found(task, start.activations)


def test_gradients_that_vanish() -> None:
    deep = Healthy()
    deep.net = nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(8, 8), nn.Sigmoid())), nn.Linear(8, 4))
    assert "vanishing_gradient" in found(deep, motion.gradients, after=2)


class Misnamed(Healthy):
    def evaluation_ends(self, stage: str) -> dict[str, Any]:
        return {}

    def on_train_epoch_end(self) -> None: ...


def test_methods_with_nearly_the_right_name() -> None:
    messages = [finding.message for finding in start.methods(SimpleNamespace(task=Misnamed()))]  # pyright: ignore[reportArgumentType]
    assert messages[0] == "forge never calls Misnamed.evaluation_ends: did you mean evaluation_end?"
    assert len(messages) == 1


def test_losses_that_are_kept_with_their_graphs() -> None:
    assert "memory_grows" in found(Keeps(), motion.losses, after=12)
    assert found(Healthy(), motion.losses, after=12) == {}


class Misspelt(Healthy):
    def __init__(self) -> None:
        super().__init__()
        for p in self.net[0].parameters():
            p.require_grad = False  # pyright: ignore[reportAttributeAccessIssue]


class Tied(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.tie()

    def tie(self) -> None:
        self.net[2].weight = self.net[0].weight


class TiedByData(Tied):
    def tie(self) -> None:
        self.net[2].get_parameter("weight").data = self.net[0].get_parameter("weight").data


class Scales(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - 130) / 100)


def test_inputs_that_the_model_scales_itself() -> None:
    x, y = numbers()
    assert "unscaled_inputs" in found(Healthy(), data.scales, data=(loader(100 * x + 130, y), None))
    assert found(Scales(), data.scales, data=(loader(100 * x + 130, y), None)) == {}


@pytest.mark.parametrize(
    ("finding", "sick", "probe", "healthy"),
    [
        ("attribute_name", Misspelt, aliases.attributes, Healthy),
        ("shared_storage", TiedByData, aliases.shared_storage, Tied),
    ],
)
def test_a_mistake_is_found_and_what_is_right_is_left_in_peace(
    finding: str, sick: Any, probe: Any, healthy: Any
) -> None:
    assert finding in found(sick(), probe)
    assert found(healthy(), probe) == {}


class Layered(Healthy):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers, nn.Linear(8, 4))


def test_one_module_several_times() -> None:
    act = nn.ReLU()
    assert "repeated_module" in found(Layered([nn.Linear(8, 8)] * 3), aliases.repeated)
    assert found(Layered([nn.Linear(8, 8), act, nn.Linear(8, 8), act]), aliases.repeated) == {}


class Plateau(Healthy):
    monitor = "val/loss"

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return optimizer, ReduceLROnPlateau(optimizer, mode=self.mode), self.monitor


class ByAccuracy(Plateau):
    monitor = "val/accuracy"


def test_a_plateau_of_the_wrong_direction() -> None:
    assert "wrong_mode" in found(Plateau("max"), measures.modes)
    assert "wrong_mode" in found(ByAccuracy("min"), measures.modes)
    assert found(Plateau("min"), measures.modes) == found(ByAccuracy("max"), measures.modes) == {}


@pytest.mark.parametrize(("mode", "wrong"), [("max", 1), ("min", 0), (None, 0)])
def test_a_plugin_of_the_wrong_direction(mode: Any, wrong: int) -> None:
    best = {"monitor": "val/loss", "mode": mode}
    plugin = SimpleNamespace(name="checkpoint", config={"best": best, "keep": 2})
    patient: Any = SimpleNamespace(plugins=[plugin], trainer=SimpleNamespace(optimizers=SimpleNamespace(entries={})))
    assert [finding.where for finding in measures.modes(patient)] == ["checkpoint.best"] * wrong
