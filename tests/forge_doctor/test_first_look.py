"""Every fit looks at its first steps: what it finds, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import forge
from forge_doctor import first_look
from forge_doctor.first_look import LOOKS, FirstLook, samples
from tests.support.patients import Healthy, loader, numbers, said, splits


def made(kind: Callable[[], forge.TaskModule]) -> Any:
    torch.manual_seed(3)
    return kind()


class Relu(Healthy):
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores.relu(), y)


class Fast(Healthy):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3.0)


class Unused(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)


class OverTheBatchInEvaluation(Healthy):
    def validation_step(self, batch: Any) -> Any:
        return {"accuracy": (self(batch[0]).argmax(0)[:1] == batch[1][:1]).float().mean()}


class Misspelt(Healthy):
    def evaluation_ends(self, stage: str) -> dict[str, float]:
        return {}


PLANTED: dict[type[forge.TaskModule], str] = {
    Relu: "relu_before_loss",
    Fast: "learning_rate_high",
    Unused: "unused_parameters",
    OverTheBatchInEvaluation: "wrong_dimension",
    Misspelt: "method_name",
}


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.__name__)
def test_a_planted_bug_is_named(kind: type[forge.TaskModule]) -> None:
    assert PLANTED[kind] in said(made(kind))


def test_a_healthy_task_is_left_in_peace() -> None:
    assert said(made(Healthy)) == []


@pytest.mark.parametrize("kind", [Relu, Unused], ids=lambda kind: kind.__name__)
def test_what_is_expected_is_not_said(kind: type[forge.TaskModule]) -> None:
    task = made(kind)
    type(task).expected = {PLANTED[kind]}
    try:
        assert said(task) == []
    finally:
        del type(task).expected


def test_a_finding_is_said_once() -> None:
    assert said(made(Relu), max_epochs=3).count("relu_before_loss") == 1


def test_sorted_labels_and_copies_in_memory_are_named() -> None:
    x, y = numbers(400)
    order = y.argsort()
    assert "not_shuffled" in said(made(Healthy), loader(x[order], y[order], shuffle=False))
    assert "val_is_train" in said(made(Healthy), loader(x, y), loader(x, y, shuffle=False))


def test_the_samples_of_the_next_epoch_are_no_copies() -> None:
    batches = [numbers(16, seed=at) for at in range(2)]
    assert "duplicates" not in said(made(Healthy), batches, max_epochs=6)
    few = [(x[:4].repeat(4, 1), y[:4].repeat(4)) for x, y in batches[:1]]
    assert "duplicates" in said(made(Healthy), few * 6, max_epochs=1)


class Trainig(Healthy):
    training_step = forge.TaskModule.training_step

    def trainig_step(self, batch: Any) -> Any:
        return self.loss(self(batch[0]), batch[1])


def test_a_step_that_is_nearly_there_is_refused_by_name() -> None:
    with pytest.raises(forge.ForgeError, match=r"no training_step, but trainig_step.*Rename it"):
        said(made(Trainig))


def test_a_validation_after_the_end_is_named() -> None:
    assert "never_validates" in said(made(Healthy), validate_every="30 updates")
    assert "never_validates" in said(made(Healthy), validate_every="3 epochs", max_epochs=2)
    assert said(made(Healthy), validate_every="10 updates") == []


class Counted(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.steps = [0, 0]
        self.generator = torch.Generator().manual_seed(0)

    def training_step(self, batch: Any) -> Any:
        self.steps[0] += 1
        noise = torch.randn(batch[0].shape, generator=self.generator) + torch.randn(batch[0].shape)
        return super().training_step([batch[0] + 0.1 * noise, batch[1]])

    def validation_step(self, batch: Any) -> Any:
        self.steps[1] += 1
        return super().validation_step(batch)


class Quiet(Counted):
    check_first_batch = False


def test_no_step_runs_for_it_and_the_bits_stay() -> None:
    tasks = made(Counted), made(Quiet)
    for task in tasks:
        said(task, max_epochs=2)
    assert tasks[0].steps == tasks[1].steps == [20, 6]
    pairs = zip(tasks[0].state_dict().values(), tasks[1].state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


class Dead(Healthy):
    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.net[0].bias, -100.0)  # pyright: ignore[reportArgumentType]


class Deep(Healthy):
    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(12) for layer in (nn.Linear(8, 8), nn.Sigmoid())]
        for layer in layers[::2]:
            nn.init.normal_(layer.weight, std=0.02)  # pyright: ignore[reportArgumentType]
        self.net = nn.Sequential(*layers, nn.Linear(8, 4))


def test_what_layers_are_given_and_give_is_seen_in_the_fits_own_steps() -> None:
    x, y = numbers()
    assert "dead_units" in said(made(Dead))
    assert "unscaled_inputs" in said(made(Healthy), loader(100 * x, y))
    assert "vanishing_gradient" in said(made(Deep))


class Ticking:
    """A schedule's function, which counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0


class Scheduled(Healthy):
    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.factor = factor

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.factor is None:
            return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.01)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)


def test_a_schedule_is_rehearsed_where_that_calls_nothing_of_the_users() -> None:
    assert "schedule_spent" in said(made(lambda: Scheduled(None)))
    calls = Ticking(), Ticking()
    said(made(lambda: Scheduled(calls[0])))
    task = made(lambda: Scheduled(calls[1]))
    task.check_first_batch = False
    said(task)
    assert calls[0].calls == calls[1].calls > 1


def test_the_rehearsal_of_a_schedule_makes_torch_warn_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    train, _ = splits()
    forge.Trainer(plugins=[FirstLook()], max_epochs=1, run_dir=False, device="cpu").fit(Scheduled(None), train)
    assert not [str(item.message) for item in recwarn if "optimizer.step()" in str(item.message)]


class Still(Healthy):
    """Learns nothing."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


@pytest.mark.parametrize("kind", [Still, Healthy])
def test_the_end_of_a_run_that_did_not_learn_names_the_verb(
    kind: type[Healthy], caplog: pytest.LogCaptureFixture
) -> None:
    said(made(kind), max_epochs=12)
    assert ("`forge doctor`" in caplog.text) == (kind is Still)


def test_hooks_and_graphs_are_gone_after_it() -> None:
    task = made(Healthy)
    said(task, max_updates=LOOKS + 1)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in task.modules())


class Reads(TorchDispatchMode):
    """Counts the values that are read from tensors, by update."""

    def __init__(self) -> None:
        super().__init__()
        self.by_update = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_update[-1] += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Accelerated(Unused):
    """As on an accelerator, where reading a value waits for it; an optimizer that reads none."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_nothing_is_read_after_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_look, "is_on_host", lambda trainer: False)
    reads = Reads()

    @forge.on("step_end")
    def mark() -> None:
        reads.by_update.append(0)

    with reads:
        names = said(made(Accelerated), plugins=[mark], max_updates=LOOKS + 2, log_every=1000)
    assert names == ["unused_parameters"]
    without_a_look = reads.by_update[LOOKS + 1]
    assert reads.by_update[0] > without_a_look
    assert reads.by_update[1 : LOOKS + 2] == [without_a_look] * (LOOKS + 1)


class Wide(Relu):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 2000), nn.ReLU(), nn.Linear(2000, 1600), nn.ReLU(), nn.Linear(1600, 4))


@pytest.mark.slow
def test_a_large_task_is_looked_at() -> None:
    assert said(made(Wide), max_updates=LOOKS + 1) == ["relu_before_loss"]


def test_layers_without_a_size_are_looked_at_later() -> None:
    class Lazy(Unused):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 4))

    assert "unused_parameters" in said(made(Lazy))


@pytest.mark.slow
def test_a_compiled_model_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "forge"):
        task = made(Unused)
        task.net.compile(backend="eager")
        assert said(task) == []
    assert "the model is compiled" in caplog.text


def test_samples_are_read_from_memory_alone() -> None:
    x, y = numbers(40)
    ordered = samples(loader(x, y, shuffle=False))
    assert torch.equal(torch.stack([sample[0] for sample in ordered]), x)
    assert {tuple(row.tolist()) for row, _ in samples(loader(x, y))} == {tuple(row.tolist()) for row in x}
    assert samples([(x, y)]) == samples(None) == []


class Weighs(Healthy):
    """Weighs its classes, which has the classes of the first step looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 1.0, 2.0, 1.0]))

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores, y, weight=self.get_buffer("weight"))


class Energy(Healthy):
    """Trains the slope of its answer, in which what is added at last has no part."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))

    evaluation = "grad"

    def training_step(self, batch: Any) -> Any:
        x = batch[0].detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (slope + batch[0]).square().mean()

    validation_step = training_step


@pytest.mark.parametrize("task", [Weighs, Energy])
def test_nothing_is_said_of_a_healthy_task(task: type[Healthy]) -> None:
    assert said(task(), max_epochs=12, log_every=16) == []
