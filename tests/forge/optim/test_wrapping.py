"""Optimizers of other libraries: wrapping ones, schedule-free ones, those with strides of their own; schedules.

Each mechanism has a stand-in here.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import forge
from forge.checkpoint import StoredCheckpoint
from forge.errors import CheckpointError
from forge.optim.optimizers import Optimizers
from forge.testing import tiny_batches
from forge_plugins import Checkpoint
from tests.forge.snapshot.test_resume import die, live
from tests.forge.snapshot.test_resume_state import Built, ends_the_same
from tests.support.tasks import fit

# -- stand-ins --------------------------------------------------------------------------------------------------------


class Ahead(Optimizer):
    """timm's Lookahead: the state is the inner optimizer's; `state` of its own stays empty."""

    def __init__(self, base: Optimizer):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self._base_optimizer, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state = defaultdict(dict)
        for group in base.param_groups:
            group.setdefault("ahead_step", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._base_optimizer.step(closure)
        for group in self._base_optimizer.param_groups:
            group["ahead_step"] += 1
            for p in group["params"] if group["ahead_step"] % 3 == 0 else ():
                slow = self._base_optimizer.state[p].setdefault("slow", p.detach().clone())
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)

    def state_dict(self) -> Any:
        return self._base_optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._base_optimizer.load_state_dict(state_dict)
        self.param_groups = self._base_optimizer.param_groups


class Apart(Ahead):
    """pytorch_optimizer's Lookahead: two states side by side, one with pairs of numbers for keys."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._base_optimizer.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                slow.lerp_(p, 0.5)
                p.copy_(slow)

    def state_dict(self) -> Any:
        groups = enumerate(self.param_groups)
        kept = {(g, i): dict(self.state[p]) for g, group in groups for i, p in enumerate(group["params"])}
        return {"own": kept, "base": self._base_optimizer.state_dict(), "dtype": torch.float32}

    def load_state_dict(self, state_dict: Any) -> None:
        assert state_dict["dtype"] is torch.float32
        self._base_optimizer.load_state_dict(state_dict["base"])
        self.param_groups = self._base_optimizer.param_groups
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                self.state[p] = {key: value.clone() for key, value in state_dict["own"][g, i].items()}


class ByParameter(Apart):
    """An older form of it, with the parameters themselves for keys."""

    def state_dict(self) -> Any:
        return {"own": dict(self.state), "base": self._base_optimizer.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self._base_optimizer.load_state_dict(state_dict["base"])
        self.param_groups = self._base_optimizer.param_groups
        self.state.update({p: {k: v.clone() for k, v in item.items()} for p, item in state_dict["own"].items()})


class Duck:
    """schedulefree's wrapper: no torch Optimizer, only its methods."""

    def __init__(self, base: Optimizer):
        self.base = base

    param_groups = property(lambda self: self.base.param_groups)

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state)


class Forgetful(Ahead):
    def load_state_dict(self, state_dict: Any) -> None:
        """Restore nothing."""


class Broken(Ahead):
    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyError("step")


class Free(torch.optim.SGD):
    """Schedule-free SGD: trains at y, evaluates at x; the way from one to the other and back rounds."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.update(train_mode=False, k=0)

    def _swap(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = training

    def train(self) -> None:
        self._swap(True, 0.1)

    def eval(self) -> None:
        self._swap(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert group["train_mode"], "step in evaluation mode"
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                x = p.lerp(z, 1 - 1 / 0.9)
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                p.copy_(x.lerp(z, 0.1))


class Rotating(torch.optim.SGD):
    """Like SOAP: keeps a column-major matrix, and adds over it in the order of the memory."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.ndim == 2):
                q = self.state[p].setdefault("q", [torch.empty_strided((61, 61), (1, 61)).fill_(0.1)])[0]
                q.mul_(1 + p.grad.mean()).add_(torch.linspace(0, 1, 61 * 61).view(61, 61))
                p.sub_(p.grad * 1e-3 * q.reshape(-1).cumsum(0)[-1].sin() * q.T.sum())


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "inner state": lambda p: Ahead(torch.optim.AdamW(p, lr=0.01)),
    "two states": lambda p: Apart(torch.optim.AdamW(p, lr=0.01)),
    "parameters as keys": lambda p: ByParameter(torch.optim.AdamW(p, lr=0.01)),
    "no Optimizer": lambda p: Duck(torch.optim.AdamW(p, lr=0.01)),
    "two groups": lambda p: Apart(torch.optim.SGD([{"params": q, "lr": 0.1 / (i + 1)} for i, q in enumerate(p)], 0.1)),
    "wrapped twice": lambda p: Apart(Ahead(torch.optim.AdamW(p, lr=0.01))),
    "strides": lambda p: Rotating(p, lr=0.1),
    "strides inside": lambda p: Ahead(Rotating(p, lr=0.1)),
    "schedule-free": Free,
}


APART = {"no Optimizer"}
"""The kind that differs most from an optimizer of torch."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in APART)) for kind in WRAPPED]
)
def test_wrapping_optimizers_resume_exactly(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    ends_the_same(tmp_path, lambda: Built(WRAPPED[kind]), max_updates=6, max_epochs=None)
    assert "continues with" not in caplog.text  # counters in the groups are no options of the code's


def test_strides_of_state_come_back_as_they_were(tmp_path: Path) -> None:
    die(tmp_path, [Checkpoint(every="1 update")], 3, task=Built(WRAPPED["strides"]))
    found: list[Any] = []

    @forge.on("boundary")
    def look(trainer: forge.Trainer) -> None:
        found.extend(s["q"][0].stride() for s in trainer.optimizers[None].state.values() if "q" in s)

    live(tmp_path, [Checkpoint(every="1 update"), look], task=Built(WRAPPED["strides"]), max_updates=3, max_epochs=None)
    assert set(found) == {(1, 61)}


class Layered(forge.TaskModule):
    def __init__(self, memory_format: torch.memory_format):
        super().__init__()
        self.net = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)


def state_after(task: Layered, step: Callable[[Any], None]) -> tuple[Optimizers, Any]:
    made = Optimizers.from_task(torch.optim.SGD(task.parameters(), lr=0.1), task)
    step(made[None].state)
    return made, made.state_dict(task)


def test_state_that_lay_like_its_parameter_follows_it() -> None:
    """A user may add or drop channels-last on resume; a fused kernel needs equal strides."""
    then, now = Layered(torch.channels_last), Layered(torch.contiguous_format)
    weight = then.net.weight
    _, saved = state_after(
        then, lambda state: state[weight].update(a=weight.detach().clone(), b=torch.ones(4, 3, 3, 3))
    )
    resumed, _ = state_after(now, lambda state: None)
    resumed.load_state_dict(copy.deepcopy(saved), now)
    kept = resumed[None].state[now.net.weight]
    assert kept["a"].stride() == now.net.weight.stride()
    same = Layered(torch.channels_last)
    again, _ = state_after(same, lambda state: None)
    again.load_state_dict(copy.deepcopy(saved), same)
    kept = again[None].state[same.net.weight]
    assert kept["a"].stride() == same.net.weight.stride()
    assert kept["b"].is_contiguous()


@pytest.mark.parametrize(("make", "why"), [(Forgetful, "differs"), (Broken, "KeyError: 'step'")])
def test_what_cannot_be_restored_is_found_before_a_save(tmp_path: Path, make: Any, why: str) -> None:
    task = Built(lambda p: make(torch.optim.SGD(p, lr=0.1, momentum=0.9)))
    with pytest.raises(CheckpointError, match=rf"{make.__name__}.load_state_dict .*{why}"):
        live(tmp_path, [Checkpoint(every="1 epoch")], task=task)
    assert not list(tmp_path.glob("checkpoints/update-*"))


def test_without_checkpoints_such_an_optimizer_trains() -> None:
    fit(Built(lambda p: Broken(torch.optim.SGD(p, lr=0.1))), tiny_batches())


# -- schedule-free ----------------------------------------------------------------------------------------------------


def first_weight(task: nn.Module) -> torch.Tensor:
    return next(task.parameters())


def test_evaluation_export_and_checkpoint_are_averaged(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looks(Built):
        def validation_step(self, batch: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            seen.append((self.trainer.progress.update, self.net[0].weight.detach().clone()))  # pyright: ignore
            return super().validation_step(batch)

    def plain(evaluates: bool) -> Any:
        """The loop by hand, with x recomputed beside it."""
        task = Looks(Free)
        torch.manual_seed(3)
        optimizer = task.configure_optimizers()
        optimizer.train()
        for _ in range(2):
            for batch in tiny_batches():
                task.training_step(batch)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
        if evaluates:
            optimizer.eval()
        return task

    task = Looks(Free)
    live(tmp_path, [Checkpoint(every="1 epoch")], task=task, max_epochs=2)
    weight = plain(True).net[0].weight
    assert torch.equal(seen[-1][1], weight)
    assert torch.equal(first_weight(task), weight)  # what trainer.test(task) gets
    exported = forge.load_weights(Looks(Free), tmp_path / "weights.safetensors")
    assert exported is not None
    stored = StoredCheckpoint.find(tmp_path)
    assert torch.equal(stored.weights()["net.0.weight"], weight)
    training = stored.load()["optimizers"][""]["training"]["net.0.weight"]
    assert torch.equal(training, plain(False).net[0].weight)


@pytest.mark.slow
def test_evaluating_leaves_no_trace_in_the_training(tmp_path: Path) -> None:
    often, never = Built(Free), Built(Free)
    live(tmp_path / "often", [Checkpoint(every="1 update")], task=often, validate_every="1 update", max_epochs=2)
    live(tmp_path / "never", [Checkpoint(every="1 epoch")], task=never, validate_every=None, max_epochs=2)
    assert torch.equal(first_weight(often), first_weight(never))


# -- schedules --------------------------------------------------------------------------------------------------------


class Numbered:
    """timm's Scheduler: given the number of epochs or updates."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer

    def step(self, epoch: int, metric: Any = None) -> None:
        raise AssertionError("it is refused before")

    step_update = step


def test_a_schedule_that_must_be_told_how_far_the_run_is_is_refused_with_what_to_use() -> None:
    def make(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        return optimizer, Numbered(optimizer)

    with pytest.raises(forge.ForgeError, match=r"Numbered, which must be told.*torch\.optim\.lr_scheduler"):
        fit(Built(make), tiny_batches())


def test_a_schedule_may_drive_the_wrapped_optimizer() -> None:
    def make(parameters: Any) -> Any:
        inner = torch.optim.SGD(parameters, lr=0.1)
        return Ahead(inner), torch.optim.lr_scheduler.StepLR(inner, 1)

    assert fit(Built(make), tiny_batches()).metrics["lr"] < 0.1
