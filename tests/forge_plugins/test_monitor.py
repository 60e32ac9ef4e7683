"""monitor: what it logs is what plain torch says, it names sick layers and no healthy ones, and it leaves no trace."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.errors import RecipeError
from forge.testing import TinyGAN, fit_tiny
from forge_plugins import Accumulate, Checkpoint, Clip, Guard, Monitor
from tests.support.monitor_kit import Keep, Spy, hooks_on, made, quiet, table, watched
from tests.support.tasks import Classifier, fit, make_batches


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

    def test_what_is_frozen_is_not_looked_at(self) -> None:
        class Frozen(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.net[0].requires_grad_(False)

        found = watched(made(Frozen), make_batches(1)).of(1)
        assert not [name for name in found if "/net.0." in name and not name.startswith("activation")]

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
            values = seen[0]
            assert found[f"activation/{name}/mean"] == pytest.approx(values.mean().item(), rel=1e-4, abs=1e-7)
            assert found[f"activation/{name}/std"] == pytest.approx(values.std().item(), rel=1e-5)
            assert found[f"activation/{name}/zeros"] == pytest.approx((values == 0).float().mean().item())
        assert found["activation/net.1/zeros"] > 0.1


def test_a_histogram_is_that_of_the_tensor() -> None:
    task = made()
    keep = watched(task, make_batches(1), monitor=quiet(histograms=True))
    drawn = keep.of(1)["histogram/weight/net.0.weight"]
    expected = forge.Histogram.of(task.net[0].weight)
    assert torch.equal(drawn.counts, expected.counts)
    assert torch.allclose(drawn.edges, expected.edges)
    assert keep.of(1)["histogram/gradient/net.2.bias"].counts.sum() == 3
    assert keep.of(1)["histogram/activation/net.1"].counts.sum() == 4 * 8


# ---------------------------------------------------------------------------------------------------------------------
# When


def test_it_looks_when_its_interval_ends() -> None:
    assert watched(made(), make_batches(7), monitor=quiet("3 updates")).updates == [3, 6]
    assert watched(made(), make_batches(4), monitor=quiet("1 epoch"), max_epochs=2).updates == [4, 8]


@pytest.mark.parametrize(("batches", "expected"), [(7, [*range(1, 8)]), (60, [*range(3, 61, 3)])])
def test_by_itself_it_looks_twenty_times(batches: int, expected: list[int]) -> None:
    assert watched(made(), make_batches(batches), monitor=Monitor(shapes=False)).updates == expected


@pytest.mark.parametrize(
    ("off", "gone"),
    [
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


def test_hooks_stand_only_while_an_update_is_looked_at() -> None:
    task = Spy()
    watched(task, make_batches(6), monitor=quiet("3 updates"))
    assert task.seen == [0, 0, 3, 0, 0, 3]
    assert hooks_on(task) == 0


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
# The table


class Stacked(forge.TaskModule):
    """Twelve equal blocks, a frozen layer, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) + 0 * self.unused.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


class TestTable:
    def test_the_table_has_shapes_and_memory_and_folds_equals(self, caplog: pytest.LogCaptureFixture) -> None:
        lines = [line.split("  ") for line in table(made(Stacked), caplog, make_batches(1))]
        rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
        assert rows[0] == ["module", "class", "output", "parameters", "weights", "activations"]
        assert rows[1:-1] == [
            ["Stacked", "Stacked", "4×3", "3,465 (144 frozen)", "13.5 KiB", "48 B"],
            ["stem", "Linear", "4×16", "144 frozen", "576 B", "256 B"],
            ["blocks", "ModuleList", "–", "3,264", "12.8 KiB", "–"],
            ["0 to 11", "Sequential ×12", "4×16", "272", "1.06 KiB", "256 B"],
            ["0", "Linear", "4×16", "272", "1.06 KiB", "256 B"],
            ["1", "ReLU", "4×16", "–", "–", "256 B"],
            ["unused", "Linear", "–", "6", "24 B", "–"],
            ["head", "Linear", "4×3", "51", "204 B", "48 B"],
        ]
        activations = 256 + 12 * 512 + 48
        assert " ".join(rows[-1]) == (
            "3,465 parameters, 3,321 of them trained. Weights and buffers take 13.5 KiB, activations "
            f"{activations / 1024:.3g} KiB for one micro-batch."
        )

    def test_the_table_takes_no_forward_of_its_own(self) -> None:
        task = Spy()
        fit(task, make_batches(4), plugins=[Monitor("1000 updates"), Accumulate(2)])
        assert len(task.seen) == 4
        assert task.seen[-1] == 0

    def test_a_resumed_run_does_not_show_it_again(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        for updates in (2, 4):
            saves = Checkpoint(every="2 updates", background=False)
            fit_tiny([Monitor(), saves], max_updates=updates, run_dir=tmp_path, resume="auto")
        assert caplog.text.count("monitor: the model") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Options


def test_an_interval_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"monitor\.every: 'often' is not an interval"):
        Monitor("often")
