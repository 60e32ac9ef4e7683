"""`seed`: what it makes reproducible, when it is set, and the warning for weights that were drawn before it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import forge

SETTINGS: dict[str, Any] = {"max_updates": 2, "plugins": [], "run_dir": False, "device": "cpu"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs).relu())


class Plain(forge.TaskModule):
    def __init__(self, net: nn.Module | None = None):
        super().__init__()
        self.net = net or Net()

    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def fresh() -> Iterator[Callable[[], None]]:
    """Puts the generators in the state of a new process, in which nobody has set a seed."""

    def begin() -> None:
        torch.seed()
        random.seed()
        np.random.seed()

    begin()
    yield begin
    torch.manual_seed(0)


def batches() -> Any:
    torch_generator = torch.Generator().manual_seed(3)
    return [(torch.randn(4, 6, generator=torch_generator), torch.tensor([0, 1, 2, 0])) for _ in range(3)]


def warned(fit: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit()
    return [str(w.message) for w in seen if "before any seed" in str(w.message)]


def state(task: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in task.parameters()]).tolist()


# -- reproducible -----------------------------------------------------------------------------------------------------


def test_a_task_made_in_the_call_of_fit_is_reproducible(fresh: Callable[[], None]) -> None:
    ends = []
    for _ in range(2):
        fresh()
        task: list[Plain] = []
        forge.Trainer(**SETTINGS, seed=42).fit(task.append(Plain()) or task[0], batches())
        ends.append(state(task[0]))
    assert ends[0] == ends[1]


def test_forge_seed_makes_a_task_built_first_reproducible(fresh: Callable[[], None]) -> None:
    ends = []
    for _ in range(2):
        fresh()
        forge.seed(42)
        task = Plain()
        assert warned(lambda task=task: forge.Trainer(**SETTINGS, seed=42).fit(task, batches())) == []
        ends.append(state(task))
    assert ends[0] == ends[1]


def test_forge_seed_seeds_python_numpy_and_torch() -> None:
    draws = []
    for _ in range(2):
        forge.seed(7)
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]
    forge.seed(8)
    assert all(a != b for a, b in zip(draws[0], (random.random(), np.random.rand(), torch.rand(1).item()), strict=True))


def test_a_trainer_without_a_seed_touches_no_generator() -> None:
    forge.seed(5)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    forge.Trainer(**SETTINGS)
    forge.Trainer(**SETTINGS, seed=None)
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    assert before == after


# -- the warning ------------------------------------------------------------------------------------------------------


def test_weights_drawn_before_any_seed_are_warned_of_once(fresh: Callable[[], None]) -> None:
    task = Plain()
    trainer = forge.Trainer(**SETTINGS, seed=42)
    (text,) = warned(lambda: trainer.fit(task, batches()))
    assert "Plain" in text
    assert "net.first.weight" in text
    assert "forge.seed(42)" in text
    assert warned(lambda: trainer.fit(task, batches())) == []


def test_a_new_head_on_loaded_weights_is_warned_of_by_name(fresh: Callable[[], None]) -> None:
    task = Plain()
    task.net.get_submodule("first").load_state_dict(nn.Linear(6, 8).state_dict())
    (text,) = warned(lambda: forge.Trainer(**SETTINGS, seed=42).fit(task, batches()))
    assert "net.last.weight" in text
    assert "net.first" not in text


def test_a_task_made_on_fake_tensors_can_be_made(fresh: Callable[[], None]) -> None:
    with FakeTensorMode():
        assert next(Plain().parameters()).shape == (8, 6)


def _manual_seed() -> Plain:
    torch.manual_seed(1)
    return Plain()


def _seeded_inside() -> Plain:
    class Seeded(Plain):
        def __init__(self) -> None:
            torch.manual_seed(1)
            super().__init__()

    return Seeded()


def _large_seed() -> Plain:
    forge.seed(2**40)
    return Plain()


def _loaded(task: Plain | None = None) -> Plain:
    task = task or Plain()
    state = {name: torch.randn_like(value) for name, value in task.state_dict().items()}
    task.load_state_dict(state)
    return task


def _loaded_inside() -> Plain:
    net = Net()
    net.load_state_dict(Net().state_dict())
    return Plain(net)


def _loaded_after_the_trainer() -> Plain:
    task = Plain()
    forge.Trainer(**SETTINGS, seed=1)
    return _loaded(task)


def _constant() -> Plain:
    task = Plain()
    for parameter in task.parameters():
        nn.init.constant_(parameter, 0.5)
    return task


def _lazy() -> Plain:
    task = Plain(nn.Sequential(nn.LazyLinear(3)))
    forge.seed(1)
    task.net(torch.zeros(1, 6))
    return task


def _made_of_numbers() -> Plain:
    net = nn.Linear(6, 3, device="meta")
    net.weight, net.bias = nn.Parameter(torch.arange(18.0).reshape(3, 6) / 18), nn.Parameter(torch.zeros(3))
    return Plain(net)


@pytest.mark.parametrize(
    "make",
    [
        _manual_seed,
        _seeded_inside,
        _large_seed,
        _loaded,
        _loaded_inside,
        _loaded_after_the_trainer,
        _constant,
        _lazy,
        _made_of_numbers,
    ],
)
def test_no_warning_where_nothing_was_drawn_without_a_seed(make: Callable[[], Plain], fresh: Any) -> None:
    task = make()
    assert warned(lambda: forge.Trainer(**SETTINGS, seed=42).fit(task, batches())) == []


def test_no_warning_with_weights_or_without_a_seed(fresh: Callable[[], None], tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    torch.save(Plain().state_dict(), file)
    assert warned(lambda: forge.Trainer(**SETTINGS).fit(Plain(), batches())) == []
    task = Plain()
    assert warned(lambda: forge.Trainer(**SETTINGS, seed=2).fit(task, batches(), weights=file)) == []


def test_no_warning_where_a_run_resumes(fresh: Callable[[], None], tmp_path: Path) -> None:
    settings = {**SETTINGS, "plugins": ["checkpoint"], "run_dir": tmp_path / "run", "seed": 2}
    forge.Trainer(**settings).fit(Plain(), batches())
    fresh()
    task = Plain()
    more = {**settings, "max_updates": 4}
    assert warned(lambda: forge.Trainer(**more, resume="auto").fit(task, batches())) == []
