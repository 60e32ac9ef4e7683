"""monitor: what it logs is what plain torch says, it names sick layers and no healthy ones, and it leaves no trace."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import forge
from forge.env import Env
from forge.errors import RecipeError
from forge.testing import TinyGAN, TinyTask, check_plugin, fit_tiny, tiny_batches
from forge_plugins import JSONL, Accumulate, Checkpoint, Clip, Guard, Monitor, Progress
from forge_plugins.monitor.alarms import Judge
from forge_plugins.monitor.gradients import Readings
from forge_plugins.monitor.loss import falls
from forge_plugins.monitor.parcel import Parcel
from forge_plugins.monitor.shapes import ModuleRow, folded
from forge_plugins.monitor.turn import TurnStatistics
from tests.support.tasks import Classifier, fit, make_batches, second_rank


class Keep(forge.Plugin):
    """Keeps everything that is logged: {update: {name: value}}."""

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[int, dict[str, Any]] = {}

    @forge.hookimpl
    def forge_log(self, update: int, metrics: dict[str, Any]) -> None:
        self.logged.setdefault(update, {}).update(metrics)

    def of(self, update: int) -> dict[str, Any]:
        """What monitor said after an update, without its prefix."""
        found = self.logged.get(update, {})
        return {name.removeprefix("monitor/"): value for name, value in found.items() if name.startswith("monitor/")}

    @property
    def updates(self) -> list[int]:
        """The updates that monitor looked at."""
        return [update for update in self.logged if self.of(update)]


def quiet(every: str = "1 updates", **options: Any) -> Monitor:
    """A monitor without its table."""
    return Monitor(every=every, **{"shapes": False, **options})


def made(task: Callable[[], Any] = Classifier) -> Any:
    torch.manual_seed(0)
    return task()


def watched(
    task: forge.TaskModule, train: Any, *plugins: forge.Plugin, monitor: Monitor | None = None, **options: Any
) -> Keep:
    """Fit with a monitor that looks at every update; what was logged."""
    keep = Keep()
    fit(task, train, plugins=[monitor or quiet(), *plugins, keep], **options)
    return keep


def named_gradients(task: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


class TestParameters:
    """Against a loop written by hand."""

    @pytest.fixture(params=[1, 2], ids=["one batch", "two micro-batches"])
    def window(self, request: pytest.FixtureRequest) -> int:
        return request.param

    def by_hand(self, window: int, clip: float | None) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
        """The task after one update, its gradients before clipping, and its weights before the update."""
        task = made()
        before = {name: p.detach().clone() for name, p in task.named_parameters()}
        for batch in make_batches(window):
            (task.training_step(batch)["loss"] / window).backward()
        gradients = named_gradients(task)
        if clip is not None:
            nn.utils.clip_grad_norm_(task.parameters(), clip)
        task.configure_optimizers().step()
        return task, gradients, before

    @pytest.mark.parametrize("clip", [None, 0.01])
    def test_every_number_is_what_plain_torch_gives(self, window: int, clip: float | None) -> None:
        after, gradients, before = self.by_hand(window, clip)
        plugins = [Accumulate(window), *([Clip(clip)] if clip else [])]
        found = watched(made(), make_batches(window), *plugins).of(1)
        for name, p in after.named_parameters():
            assert found[f"grad_norm/{name}"] == pytest.approx(gradients[name].norm().item(), rel=1e-5)
            assert found[f"grad_mean/{name}"] == pytest.approx(gradients[name].mean().item(), rel=1e-4, abs=1e-8)
            assert found[f"grad_std/{name}"] == pytest.approx(gradients[name].std().item(), rel=1e-5)
            assert found[f"weight_norm/{name}"] == pytest.approx(p.norm().item(), rel=1e-5)
            moved = (p - before[name]).norm() / before[name].norm()
            assert found[f"update_ratio/{name}"] == pytest.approx(moved.item(), rel=1e-4)

    def test_a_layer_is_the_norm_of_its_parameters(self) -> None:
        after, gradients, before = self.by_hand(1, None)
        found = watched(made(), make_batches(1)).of(1)
        layer = torch.cat([gradients["net.0.weight"].flatten(), gradients["net.0.bias"]])
        assert found["grad_norm/net.0"] == pytest.approx(layer.norm().item(), rel=1e-5)
        whole = nn.utils.get_total_norm(list(gradients.values()))
        assert found["grad_norm"] == pytest.approx(whole.item(), rel=1e-5)
        weights = nn.utils.get_total_norm([p.detach() for p in after.parameters()])
        assert found["weight_norm"] == pytest.approx(weights.item(), rel=1e-5)
        moved = nn.utils.get_total_norm([p.detach() - before[name] for name, p in after.named_parameters()])
        assert found["update_ratio"] == pytest.approx(
            (moved / nn.utils.get_total_norm(list(before.values()))).item(), rel=1e-4
        )

    def test_a_layer_of_one_parameter_is_not_logged_twice(self) -> None:
        class NoBias(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU(), nn.Linear(4, 3))

        found = watched(made(NoBias), make_batches(1)).of(1)
        assert "grad_norm/net.0" not in found
        assert {"grad_norm/net.0.weight", "grad_norm/net.2"} <= found.keys()

    def test_gradients_are_read_once_they_are_unscaled(self) -> None:
        class Scaler(forge.Plugin):
            """What a loss scaler does."""

            @forge.hookimpl
            def forge_backward(self, loss: Tensor) -> bool:
                (loss * 1024).backward()
                return True

            @forge.hookimpl
            def forge_finalize_grads(self, step: forge.Step) -> None:
                torch._foreach_mul_([p.grad for p in step.parameters() if p.grad is not None], 1 / 1024)

        plain, scaled = watched(made(), make_batches(2)), watched(made(), make_batches(2), Scaler())
        for update in (1, 2):
            assert scaled.of(update) == pytest.approx(plain.of(update), rel=1e-4, abs=1e-7)

    def test_an_update_that_is_skipped_has_no_ratio(self) -> None:
        train = make_batches(3)
        train[1][0][0, 0] = math.nan
        keep = watched(made(), train, Guard("skip"))
        assert "update_ratio/net.0.weight" in keep.of(1)
        assert not [name for name in keep.of(2) if name.startswith("update_ratio")]
        assert keep.of(2)["weight_norm"] == keep.of(1)["weight_norm"]

    def test_a_weight_that_was_zero_has_no_ratio(self) -> None:
        class Zero(Classifier):
            def __init__(self) -> None:
                super().__init__()
                nn.init.zeros_(self.get_parameter("net.0.bias"))

        found = watched(made(Zero), make_batches(1)).of(1)
        assert "update_ratio/net.0.bias" not in found
        assert {"update_ratio/net.0", "update_ratio/net.0.weight"} <= found.keys()

    def test_what_is_frozen_is_not_looked_at(self) -> None:
        class Frozen(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.net[0].requires_grad_(False)

        found = watched(made(Frozen), make_batches(1)).of(1)
        assert not [name for name in found if "/net.0." in name and not name.startswith("activation")]

    @pytest.mark.filterwarnings("ignore:.*are in no optimizer")
    def test_what_no_optimizer_has_is_not_looked_at(self) -> None:
        class Partly(Classifier):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.net[2].parameters(), lr=0.1)

        found = watched(made(Partly), make_batches(1)).of(1)
        assert "grad_norm/net.2.weight" in found
        assert "grad_norm/net.0.weight" not in found

    def test_half_precision_does_not_overflow(self) -> None:
        class Half(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.big = nn.Parameter(torch.full((1000,), 1000.0, dtype=torch.float16))

            def training_step(self, batch: Any) -> Any:
                return super().training_step(batch)["loss"] + (self.big * 100).sum()

        found = watched(made(Half), make_batches(1)).of(1)
        assert found["weight_norm/big"] == pytest.approx(1000 * math.sqrt(1000), rel=0.02)
        assert found["grad_norm/big"] == pytest.approx(100 * math.sqrt(1000), rel=1e-3)
        assert found["grad_std/big"] == 0

    def test_double_precision_sparse_and_complex_parameters_work(self) -> None:
        class Odd(forge.TaskModule):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(10, 3, sparse=True)
                self.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
                self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
                self.one = nn.Parameter(torch.ones(()))

            def training_step(self, batch: Any) -> Any:
                wave = (self.wave * 2j).abs().sum()
                return self.table(batch[1]).sum() + wave + (self.wide**2).sum().float() + self.one

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        found = watched(made(Odd), make_batches(1)).of(1)
        assert found["grad_norm/wide"] == pytest.approx(math.sqrt(12))
        assert found["grad_norm/wave"] == pytest.approx(math.sqrt(8))
        assert found["grad_norm/one"] == 1
        assert found["grad_std/one"] == 0
        assert found["grad_norm/table.weight"] > 0

    def test_a_parametrized_weight_belongs_to_its_layer(self) -> None:
        class Normed(Classifier):
            def __init__(self) -> None:
                super().__init__()
                nn.utils.parametrizations.weight_norm(self.net[0])

        found = watched(made(Normed), make_batches(1)).of(1)
        assert {"grad_norm/net.0", "grad_norm/net.0.parametrizations.weight.original0"} <= found.keys()

    def test_dead_units_are_those_whose_weights_get_no_gradient(self) -> None:
        class Functional(Classifier):
            def __init__(self) -> None:
                super().__init__()
                with torch.no_grad():
                    self.get_parameter("net.0.bias")[:6] = -1000.0

            def forward(self, x: Tensor) -> Tensor:
                return self.net[2](F.relu(self.net[0](x)))

        found = watched(made(Functional), make_batches(1)).of(1)
        assert found["dead_units/net.0"] == 6 / 8
        assert found["dead_units/net.2"] == 0


class TestActivations:
    def test_every_number_is_what_hooks_by_hand_give(self) -> None:
        task, outputs = made(), {name: [] for name in ("net.0", "net.1", "net.2")}
        for name, seen in outputs.items():
            task.get_submodule(name).register_forward_hook(
                lambda *got, seen=seen: seen.append(got[-1].detach().clone())
            )
        train = [make_batches(1, size)[0] for size in (4, 7)]
        for batch in train:
            task.training_step(batch)
        found = watched(made(), train, Accumulate(2)).of(1)
        for name, seen in outputs.items():
            values = torch.cat(seen)
            assert found[f"activation/{name}/mean"] == pytest.approx(values.mean().item(), rel=1e-4, abs=1e-7)
            assert found[f"activation/{name}/std"] == pytest.approx(values.std().item(), rel=1e-5)
            assert found[f"activation/{name}/zeros"] == pytest.approx((values == 0).float().mean().item())
            dead = (values == 0).all(0).float().mean().item()
            assert found[f"activation/{name}/dead"] == pytest.approx(dead)
        assert found["activation/net.1/zeros"] > 0.1

    def test_a_unit_must_be_zero_in_every_micro_batch_to_be_dead(self) -> None:
        class Gate(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.relu = nn.ReLU()

            def training_step(self, batch: Any) -> Any:
                x, sign = batch
                return self.relu(sign.float().mean() * torch.ones(2, 3)).sum() + 0 * self.net(x).sum()

        train = [(torch.zeros(2, 8), torch.full((2,), sign)) for sign in (1, -1, -1, -1)]
        keep = watched(Gate(), train, Accumulate(2))
        assert [keep.of(update)["activation/relu/dead"] for update in (1, 2)] == [0, 1]

    @pytest.mark.parametrize("behind", [(), (nn.BatchNorm2d(4), nn.ReLU())], ids=["itself", "behind it"])
    def test_the_units_of_a_convolution_are_its_channels(self, behind: tuple[nn.Module, ...]) -> None:
        class Conv(forge.TaskModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Conv2d(1, 4, 3), *copy.deepcopy(behind))
                with torch.no_grad():
                    self.get_parameter("net.0.weight")[:3] = 0
                    self.get_parameter("net.0.bias")[:3] = 0

            def training_step(self, batch: Any) -> Any:
                return self.net(batch[0]).sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        train = [(torch.rand(2, 1, 6, 5, generator=torch.Generator().manual_seed(0)),)]
        found = watched(made(Conv), train).of(1)
        assert found[f"activation/net.{len(behind)}/dead"] == 3 / 4

    def test_the_units_of_a_transformer_are_its_features(self) -> None:
        class Words(forge.TaskModule):
            def __init__(self) -> None:
                super().__init__()
                self.table, self.hidden, self.relu = nn.Embedding(5, 4), nn.Linear(4, 8), nn.ReLU()
                with torch.no_grad():
                    self.hidden.bias[:2] = -1000.0

            def training_step(self, batch: Any) -> Any:
                return self.relu(self.hidden(self.table(batch))).sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        assert watched(made(Words), [torch.arange(20).reshape(4, 5) % 5]).of(1)["activation/relu/dead"] == 2 / 8

    def test_saturation_is_looked_at_where_a_module_has_a_range(self) -> None:
        class Range(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.act = nn.Tanh()

            def training_step(self, batch: Any) -> Any:
                return self.act(torch.tensor([[-9.0, 0.0, 9.0, 9.0]])).sum() + self.net(batch[0]).sum()

        found = watched(made(Range), make_batches(1)).of(1)
        assert found["activation/act/saturated"] == 3 / 4
        assert "activation/net.1/saturated" not in found

    def test_only_the_first_tensor_of_an_output_counts(self) -> None:
        class Recurrent(forge.TaskModule):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(8, 5)

            def training_step(self, batch: Any) -> Any:
                return self.lstm(batch[0])[0].pow(2).sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        task = made(Recurrent)
        expected = task.lstm(make_batches(1)[0][0])[0].mean().item()
        found = watched(task, make_batches(1)).of(1)
        assert found["activation/lstm/mean"] == pytest.approx(expected, rel=1e-4)

    def test_a_module_that_is_called_twice_counts_twice(self) -> None:
        class Twice(Classifier):
            def training_step(self, batch: Any) -> Any:
                return self.net[0](batch[0]).sum() + self.net[0](2 * batch[0]).sum() + self.net(batch[0]).sum()

        task = made(Twice)
        x = make_batches(1)[0][0]
        expected = torch.cat([task.net[0](x), task.net[0](2 * x), task.net[0](x)]).std().item()
        assert watched(task, make_batches(1)).of(1)["activation/net.0/std"] == pytest.approx(expected, rel=1e-5)

    def test_a_block_that_is_run_again_in_backward_counts_once(self) -> None:
        class Checkpointed(Classifier):
            def forward(self, x: Tensor) -> Any:
                return checkpoint(self.net, x, use_reentrant=False)

        train = make_batches(1)
        plain, again = watched(made(), train).of(1), watched(made(Checkpointed), train).of(1)
        assert again == pytest.approx(plain, rel=1e-5)

    def test_inside_of_torch_func_nothing_is_kept(self) -> None:
        class Functional(Classifier):
            def training_step(self, batch: Any) -> Any:
                def loss(parameters: Any) -> Tensor:
                    return torch.func.functional_call(self, parameters, batch[0]).sum()

                torch.func.grad(loss)({name: p.detach() for name, p in self.named_parameters()})
                return super().training_step(batch)

        train = make_batches(1)
        assert watched(made(Functional), train).of(1) == pytest.approx(watched(made(), train).of(1))

    def test_a_closure_that_runs_the_window_again_counts_once(self) -> None:
        class Closure(Classifier):
            def configure_optimizers(self) -> Any:
                return torch.optim.LBFGS(self.parameters(), max_iter=3)

        train = make_batches(1)
        plain, closure = watched(made(), train).of(1), watched(made(Closure), train).of(1)
        same = [name for name in plain if name.startswith(("activation", "grad"))]
        assert {name: closure[name] for name in same} == pytest.approx({name: plain[name] for name in same})
        assert closure["update_ratio"] > 0


def test_a_histogram_is_that_of_the_tensor() -> None:
    task = made()
    keep = watched(task, make_batches(1), monitor=quiet(histograms=True))
    drawn = keep.of(1)["histogram/weight/net.0.weight"]
    expected = forge.Histogram.of(task.net[0].weight)
    assert torch.equal(drawn.counts, expected.counts)
    assert torch.allclose(drawn.edges, expected.edges)
    assert keep.of(1)["histogram/gradient/net.2.bias"].counts.sum() == 3
    assert keep.of(1)["histogram/activation/net.1"].counts.sum() == 4 * 8


def test_a_large_tensor_is_thinned_for_its_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_plugins.monitor.histograms.LARGEST", 10)
    drawn = watched(made(), make_batches(1), monitor=quiet(histograms=True)).of(1)["histogram/weight/net.0.weight"]
    assert drawn.counts.sum() == math.ceil(64 / 7)


# ---------------------------------------------------------------------------------------------------------------------
# When


def test_it_looks_when_its_interval_ends() -> None:
    assert watched(made(), make_batches(7), monitor=quiet("3 updates")).updates == [3, 6]
    assert watched(made(), make_batches(4), monitor=quiet("1 epoch"), max_epochs=2).updates == [4, 8]


@pytest.mark.parametrize(("batches", "expected"), [(7, [*range(1, 8)]), (60, [*range(3, 61, 3)])])
def test_by_itself_it_looks_twenty_times(batches: int, expected: list[int]) -> None:
    assert watched(made(), make_batches(batches), monitor=Monitor(shapes=False)).updates == expected


def test_in_a_run_without_a_known_end_it_looks_every_100_updates() -> None:
    plugin = Monitor()
    assert plugin._every == forge.Interval("100 updates")


def test_histograms_can_have_an_interval_of_their_own() -> None:
    keep = watched(made(), make_batches(6), monitor=quiet("2 updates", histograms="3 updates"))
    drawn = [u for u in keep.updates if any(isinstance(v, forge.Histogram) for v in keep.of(u).values())]
    assert drawn == [3, 6]
    assert [update for update in keep.updates if "grad_norm" in keep.of(update)] == [2, 4, 6]


@pytest.mark.parametrize(
    ("off", "gone"),
    [
        ("gradients", ("grad_norm", "grad_mean", "grad_std", "dead_units", "histogram/gradient")),
        ("weights", ("weight_norm", "update_ratio", "histogram/weight")),
        ("activations", ("activation", "histogram/activation")),
    ],
)
def test_what_is_switched_off_is_not_looked_at(off: str, gone: tuple[str, ...]) -> None:
    everything = watched(made(), make_batches(1), monitor=quiet(histograms=True)).of(1)
    less: dict[str, Any] = {off: False}
    found = watched(made(), make_batches(1), monitor=quiet(histograms=True, **less)).of(1)
    assert found.keys() == {name for name in everything if not name.startswith(gone)}
    assert len(found) < len(everything)


class Spy(Classifier):
    """Counts, in every training_step, the hooks that stand on its modules."""

    check_first_batch = False  # it has hooks of its own

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any) -> Any:
        self.seen.append(hooks_on(self))
        return super().training_step(batch)


def hooks_on(task: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in task.modules())


def test_hooks_stand_only_while_an_update_is_looked_at() -> None:
    task = Spy()
    watched(task, make_batches(6), monitor=quiet("3 updates"))
    assert task.seen == [0, 0, 3, 0, 0, 3]
    assert hooks_on(task) == 0


def test_an_update_that_fails_leaves_no_hook_behind() -> None:
    class Fails(Classifier):
        def training_step(self, batch: Any) -> Any:
            raise RuntimeError("on purpose")

    task, plugin = Fails(), Monitor("1 updates")
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(task, plugins=[plugin])
    assert hooks_on(task) == 0
    assert plugin._look is plugin._table is plugin._sent is None


def test_between_intervals_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    class Counted(TurnStatistics):
        def __init__(self, step: forge.Step, *rest: Any, **options: Any):
            taken.append(step.index)
            super().__init__(step, *rest, **options)

    monkeypatch.setattr("forge_plugins.monitor.TurnStatistics", Counted)
    fit(made(), make_batches(6), plugins=[quiet("7 updates")])
    assert taken == []
    fit(made(), make_batches(6), plugins=[quiet("3 updates")])
    assert taken == [2, 5]


def test_it_says_when_it_is_due() -> None:
    due: list[tuple[bool, bool]] = []
    bare, tabular = quiet("2 updates"), Monitor("2 updates")
    tabular.name = "tabular"

    @forge.on("step_end")
    def ask(step: forge.Step) -> None:
        due.append((bare.due(step), tabular.due(step)))

    fit(made(), make_batches(4), plugins=[ask, bare, tabular])
    assert due == [(False, True), (True, True), (False, False), (True, True)]


def test_with_several_optimizers_each_has_its_own_names() -> None:
    keep = Keep()
    fit_tiny([quiet("2 updates"), keep], task=TinyGAN())
    found = keep.of(2)
    assert {"generator/grad_norm", "discriminator/grad_norm"} <= found.keys()
    assert "generator/grad_norm/generator.0.weight" in found
    assert "generator/grad_norm/discriminator.0.weight" not in found
    assert "discriminator/update_ratio/discriminator.0.weight" in found
    assert {f"{name}/activation/discriminator.1/mean" for name in ("generator", "discriminator")} <= found.keys()


# ---------------------------------------------------------------------------------------------------------------------
# It is an observer


@pytest.mark.slow  # tests/testing/test_conformance.py holds it to the contract in the quick profile
def test_it_keeps_the_contract() -> None:
    check_plugin(lambda: Monitor("2 updates", histograms="3 updates"))


class Teacher(forge.TaskModule):
    """A frozen encoder in evaluation mode, which has a fast path of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def train(self, mode: bool = True) -> Teacher:
        super().train(mode)
        self.teacher.eval()
        return self

    def training_step(self, batch: Any) -> Any:
        with torch.no_grad():
            features = self.teacher(batch[0].unsqueeze(0)).squeeze(0)
        return F.cross_entropy(self.head(features), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def test_a_fast_path_that_minds_hooks_keeps_its_bits() -> None:
    plain, seen = made(Teacher), made(Teacher)
    fit(plain, make_batches(3))
    keep = watched(seen, make_batches(3), monitor=Monitor("1 updates"))
    assert torch.equal(plain.head.weight, seen.head.weight)
    assert "activation/head/mean" in keep.of(1)
    assert not [name for name in keep.of(1) if "teacher" in name]


def compiled(module: nn.Module) -> None:
    """As `module.compile()` leaves it, without a compiler."""
    module._compiled_call_impl = module._call_impl


def test_inside_of_compiled_modules_it_does_not_look_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Blocks(Spy):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            compiled(self.block)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.block(x))

    task = Blocks()
    keep = watched(task, make_batches(3))
    assert "activation/net.0/mean" in keep.of(1)
    assert not [name for name in keep.of(1) if name.startswith("activation/block")]
    assert "grad_norm/block.0.weight" in keep.of(1)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["monitor: compiled code calls no hooks: activations and shapes inside of block are left out."]


def test_a_wholly_compiled_model_still_shows_gradients(caplog: pytest.LogCaptureFixture) -> None:
    class Whole(forge.Plugin):
        @forge.hookimpl
        def forge_build_model(self, build: Any, phase: str) -> None:
            if phase == "compile":
                compiled(build.model)

    keep = watched(made(), make_batches(2), Whole(), monitor=Monitor("1 updates"))
    assert "grad_norm/net.0.weight" in keep.of(1)
    assert not [name for name in keep.of(1) if name.startswith("activation")]
    assert caplog.text.count("inside of the model are left out") == 1


# ---------------------------------------------------------------------------------------------------------------------
# On an accelerator numbers arrive one update later


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parcels that are on their way, as from an accelerator."""
    init = Parcel.__init__

    def sent(self: Parcel, *words: Any) -> None:
        init(self, *words)
        self.here = False

    monkeypatch.setattr(Parcel, "__init__", sent)


@pytest.mark.usefixtures("late")
class TestLate:
    def test_they_arrive_with_the_next_update_and_their_place(self) -> None:
        opened: list[tuple[int, int]] = []

        class When(forge.Plugin):
            @forge.hookimpl
            def forge_log(self, trainer: forge.Trainer, update: int, metrics: dict[str, Any]) -> None:
                assert trainer.step is not None
                opened.extend((update, trainer.step.index + 1) for name in metrics if name == "monitor/grad_norm")

        fit(made(), make_batches(5), plugins=[quiet("2 updates"), When()])
        assert opened == [(2, 3), (4, 5)]

    def test_what_the_last_update_sent_arrives_too(self) -> None:
        assert watched(made(), make_batches(4), monitor=quiet("2 updates")).updates == [2, 4]

    def test_a_run_that_is_stopped_has_all_of_it(self, tmp_path: Path) -> None:
        @forge.on("boundary", mutates=True)
        def stop(trainer: forge.Trainer) -> None:
            if trainer.progress.update == 4:
                trainer.request_stop("enough")

        assert watched(made(), make_batches(8), stop, monitor=quiet("2 updates"), run_dir=tmp_path).updates == [2, 4]

    def test_a_line_of_jsonl_says_where_the_run_was(self, tmp_path: Path) -> None:
        def lines(folder: Path) -> list[Any]:
            found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            return [(x["update"], x["epoch"], x["sample"]) for x in found if "monitor/grad_norm" in x]

        fit(made(), make_batches(3), max_epochs=2, plugins=[quiet("1 updates"), JSONL()], run_dir=tmp_path)
        assert lines(tmp_path) == [(1, 0, 4), (2, 0, 8), (3, 1, 12), (4, 1, 16), (5, 1, 20), (6, 2, 24)]

    def test_nothing_is_lost_or_doubled_where_a_run_is_cut_off(self, tmp_path: Path) -> None:
        keep = Keep()

        class Cut(forge.Plugin):
            """Ends a life in its fifth update, before what the fourth sent has arrived."""

            observer = True

            @forge.hookimpl(wrapper=True)
            def forge_prepare_batch(self, step: forge.Step) -> Generator[None, Any, Any]:
                if step.stage == "train" and step.index == 4:
                    raise KeyboardInterrupt
                return (yield)

        def live(*plugins: forge.Plugin) -> None:
            saves = Checkpoint(every="4 updates", background=False)
            monitor = quiet("2 updates")
            fit_tiny([monitor, saves, keep, *plugins], max_updates=8, run_dir=tmp_path, resume="auto")

        with pytest.raises(KeyboardInterrupt):
            live(Cut())
        assert keep.updates == [2, 4]
        live()
        assert keep.updates == [2, 4, 6, 8]

    def test_a_rewind_drops_what_was_on_its_way(self, tmp_path: Path) -> None:
        train = make_batches(8)
        train[5][0][0, 0] = math.nan
        saves = Checkpoint(every="3 updates", background=False)
        keep = watched(made(), train, saves, Guard("rewind"), monitor=quiet("6 updates"), run_dir=tmp_path)
        assert keep.updates == []
        assert 8 in keep.logged


# ---------------------------------------------------------------------------------------------------------------------
# Alarms


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Net(forge.TaskModule):
    """Any network, trained to tell classes apart."""

    def __init__(self, net: nn.Module, lr: float = 1e-3, optimizer: str = "Adam"):
        super().__init__()
        self.net, self.lr, self.optimizer = net, lr, optimizer

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self.net(batch[0]).flatten(0, -2), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=self.lr)


def vectors(count: int = 4, size: int = 32) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 16, generator=generator), torch.randint(4, (size,), generator=generator))
        for _ in range(count)
    ]


def mlp(activation: Callable[[], nn.Module], depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [part for _ in range(depth) for part in (nn.Linear(16, 16), activation())]
    return nn.Sequential(*hidden, nn.Linear(16, 4))


def look(
    net: nn.Module,
    every: str = "1 updates",
    updates: int = 20,
    train: Any = None,
    *plugins: forge.Plugin,
    **options: Any,
) -> None:
    limits = {
        name: options.pop(name) for name in ("vanishing", "exploding", "small", "dead", "saturated") if name in options
    }
    fit(
        Net(net, **options),
        vectors() if train is None else train,
        plugins=[quiet(every, **limits), *plugins],
        max_epochs=None,
        max_updates=updates,
    )


class Quiet(nn.Module):
    """A layer whose gradient is tiny beside the others', as a scale inside of the model makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.quiet = mlp(nn.ReLU), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + 1e-7 * self.quiet(x)


class Residual(nn.Module):
    """A small convolutional network with all that is usual: biases before normalisation, functional ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(9, 16), nn.Parameter(torch.zeros(6, 16))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 9))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(9, 16), nn.LSTM(16, 16, 2, batch_first=True), nn.Linear(16, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(x))[0])


def pictures() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 3, 8, 8, generator=generator), torch.randint(4, (16,), generator=generator))]


def words() -> list[Any]:
    tokens = torch.randint(9, (16, 6), generator=torch.Generator().manual_seed(0))
    return [(tokens, tokens.roll(1, 1))]


HEALTHY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (lambda: mlp(nn.ReLU), vectors),
    "deep mlp": (lambda: mlp(nn.ReLU, 6), vectors),
    "tanh": (lambda: mlp(nn.Tanh, 3), vectors),
    "sigmoid": (lambda: mlp(nn.Sigmoid, 2), vectors),
    "convolutions": (Residual, pictures),
    "transformer": (Transformer, words),
    "lstm": (Recurrent, words),
}


class TestAlarms:
    @pytest.mark.parametrize(
        ("name", "optimizer", "updates"),
        [
            *((name, "SGD" if number % 2 else "Adam", 24) for number, name in enumerate(HEALTHY)),
            *(
                pytest.param(name, optimizer, 60, marks=pytest.mark.slow)
                for name in HEALTHY
                for optimizer in ("Adam", "SGD")
            ),
        ],
    )
    def test_a_healthy_network_is_left_in_peace(
        self, name: str, optimizer: str, updates: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        net, train = HEALTHY[name]
        torch.manual_seed(0)
        lr = 1e-2 if optimizer == "Adam" else 0.1
        look(net(), "1 updates", updates, train(), lr=lr, optimizer=optimizer)
        assert alarms(caplog) == []

    def test_the_quickstart_is_healthy(self, caplog: pytest.LogCaptureFixture) -> None:
        recipe = forge.load_recipe("quickstart", ["trainer.max_epochs=2"])
        data = recipe.make_data()
        trainer = forge.Trainer(recipe=recipe, plugins=[Monitor("5 updates")], run_dir=False)
        trainer.fit(recipe.make_task(), data.train, data.val)
        assert [text for text in alarms(caplog) if text.startswith("monitor")] == []

    def test_a_gan_is_healthy(self, caplog: pytest.LogCaptureFixture) -> None:
        fit_tiny([quiet("1 updates")], task=TinyGAN(), max_epochs=10)
        assert alarms(caplog) == []

    def test_a_vanishing_gradient_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        look(mlp(nn.Sigmoid, 12))
        text = alarms(caplog)[0]
        assert text.startswith("monitor: after update 13: the gradient vanishes in net.0 (Linear, norm ")
        assert "Try ReLU or GELU in place of sigmoid and tanh" in text
        assert not [text for text in alarms(caplog) if "net.24" in text or "vanishes" not in text]

    def test_a_small_gradient_is_healthy_where_the_loss_falls(self, caplog: pytest.LogCaptureFixture) -> None:
        look(Quiet(), updates=40, lr=1e-2)
        assert alarms(caplog) == []

    def test_and_named_where_that_layer_hardly_moves(self, caplog: pytest.LogCaptureFixture) -> None:
        look(Quiet(), updates=40, lr=0.1, optimizer="SGD")
        (text,) = alarms(caplog)
        assert text.startswith("monitor: after update 13: the gradient vanishes in net.quiet (Linear, norm ")

    @pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
    def test_updates_that_are_far_too_small_are_named(self, optimizer: str, caplog: pytest.LogCaptureFixture) -> None:
        look(mlp(nn.ReLU), updates=30, lr=1e-7, optimizer=optimizer)
        (text,) = alarms(caplog)
        assert "updates are far too small: they move the median layer (" in text
        assert "`forge tune lr` measures one" in text

    def test_small_updates_of_a_warm_up_are_healthy(self, caplog: pytest.LogCaptureFixture) -> None:
        @forge.on("boundary", mutates=True)
        def warm_up(trainer: forge.Trainer) -> None:
            trainer.optimizers[None].param_groups[0]["lr"] = 1e-9 * 1.3**trainer.progress.update

        look(mlp(nn.ReLU), "1 updates", 30, None, warm_up, lr=1e-9)
        assert alarms(caplog) == []

    def test_an_exploding_gradient_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        class Steep(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.steep = mlp(nn.Tanh), nn.Linear(16, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.net(x) + torch.sin(1e4 * self.steep(x))

        look(Steep(), optimizer="Adam", lr=1e-6, small=None)
        assert [text.partition("(")[0] for text in alarms(caplog)] == [
            "monitor: after update 13: the gradient explodes in net.steep "
        ]
        assert "Try -p clip" in alarms(caplog)[0]

    def test_a_large_gradient_is_healthy_where_the_loss_falls(self, caplog: pytest.LogCaptureFixture) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.quiet, self.net = Quiet(), mlp(nn.ReLU)

            def forward(self, x: Tensor) -> Tensor:
                return self.quiet(x) + 100 * self.net(x)

        look(Scaled(), updates=40, lr=1e-3, dead=None)
        assert alarms(caplog) == []

    def test_a_network_that_explodes_as_a_whole_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        net = mlp(nn.ReLU, 12)
        for module in net:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=2.0)
        look(net, lr=1e-6, small=None)
        assert "the gradient explodes in net.0 (Linear" in alarms(caplog)[0]

    def test_weights_that_leap_are_named(self, caplog: pytest.LogCaptureFixture) -> None:
        """In the update that is looked at alone: some leaps later layers are as large as the next one."""

        @forge.on("boundary", mutates=True)
        def leap(trainer: forge.Trainer) -> None:
            if trainer.progress.update == 10:
                trainer.optimizers[None].param_groups[0]["lr"] = 1e3

        look(mlp(nn.Tanh), "11 updates", 11, None, leap, optimizer="SGD", lr=1e-6)
        assert any("by more than the layer's own size" in text for text in alarms(caplog))

    def test_a_missing_gradient_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        class Unused(nn.Sequential):
            def __init__(self) -> None:
                super().__init__(*mlp(nn.ReLU))
                self.extra = nn.Linear(3, 3)

            def forward(self, input: Tensor) -> Tensor:
                for part in list(self)[:-1]:
                    input = part(input)
                return input

        look(Unused())
        (text,) = alarms(caplog)
        assert text.startswith("monitor: after update 15: no gradient reached net.extra.weight, net.extra.bias.")

    def test_a_layer_that_is_left_out_at_times_is_healthy(self, caplog: pytest.LogCaptureFixture) -> None:
        class LayerDrop(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.blocks = mlp(nn.ReLU), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
                self.calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                for i, block in enumerate(self.blocks):
                    x = x + F.relu(block(x)) if self.calls % 4 == i else x
                return self.net(x)

        look(LayerDrop())
        assert alarms(caplog) == []

    @pytest.mark.parametrize("by_turns", [True, False], ids=["experts", "forgotten"])
    def test_an_expert_that_is_never_chosen_is_healthy(self, by_turns: bool, caplog: pytest.LogCaptureFixture) -> None:
        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.experts = mlp(nn.ReLU), nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
                self.calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                if by_turns:
                    return self.net(self.experts[self.calls % 2](x))
                return self.net(self.experts[1](self.experts[0](x)))

        look(Experts())
        assert ["net.experts.2.weight" in text for text in alarms(caplog)] == ([] if by_turns else [True])

    @pytest.mark.parametrize("functional", [False, True], ids=["module", "function"])
    def test_a_dead_layer_is_named(self, functional: bool, caplog: pytest.LogCaptureFixture) -> None:
        class Functional(nn.Module):
            def __init__(self, net: nn.Sequential) -> None:
                super().__init__()
                self.first, self.last = net[0], net[-1]

            def forward(self, x: Tensor) -> Tensor:
                return self.last(F.relu(self.first(x)))

        net = mlp(nn.ReLU, 1)
        with torch.no_grad():
            net.get_parameter("0.bias")[1:] = -1000.0
        look(Functional(net) if functional else net)
        (text,) = alarms(caplog)
        where = "net.first (Linear, 93.8 %)" if functional else "net.1 (ReLU, 93.8 %)"
        assert text.startswith(f"monitor: after update 13: dead units in {where}: ")

    def test_too_few_samples_prove_no_unit_dead(self, caplog: pytest.LogCaptureFixture) -> None:
        net = mlp(nn.ReLU, 1)
        with torch.no_grad():
            net.get_parameter("0.bias")[1:] = -1000.0
        look(net, train=vectors(4, size=16))
        assert alarms(caplog) == []

    def test_a_saturated_layer_is_named_but_not_the_output(self, caplog: pytest.LogCaptureFixture) -> None:
        net = nn.Sequential(*mlp(nn.Tanh, 1), nn.Sigmoid())
        with torch.no_grad():
            for name in ("0.weight", "2.weight"):
                net.get_parameter(name).mul_(1e4)
        look(net, vanishing=None, exploding=None, small=None, dead=None)
        (text,) = alarms(caplog)
        assert text.startswith("monitor: after update 13: saturated units in net.1 (Tanh, ")
        assert "net.3" not in text

    def test_no_gradient_at_all_is_one_alarm(self, caplog: pytest.LogCaptureFixture) -> None:
        class Clipped(nn.Sequential):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(input).clamp(0, 0)

        look(Clipped(*mlp(nn.ReLU)))
        (text,) = alarms(caplog)
        assert "every gradient is exactly 0" in text

    def test_nothing_is_judged_in_the_first_updates(self, caplog: pytest.LogCaptureFixture) -> None:
        look(mlp(nn.Sigmoid, 12), "1 updates", 10)
        assert alarms(caplog) == []

    def test_numbers_that_are_not_finite_are_left_to_others(self, caplog: pytest.LogCaptureFixture) -> None:
        train = [(x * math.nan, y) for x, y in vectors()]
        look(mlp(nn.ReLU), train=train)
        assert alarms(caplog) == []

    def test_a_limit_of_null_is_no_alarm(self, caplog: pytest.LogCaptureFixture) -> None:
        look(mlp(nn.Sigmoid, 12), vanishing=None)
        assert alarms(caplog) == []

    def test_each_is_said_again_when_ten_times_worse(self) -> None:
        judge = Judge(Monitor().config, nn.Linear(1, 1))

        def say(norm: float) -> int:
            size, change = {"a.weight": 1.0, "b.weight": 1.0}, {"a.weight": 1e-3, "b.weight": 1e-9}
            seen = Readings(grad_norm={"a.weight": 1.0, "b.weight": norm}, norm_before=size, change=change)
            return sum(len(judge.say(seen, {}, 100)) for _ in range(3))

        assert [say(norm) for norm in (1.0, 1e-6, 1e-6, 2e-7, 1e-7, 1e-7, 1.0, 1e-6, 0.0, 0.0)] == [
            0,
            1,
            0,
            0,
            1,
            0,
            0,
            0,
            1,
            0,
        ]

    def test_a_resumed_run_does_not_say_it_again(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for updates in (20, 40):
            torch.manual_seed(0)
            forge.Trainer(
                plugins=[quiet(), Checkpoint(every="20 updates", background=False)],
                max_updates=updates,
                run_dir=tmp_path,
                resume="auto",
            ).fit(Net(mlp(nn.Sigmoid, 12), lr=1e-6), vectors())
        assert len([text for text in alarms(caplog) if "vanishes in net.0 " in text]) == 1

    @pytest.mark.parametrize(
        ("losses", "expected"),
        [
            ([3.0, 2.8, 2.6, 2.4, 2.2, 2.0], True),
            ([2.0] * 6, False),
            ([2.0, 2.01, 1.99, 2.0, 2.02, 2.01, 1.98], False),
            ([1.0, 9.0, 2.0, 8.0, 1.0, 9.0], None),
            ([3.0, 1.0], None),
            ([-1.0, -1.1, -1.2, -1.9, -2.0, -2.1], True),
        ],
    )
    def test_a_loss_falls_does_not_or_is_too_noisy(self, losses: list[float], expected: bool | None) -> None:
        assert falls(losses) is expected

    @given(st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=20), st.floats(1e-30, 1e30))
    def test_layers_within_three_orders_are_healthy(self, norms: list[float], scale: float) -> None:
        judge = Judge(Monitor().config, nn.Linear(1, 1))
        names = [f"layer{i}.weight" for i in range(len(norms))]
        readings = Readings(
            grad_norm=dict(zip(names, (norm * scale for norm in norms), strict=True)),
            norm_before=dict.fromkeys(names, scale),
        )
        assert judge.say(readings, {}, 100) == []


# ---------------------------------------------------------------------------------------------------------------------
# The table


class Stacked(forge.TaskModule):
    """Twelve equal blocks, a frozen layer, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12))
        self.chain = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())])
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.chain(x))

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) + 0 * self.unused.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


def table(task: forge.TaskModule, caplog: pytest.LogCaptureFixture, train: Any = None, **options: Any) -> list[str]:
    """The lines of the table that is logged."""
    caplog.set_level(logging.INFO)
    fit(task, train, plugins=[Monitor(every="1000 updates", **options)])
    (text,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("monitor: the model")]
    return text.splitlines()[1:]


class TestTable:
    def test_the_table_has_shapes_and_memory_and_folds_equals(self, caplog: pytest.LogCaptureFixture) -> None:
        lines = [line.split("  ") for line in table(made(Stacked), caplog, make_batches(1))]
        rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
        assert rows[0] == ["module", "class", "output", "parameters", "weights", "activations"]
        assert rows[1:-1] == [
            ["Stacked", "Stacked", "4×3", "4,553 (144 frozen)", "17.8 KiB", "48 B"],
            ["stem", "Linear", "4×16", "144 frozen", "576 B", "256 B"],
            ["blocks", "ModuleList", "–", "3,264", "12.8 KiB", "–"],
            ["0 to 11", "Sequential ×12", "4×16", "272", "1.06 KiB", "256 B"],
            ["0", "Linear", "4×16", "272", "1.06 KiB", "256 B"],
            ["1", "ReLU", "4×16", "–", "–", "256 B"],
            ["chain", "Sequential", "4×16", "1,088", "4.25 KiB", "256 B"],
            ["0", "Linear", "4×16", "272", "1.06 KiB", "256 B"],
            ["1", "Tanh", "4×16", "–", "–", "256 B"],
            ["2 to 7", "the same ×3", "–", "–", "–", "–"],
            ["unused", "Linear", "–", "6", "24 B", "–"],
            ["head", "Linear", "4×3", "51", "204 B", "48 B"],
        ]
        activations = 256 + 12 * 512 + 4 * 512 + 48
        assert " ".join(rows[-1]) == (
            "4,553 parameters, 4,409 of them trained. Weights and buffers take 17.8 KiB, activations "
            f"{activations / 1024:.3g} KiB for one micro-batch."
        )

    def test_it_goes_as_deep_as_it_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        names = [line.split()[0] for line in table(made(Stacked), caplog, depth=1)[1:-1]]
        assert names == ["Stacked", "stem", "blocks", "chain", "unused", "head"]

    def test_several_outputs_are_listed(self, caplog: pytest.LogCaptureFixture) -> None:
        class Lstm(forge.TaskModule):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(8, 5)

            def training_step(self, batch: Any) -> Any:
                return self.lstm(batch[0])[0].sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        assert "4×5, 1×5, …" in table(Lstm(), caplog)[2]

    def test_tensorboard_gets_it_as_markdown(self) -> None:
        keep = Keep()
        fit(made(), make_batches(3), plugins=[Monitor(), keep])
        (text,) = [value for metrics in keep.logged.values() for name, value in metrics.items() if name == "model"]
        assert isinstance(text, forge.Text)
        assert text.text.splitlines()[0] == "| module | class | output | parameters | weights | activations |"
        assert "| &nbsp;&nbsp;&nbsp;&nbsp;net | Sequential | 4×3 | 99 | 396 B | 48 B |" in text.text.splitlines()

    def test_the_table_takes_no_forward_of_its_own(self) -> None:
        task = Spy()
        fit(task, make_batches(4), plugins=[Monitor("1000 updates"), Accumulate(2)])
        assert len(task.seen) == 4
        assert task.seen[-1] == 0

    def test_it_shows_what_any_turn_of_several_optimizers_runs(self, caplog: pytest.LogCaptureFixture) -> None:
        class Apart(TinyGAN):
            def training_step(self, batch: Any, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
                net = self.generator if name == "generator" else self.discriminator
                return net(torch.ones(2, 4 if name == "generator" else 6)).sum()

        lines = table(Apart(), caplog, tiny_batches())
        assert not [line for line in lines if "Linear" in line and "–" in line]

    def test_a_resumed_run_does_not_show_it_again(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        for updates in (2, 4):
            saves = Checkpoint(every="2 updates", background=False)
            fit_tiny([Monitor(), saves], max_updates=updates, run_dir=tmp_path, resume="auto")
        assert caplog.text.count("monitor: the model") == 1

    @given(st.lists(st.sampled_from("abc"), max_size=12))
    def test_folding_loses_no_row(self, kinds: list[str]) -> None:
        rows = folded([ModuleRow(str(i), kind) for i, kind in enumerate(kinds)])
        unfolded: list[str] = []
        for row in rows:
            if row.kind.startswith("the same"):
                first, last = (int(name) for name in row.name.split(" to "))
                period = (last - first + 1) // int(row.kind.rpartition("×")[2])
                for _ in range(first, last + 1):
                    unfolded.append(unfolded[-period])
            else:
                unfolded += [row.kind] * row.times
        assert unfolded == kinds


# ---------------------------------------------------------------------------------------------------------------------
# Beside the sinks


def test_progress_lists_no_layers_and_takes_no_look(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(made(), make_batches(4), plugins=[Monitor("1 updates", histograms=True), Progress("1 h"), Clip()])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["epoch", "done"]
    assert "grad_norm/before" in lines[0]
    assert "monitor" not in "".join(lines)


def test_jsonl_has_the_numbers_and_leaves_the_rest_out(tmp_path: Path) -> None:
    fit(made(), make_batches(2), plugins=[Monitor("1 updates", histograms=True), JSONL()], run_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "monitor/grad_norm" in line] == [1, 2]
    assert not [name for line in lines for name in line if "histogram" in name or name == "model"]


# ---------------------------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": "often"}, r"monitor\.every: 'often' is not an interval"),
        ({"histograms": "often"}, r"monitor\.histograms: 'often' is not an interval"),
        ({"depth": 0}, r"monitor\.depth is 0; it must be at least 1"),
        ({"vanishing": 0.0}, r"monitor\.vanishing is 0; it must be between 0 and 1"),
        ({"exploding": -1.0}, r"monitor\.exploding is -1; it must be above 0"),
        ({"small": 0.0}, r"monitor\.small is 0; it must be between 0 and 1"),
        ({"dead": 1.0}, r"monitor\.dead is 1; it must be between 0 and 1"),
        ({"saturated": 2.0}, r"monitor\.saturated is 2; it must be between 0 and 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Monitor(**options)


def test_one_plugin_serves_several_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plugin = Monitor("2 updates")
    for _ in range(2):
        keep = watched(made(), make_batches(2), monitor=plugin)
        assert keep.updates == [2]
    assert caplog.text.count("monitor: the model") == 2


def test_another_process_looks_but_does_not_talk(caplog: pytest.LogCaptureFixture) -> None:
    class SecondRank(forge.Plugin):
        @forge.hookimpl
        def forge_setup_env(self) -> Env:
            return second_rank()

    caplog.set_level(logging.INFO)
    fit(
        Net(mlp(nn.Sigmoid, 12)),
        vectors(),
        plugins=[Monitor("15 updates"), SecondRank()],
        max_epochs=None,
        max_updates=15,
    )
    assert caplog.text == ""


def test_tiny_task_is_left_as_it_was() -> None:
    task = TinyTask()
    fit_tiny([Monitor("1 updates", histograms=True)], task=task)
    assert hooks_on(task) == 0
    assert all(p.grad is None for p in task.parameters())
