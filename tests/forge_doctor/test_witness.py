"""A witness writes down every tensor of a run in the order in which it was made; two records tell the first that
differs, and about how much."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import forge
from forge.testing import TinyGAN, TinyTask, assert_same_weights, fit_tiny
from forge.testing.trace import read_trace
from forge_doctor import witness as module
from forge_doctor.witness import CHUNK, PERIOD, TensorDifference, Witness, compare, eager_modules, fingerprint
from forge_plugins import Accumulate


def record(path: Path, updates: int = 6, plugins: Any = (), **options: Any) -> list[dict[str, Any]]:
    fit_tiny([*plugins, Witness(path, updates)], **options)
    return read_trace(path)


def kinds(line: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(event[0] for event in line["events"]))


def names(line: dict[str, Any], kind: str) -> list[str]:
    return [event[1] for event in line["events"] if event[0] == kind]


# -- what a run leaves ------------------------------------------------------------------------------------------------


def test_an_update_is_written_down_in_its_order(tmp_path: Path) -> None:
    first, second, *_ = record(tmp_path / "a")
    assert kinds(first) == ["first parameter", "first buffer"]
    order = ["batch", "rng before", "output", "loss", "gradient", "parameter", "buffer", "optimizer", "rng"]
    assert kinds(second) == order
    assert names(second, "output") == [
        f"net.{i} ({name})" for i, name in enumerate(["Linear", "BatchNorm1d", "ReLU", "Dropout", "Linear"])
    ] + ["net (Sequential)"]
    assert names(second, "batch") == ["micro-batch 0, batch[0]", "micro-batch 0, batch[1]"]


def test_gradients_come_in_the_order_of_the_backward_pass(tmp_path: Path) -> None:
    class TwoEnds(TinyTask):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3, 3)  # defined last, and used last
            self.first = nn.Linear(6, 6)  # defined after it, and used first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.net(self.first(x)))

    gradients = names(record(tmp_path / "a", task=TwoEnds())[1], "gradient")
    assert {*gradients[:2]} == {"last.weight", "last.bias"}
    assert {*gradients[-2:]} == {"first.weight", "first.bias"}


def test_the_run_ends_after_its_updates_and_is_not_changed(tmp_path: Path) -> None:
    plain, _ = fit_tiny([], max_updates=4)
    task, result = fit_tiny([Witness(tmp_path / "a", 4)])
    assert result.updates == 4
    assert_same_weights(task, plain)
    assert not any(part._forward_hooks for part in task.modules())


def test_two_equal_runs_leave_equal_records(tmp_path: Path) -> None:
    one, other, third = (record(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert len(one) == 7
    assert compare(one, other) is None
    difference = compare(one, third)
    assert difference is not None
    assert (difference.update, difference.kind) == (1, "rng before")


@pytest.mark.parametrize("task", [TinyGAN, TinyTask])
def test_several_optimizers_are_written_down_turn_by_turn(tmp_path: Path, task: Any) -> None:
    one, other = (record(tmp_path / name, plugins=[Accumulate(2)], task=task()) for name in "ab")
    assert compare(one, other) is None
    turns = [""] if task is TinyTask else ["generator, ", "discriminator, "]
    assert names(one[1], "loss") == [f"{turn}micro-batch {i}" for turn in turns for i in range(2)]


def test_an_optimizer_that_asks_again_is_followed(tmp_path: Path) -> None:
    class Closure(TinyTask):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    one, other = (record(tmp_path / name, 2, task=Closure()) for name in "ab")
    assert compare(one, other) is None
    assert len(names(one[1], "loss")) > 1


def test_what_is_thawed_later_is_seen_too(tmp_path: Path) -> None:
    task = TinyTask()
    frozen = task.get_parameter("net.0.weight").requires_grad_(False)

    @forge.on("step_end", mutates=True)
    def thaw(step: forge.Step) -> None:
        frozen.requires_grad_(True)

    _, first, second, *_ = record(tmp_path / "a", plugins=[thaw], task=task)
    assert "net.0.weight" not in names(first, "gradient")
    assert "net.0.weight" in names(second, "gradient")


def test_modules_that_are_compiled_are_left_alone(tmp_path: Path) -> None:
    task = TinyTask()
    task.get_submodule("net.3").compile(backend="eager")
    trainer = forge.Trainer(max_updates=1, plugins=[])
    trainer.task, trainer.model = task, task
    assert [name for name, _ in eager_modules(trainer)] == ["net", "net.0", "net.1", "net.2", "net.4"]
    task.net.compile(backend="eager")
    assert [name for name, _ in eager_modules(trainer)] == []


# -- compare ----------------------------------------------------------------------------------------------------------


def line(update: int, *events: Any, **hidden: str) -> dict[str, Any]:
    return {"update": update, "device": "cpu", "events": [list(event) for event in events], "hidden": hidden}


LOSS = ("loss", "micro-batch 0", "a", [1.5])
GRADIENT = ("gradient", "net.weight", "a", [3.0, 4.0])


def test_the_first_difference_is_named_with_what_was_equal() -> None:
    other = ("gradient", "net.weight", "b", [3.0, 4.5])
    found = compare([line(0, LOSS), line(1, LOSS, GRADIENT)], [line(0, LOSS), line(1, LOSS, other)])
    assert found is not None
    assert (found.update, found.kind, found.name, found.equal) == (1, "gradient", "net.weight", 2)
    assert found.share == pytest.approx(0.5 / math.hypot(3.0, 4.5))
    assert (
        str(found)
        == "at update 1, the gradient of net.weight is the first value that differs, by about 0.09 of its norm"
    )


def test_other_things_in_another_order_are_a_difference() -> None:
    found = compare([line(1, LOSS, GRADIENT)], [line(1, GRADIENT, LOSS)])
    assert found is not None
    assert found.kind == "order"
    assert "the loss (micro-batch 0) against the gradient of net.weight" in str(found)
    found = compare([line(1, LOSS)], [line(1, LOSS, GRADIENT)])
    assert "nothing against the gradient of net.weight" in str(found)


def test_a_run_that_ends_early_is_a_difference() -> None:
    found = compare([line(1, LOSS), line(2, LOSS)], [line(1, LOSS)])
    assert found is not None
    assert (found.update, found.kind, found.equal) == (2, "order", 1)


def test_attributes_that_differ_are_named_beside_it() -> None:
    assert compare([line(1, LOSS, at="1")], [line(1, LOSS, at="2")]) is None
    found = compare([line(1, LOSS, at="1")], [line(1, ("loss", "micro-batch 0", "b", [2.0]), at="2")])
    assert found is not None
    assert found.hidden == ["at"]


# -- fingerprints -----------------------------------------------------------------------------------------------------

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@given(st.integers(1, 3 * PERIOD), st.sampled_from(TYPES), st.integers(0, 2**31), st.data())
def test_tensors_of_equal_bits_and_no_others_have_one_digest(
    size: int, kind: torch.dtype, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(size, generator=generator) * 100).to(kind)
    assert fingerprint(tensor.clone()) == fingerprint(tensor)
    i, j = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    changed = tensor.clone()
    changed[i] = ~changed[i] if kind is torch.bool else changed[i] + 1
    if not torch.equal(changed, tensor):
        assert fingerprint(changed)[0] != fingerprint(tensor)[0]
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j], tensor[i]
    assert (fingerprint(swapped)[0] == fingerprint(tensor)[0]) == torch.equal(swapped, tensor)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_signs_count_even_of_zeros_and_however_many(kind: torch.dtype) -> None:
    seen = set()
    for count in range(5):
        tensor = torch.zeros(2 * PERIOD, dtype=kind)
        tensor[:: PERIOD // 2][:count] = -0.0
        seen.add(fingerprint(tensor)[0])
    assert len(seen) == 5


def test_type_and_shape_count() -> None:
    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(5), torch.zeros(4, dtype=torch.int32), torch.zeros(0)]
    assert len({fingerprint(tensor)[0] for tensor in zeros}) == 5


def test_how_a_tensor_lies_in_memory_does_not_count() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert fingerprint(tensor.t().contiguous().t()) == fingerprint(tensor)
    assert fingerprint(tensor.to_sparse()) == fingerprint(tensor)
    assert fingerprint(tensor.requires_grad_()) == fingerprint(tensor)


def test_large_tensors_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHUNK % PERIOD == 0
    tensor = torch.randn(5 * PERIOD + 7, generator=torch.Generator().manual_seed(0))
    digest, sketch = fingerprint(tensor)
    monkeypatch.setattr(module, "CHUNK", PERIOD)
    again = fingerprint(tensor)
    assert again[0] == digest
    assert again[1] == pytest.approx(sketch)


@given(st.integers(2, 3 * PERIOD), st.integers(0, 2**31), st.floats(1e-8, 1.0))
def test_sketches_are_about_as_far_apart_as_their_tensors(size: int, seed: int, far: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(size, generator=generator, dtype=torch.float64)
    other = one + far * torch.randn(size, generator=generator, dtype=torch.float64)
    true = float((one - other).norm() / max(one.norm(), other.norm()))
    said = TensorDifference(1, "output", "x", fingerprint(one)[1], fingerprint(other)[1], 0, []).share
    assert true / 4 < said < true * 4
