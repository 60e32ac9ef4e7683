"""fsdp: what is left after a run, the state it saves, what one rank finds, and what is refused."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import forge
from forge.errors import PeerFailed, RecipeError, StackError, TaskError
from forge_plugins import AMP, EMA, Clip
from forge_plugins.fsdp import FSDP
from forge_plugins.fsdp.blocks import sharded_blocks
from tests.support.fsdp_kit import EXACT, Deep, Tied, close, deep, guarded, train, wide
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

# ---------------------------------------------------------------------------------------------------------------------
# What is left of it


def twice() -> dict[str, Any]:
    task = deep()
    note = task.stem.weight
    note.kind = "first"  # pyright: ignore[reportAttributeAccessIssue]
    own = {name: id(parameter) for name, parameter in task.named_parameters()}
    seen: dict[str, Any] = {}

    @forge.on("start")
    def look(trainer: forge.Trainer) -> None:
        first = trainer.task.stem.weight  # pyright: ignore[reportAttributeAccessIssue]
        seen.update(sharded=isinstance(first, DTensor), kind=first.kind, own=note.numel())  # pyright: ignore[reportAttributeAccessIssue]

    hooks = [len(vars(module)[kind]) for module in task.modules() for kind in vars(module) if "hooks" in kind]
    keys = [set(vars(module)) | {"trainer"} for module in task.modules()]
    plugin, average = FSDP(), EMA(0.5)
    trainer = forge.Trainer(
        max_epochs=1, seed=0, device="cpu", run_dir=False, log_every=2, plugins=[average, plugin, look]
    )
    trainer.fit(task, wide())
    seen["classes"] = {type(module).__name__ for module in task.modules()}
    seen["same"] = own == {name: id(parameter) for name, parameter in task.named_parameters()}
    seen["plain"] = all(type(parameter) is nn.Parameter for parameter in task.parameters())
    seen["hooks"] = hooks == [len(vars(m)[kind]) for m in task.modules() for kind in vars(m) if "hooks" in kind]
    seen["keys"] = keys == [set(vars(module)) | {"trainer"} for module in task.modules()]
    seen["first"] = {name: value.clone() for name, value in task.state_dict().items()}
    seen["forward"] = task(wide()[0][0]).detach()
    seen["val"] = trainer.validate(task, wide(1))
    seen["predicted"] = torch.cat(trainer.predict(task, wide(1)))
    trainer.fit(task, wide())
    seen["second"] = {name: value.clone() for name, value in task.state_dict().items()}
    average.apply_to(task)
    seen["averaged"] = {name: value.clone() for name, value in task.state_dict().items()}
    return seen


@pytest.mark.slow
def test_a_task_comes_back_as_it_was_and_can_be_used_again() -> None:
    task = deep()
    average = EMA(0.5)
    trainer = forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=False, log_every=2, plugins=[average])
    trainer.fit(task, wide())
    together = ranks(2)(twice)
    for rank in together:
        assert rank["sharded"]
        assert rank["kind"] == "first"
        assert rank["own"] == 0  # a parameter that is divided is not held whole beside it
        assert rank["classes"] == {"Deep", "Linear", "ModuleList", "Block", "LayerNorm"}
        assert rank["same"]
        assert rank["plain"]
        assert rank["hooks"]
        assert rank["keys"]
        for name, value in task.state_dict().items():
            torch.testing.assert_close(rank["first"][name], value, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(rank["forward"], task(wide()[0][0]), rtol=EXACT, atol=EXACT)
        assert rank["val"] == pytest.approx(trainer.validate(task, wide(1)))
        predicted = torch.cat(trainer.predict(task, wide(1)))
        torch.testing.assert_close(rank["predicted"], predicted, rtol=EXACT, atol=EXACT)
    trainer.fit(task, wide())
    trained = {name: value.clone() for name, value in task.state_dict().items()}
    average.apply_to(task)
    for rank in together:
        for name, value in trained.items():
            torch.testing.assert_close(rank["second"][name], value, rtol=EXACT, atol=EXACT)
            torch.testing.assert_close(rank["averaged"][name], task.state_dict()[name], rtol=EXACT, atol=EXACT)


def without_gathering() -> list[tuple[bool, int]]:
    task = deep()
    train(task, [FSDP(gather=False)])
    return [(isinstance(p, DTensor), p.to_local().numel()) for p in task.parameters() if isinstance(p, DTensor)]


def after_an_error() -> tuple[str, bool]:
    task = deep()

    @forge.on("step_end")
    def fail(step: forge.Step) -> None:
        raise RuntimeError("on purpose")

    with pytest.raises((RuntimeError, PeerFailed), match="on purpose"):
        train(task, [fail])
    return type(task.blocks[0]).__name__, any(isinstance(p, DTensor) for p in task.parameters())


@pytest.mark.slow
def test_without_gathering_each_rank_keeps_its_shards() -> None:
    first, second = ranks(2)(without_gathering)
    assert len(first) == len(list(deep().parameters()))
    assert [a + b for (_, a), (_, b) in zip(first, second, strict=True)] == [p.numel() for p in deep().parameters()]
    assert ranks(2)(after_an_error) == [("Block", True)] * 2


# ---------------------------------------------------------------------------------------------------------------------
# What one rank finds


class Poisoned(Deep):
    """A gradient that is infinite in one entry, which one rank holds, at the third update."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = 0

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        self.updates += 1
        metrics = super().training_step(batch)
        if self.updates == 3:
            self.head.weight.register_hook(_spoil)  # of what is gathered: its last row is rank 1's
        return metrics


def _spoil(gradient: Tensor) -> Tensor:
    spoilt = gradient.clone()
    spoilt[-1, -1] = math.inf
    return spoilt


class HalfSick(Deep):
    """A loss that is not finite on one rank alone, and finite gradients everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = 0

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        self.updates += 1
        metrics = super().training_step(batch)
        if self.updates == 3 and os.environ.get("RANK", "1") == "1":
            metrics["loss"] = metrics["loss"] + torch.tensor(math.inf, dtype=torch.float64)
        return metrics


@pytest.mark.parametrize("kind", some([HalfSick, Poisoned]))
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(kind: type[Deep]) -> None:
    alone, together = guarded(kind, "skip"), ranks(2)(guarded, kind, "skip")
    for rank in together:
        assert rank.pop("told") == alone["told"]
        close(rank, {key: value for key, value in alone.items() if key != "told"})
    for said in (guarded(kind, "stop"), *ranks(2)(guarded, kind, "stop")):
        what = "the gradient of head.weight" if kind is Poisoned else "the loss"
        assert what in said["error"]


# ---------------------------------------------------------------------------------------------------------------------
# Refused, and told


def test_a_loss_scaler_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(StackError, match=r"(?s)grad_scaler.*Use amp\.dtype=bf16, which needs none\."):
        forge.Trainer(max_epochs=1, device="cpu", run_dir=False, plugins=[AMP("fp16"), FSDP()]).fit(deep(), wide())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"min_size": -1}, "fsdp.min_size is -1"),
        ({"replicate": 0}, "fsdp.replicate is 0"),
        ({"watchdog": 0}, "fsdp.watchdog is 0"),
        ({"blocks": []}, "fsdp.blocks is an empty list"),
        ({"mixed_precision": "fp16"}, "mixed_precision is 'fp16'"),
    ],
)
def test_a_wrong_option_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        FSDP(**values)


def test_blocks_are_found_or_named_and_small_ones_stay() -> None:
    task = deep()
    every = ["blocks.0", "blocks.1", "blocks.2"]
    assert list(sharded_blocks(task, [], 0)) == every
    assert list(sharded_blocks(task, ["Block"], 0)) == every
    assert list(sharded_blocks(task, ["blocks.[01]", "head"], 0)) == ["blocks.0", "blocks.1", "head"]
    assert list(sharded_blocks(task, ["blocks", "head"], 30)) == every
    assert sharded_blocks(task, [], 10_000) == {}
    assert list(sharded_blocks(Tied(), [], 0)) == ["blocks.1"]
    with pytest.raises(RecipeError, match=r"fsdp\.blocks: 'blocsk'"):
        sharded_blocks(task, ["blocsk"], 0)


def test_what_torch_cannot_divide_is_refused_by_name() -> None:
    slanted = deep()
    slanted.stem.weight = nn.Parameter(torch.ones(6, 8, dtype=torch.float64).T)
    with pytest.raises(TaskError, match=r"stem\.weight of Deep is not"):
        forge.Trainer(max_epochs=1, device="cpu", run_dir=False, plugins=[FSDP()]).fit(slanted, wide())
    hollow = deep()
    hollow.extra = nn.Parameter(torch.ones(0, 8, dtype=torch.float64))
    with pytest.raises(TaskError, match=r"fsdp: extra of Deep has no elements"):
        forge.Trainer(max_epochs=1, device="cpu", run_dir=False, plugins=[FSDP()]).fit(hollow, wide())


class Viewing(nn.Module):
    """Returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.tanh()).unflatten(-1, (2, 4)).flatten(-2)


class InPlace(Deep):
    """Changes what a block returned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Viewing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return self.head(x)


def fit_in_place(reshard: bool) -> dict[str, Any]:
    return train(deep(InPlace), [FSDP(reshard=reshard)])


def told_in_place() -> str:
    with pytest.raises((RuntimeError, PeerFailed)) as caught:
        fit_in_place(reshard=True)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_view_that_is_changed_in_place_is_explained() -> None:
    assert any("Write x = x + y, or set fsdp.reshard=false." in told for told in ranks(2)(told_in_place))
    alone = fit_in_place(False)
    for rank in ranks(2)(fit_in_place, False):
        close(rank, alone)


@pytest.mark.slow
def test_one_process_alone_trains_with_it_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "forge"):
        task = deep()
        forge.Trainer(max_epochs=2, seed=0, device="cpu", run_dir=False, plugins=[FSDP(min_size=100), Clip(0.5)]).fit(
            task, wide()
        )
    alone = train(deep(), [Clip(0.5)])["weights"]
    for name, value in task.state_dict().items():
        torch.testing.assert_close(value, alone[name], rtol=EXACT, atol=EXACT)
    assert "fsdp: 512 parameters in 1 shards; sharded separately: blocks.0-2, and the rest" in caplog.text
    assert not any(isinstance(module, FSDPModule) for module in task.modules())
