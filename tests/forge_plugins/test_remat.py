"""remat: the same bits with less kept for backward, and a task that is handed back as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import forge
from forge.errors import RecipeError
from forge.testing import TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import Remat
from tests.support.profiles import covering

WIDTH = 16


class Block(nn.Module):
    """Dropout shows who draws random numbers, BatchNorm who runs a forward of their own."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.widen, self.norm = nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width)
        self.dropout, self.narrow = nn.Dropout(0.3), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.narrow(self.dropout(torch.relu(self.norm(self.widen(x)))))


class Deep(forge.TaskModule):
    """Repeated blocks between an embedding and a head."""

    autocast = False

    def __init__(self, blocks: int = 4):
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return {"loss": F.cross_entropy(self(x).float(), y)}

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Autocast(Deep):
    autocast = True


def deep(kind: type[Deep] = Deep, **options: Any) -> Deep:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(**options)


class Kept(forge.Plugin):
    """Bytes that autograd keeps after the forward of each micro-batch, by the hooks that torch gives for it.

    What a checkpointed block keeps of its inputs passes by these hooks, and is added by hand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.calls = 0

    @forge.hookimpl(wrapper=True)
    def forge_forward(self, step: forge.Step) -> Any:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = yield
        self.sizes.append(sum(kept.values()))
        return output


def kept_bytes(plugins: list[forge.Plugin], task: forge.TaskModule | None = None) -> int:
    kept = Kept()
    fit_tiny([*plugins, kept], task=task or deep(), train=tiny_batches([64]), val=tiny_batches([8]), max_updates=1)
    return kept.sizes[0]


# ---------------------------------------------------------------------------------------------------------------------
# The same bits


@pytest.mark.parametrize(
    ("kind", "options"),
    covering([Deep, Autocast], [{}, {"every": 2}, {"modules": "Block"}, {"modules": "blocks.[12]"}]),
)
def test_weights_and_buffers_are_bit_for_bit_those_without_it(kind: type[Deep], options: dict[str, Any]) -> None:
    plain, again = deep(kind), deep(kind)
    fit_tiny(task=plain)
    fit_tiny([Remat(**options)], task=again)
    assert_same(again, plain)


def test_a_buffer_that_steers_the_forward_is_the_same_twice() -> None:
    class Steered(Block):
        """Scales by how often it was called: a second run that saw the count of the first would give other bits."""

        def __init__(self) -> None:
            super().__init__()
            self.calls: Tensor
            self.register_buffer("calls", torch.ones(()))
            self.register_buffer("mask", torch.ones(1000))

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            self.calls.add_(1)
            return super().forward(x, scale=scale) * torch.log(self.calls)

    def make() -> Deep:
        task = deep()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            task.blocks = nn.ModuleList(Steered() for _ in range(2))
        return task

    plain, again = make(), make()
    fit_tiny(task=plain)
    fit_tiny([Remat()], task=again)
    assert_same(again, plain)


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def test_less_is_kept_for_backward() -> None:
    everything, half, nothing = kept_bytes([]), kept_bytes([Remat(every=2)]), kept_bytes([Remat()])
    assert nothing < half < everything
    # each of the four blocks keeps about five tensors of 64 x 64 floats
    assert everything - nothing > 4 * 4 * 64 * 64 * 4


# ---------------------------------------------------------------------------------------------------------------------
# Which blocks


def forwards(plugins: list[forge.Plugin], task: forge.TaskModule, **options: Any) -> list[str]:
    """The modules whose forward is another one during the second update."""
    changed: list[str] = []

    @forge.on("step_end")
    def look(step: forge.Step) -> None:
        changed[:] = [name for name, module in step.trainer.task.named_modules() if "forward" in vars(module)]

    fit_tiny([*plugins, look], task=task, max_updates=2, **options)
    assert not any("forward" in vars(module) for module in task.modules())
    return changed


class Nest(forge.TaskModule):
    """Stages of blocks in a plain attribute each, experts in the blocks, and lists that repeat no blocks."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([expert(x) for expert in self.experts]).sum(0)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Nest.Block(), Nest.Block(), nn.ReLU())
        self.second = nn.Sequential(Nest.Block(), Nest.Block(), Nest.Block())
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self.head(self.second(self.first(batch[0]))), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "modules", "taken"),
    [
        (Deep, None, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        (Deep, "Block", ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        (Deep, "blocks", ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        (
            Deep,
            ["blocks.1", "blocks.1.*", "Dropout"],
            ["blocks.0.dropout", "blocks.1", "blocks.2.dropout", "blocks.3.dropout"],
        ),
        (Deep, "*", ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]),
        (Nest, None, ["first.0", "first.1", "second.0", "second.1", "second.2"]),
        (TinyTask, "net", ["net"]),
    ],
)
def test_blocks_are_chosen_by_class_name_or_repetition(
    make: Callable[[], forge.TaskModule], modules: Any, taken: list[str]
) -> None:
    assert forwards([Remat(modules)], make()) == taken


def test_a_task_without_repeated_blocks_is_told_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    fit_tiny([Remat()], max_updates=1)
    assert "remat does nothing: TinyTask repeats no blocks. Name some" in caplog.text
    assert "remat.modules=net" in caplog.text


def test_a_pattern_without_a_match_is_refused() -> None:
    with pytest.raises(RecipeError) as refused:
        fit_tiny([Remat("Blok")], task=deep())
    for text in (
        "remat.modules: 'Blok' is neither",
        "Did you mean 'Block'?",
        "Classes: Linear, ModuleList, Block",
        "embed",
    ):
        assert text in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, r"remat\.every is 0; it must be at least 1"),
        ({"modules": []}, r"remat\.modules is an empty list"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Remat(**options)


# ---------------------------------------------------------------------------------------------------------------------
# Around a run


def test_evaluation_runs_the_blocks_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("checkpoint was called in evaluation")

    @forge.on("step_end")
    def from_now_on(step: forge.Step) -> None:
        monkeypatch.setattr("forge_plugins.remat.block.checkpoint", refuse)

    result = fit_tiny([Remat(), from_now_on], task=deep(), max_updates=1, validate_every="1 updates")[1]
    assert "val/loss" in result.metrics
