"""Two programs from one state: the first difference is named by its update, its path and its size."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forge.errors import ForgeError
from forge.testing import assert_same, first_difference, twin
from forge.twin.compare import differences, tensor_difference
from forge.twin.record import Record

Program = Callable[[Record], None]


def loop(change: Callable[[int, nn.Module, torch.Tensor], Any] = lambda update, model, loss: loss) -> Program:
    """A loop of one's own, in which `change` may plant something."""

    def program(record: Record) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters())
        record.watch(model, optimizer)
        for update in range(1, 5):
            loss = change(update, model, model(torch.randn(16, 4)).square().mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return program


def larger(update: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    return loss * 1.01 if update == 3 else loss


# -- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["here", "fork"])
def test_programs_begin_with_the_same_random_numbers_and_leave_them(start: Any) -> None:
    before = torch.get_rng_state()
    assert twin(loop(), loop(), start=start) is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("start", ["here", "fork"])
def test_the_first_of_what_differs_is_named(start: Any) -> None:
    found = twin(loop(larger), loop(), start=start)
    assert found is not None
    assert (found.update, found.path) == (3, "0.weight")
    assert found.kind == "the gradients"
    assert found.distance.relative == pytest.approx(0.01, rel=0.05)
    assert (
        str(found) == "at update 3, in the gradients (0.weight, 0.bias, 1.weight and 3 more): by about 0.01 of its norm"
    )


def touch_buffer(update: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    if update == 2:
        model.get_buffer("1.num_batches_tracked").add_(1)
    return loss


def draw(update: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    torch.rand(())
    return loss


@pytest.mark.parametrize(
    ("plant", "update", "path"),
    [(touch_buffer, 2, "1.num_batches_tracked"), (draw, 2, "0"), (larger, 3, "0.weight")],
)
def test_what_is_planted_in_a_loop_is_found(plant: Any, update: int, path: str) -> None:
    found = twin(loop(plant), loop())
    assert found is not None
    assert (found.update, found.path) == (update, path)


def test_a_tolerance_lets_small_differences_pass() -> None:
    assert twin(loop(larger), loop(), tolerance=0.05) is None
    assert twin(loop(larger), loop(), tolerance=0.001) is not None


def test_a_command_writes_its_record(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom forge.testing import Record\nrecord = Record(sys.argv[1])\n"
        "record.mark('sum', sum(map(float, sys.argv[2:])), update=1)\n"
    )
    command = [sys.executable, str(script), "{record}"]
    found = twin([*command, "1", "2"], [*command, "1", "3"])
    assert str(found) == "at update 1, in sum: 3.0 against 4.0"
    with pytest.raises(ForgeError, match=r"(?s)exit code 1.*could not convert"):
        twin([*command, "x"], [*command])
    with pytest.raises(ForgeError, match=r"by the word '\{record\}'"):
        twin([*command[:2]], command)
    with pytest.raises(ForgeError, match="There is no record"):
        twin(tmp_path / "nowhere", command)


def test_a_failure_in_a_fork_is_told() -> None:
    def fails(record: Record) -> None:
        raise ValueError("the third batch is empty")

    with pytest.raises(ForgeError, match=r"(?s)in a copy.*the third batch is empty"):
        twin(fails, loop(), start="fork")


def test_a_fork_changes_nothing_here() -> None:
    numbers: list[int] = []
    assert twin(lambda record: numbers.append(1), lambda record: None, start="fork") is None
    assert numbers == []


# -- records ----------------------------------------------------------------------------------------------------------


def record_of(*marks: tuple[int, str, Any], **options: Any) -> Record:
    record = Record(**options)
    for update, path, value in marks:
        record.mark(path, value, update=update)
    return record


def test_what_only_one_of_two_has_differs() -> None:
    short, long = record_of((1, "a", 1), (1, "c", 3)), record_of((1, "a", 1), (1, "b", 2), (1, "c", 4))
    assert str(first_difference(long, short)) == "at update 1, in b: only the first has it"
    assert str(first_difference(short, long)) == "at update 1, in b: only the second has it"


def test_the_order_of_points_in_an_update_makes_no_difference() -> None:
    assert first_difference(record_of((1, "a", 1), (1, "b", 2)), record_of((1, "b", 2), (1, "a", 1))) is None


def test_a_point_that_is_passed_twice_is_compared_twice() -> None:
    one, other = record_of((1, "a", 1), (1, "a", 2)), record_of((1, "a", 1), (1, "a", 3))
    assert str(first_difference(one, other)) == "at update 1, in a: 2 against 3"
    assert len([*differences(one.marks, other.marks)]) == 1


def test_all_of_a_kind_that_differ_in_an_update_are_named() -> None:
    one, other = Record(), Record()
    for record, value in ((one, 1.0), (other, 2.0)):
        record.mark("", {"a": value, "b": value, "c": 0}, update=4, kind="the weights")
    assert str(first_difference(one, other)) == "at update 4, in the weights (a, b): 1.0 against 2.0"


def test_a_value_aside_is_the_cause_of_what_differs_after_it() -> None:
    def record(batch: int, count: int, loss: float) -> Record:
        found = record_of((2, "batch", batch))
        found.mark("count", count, aside=True)
        found.mark("loss", loss)
        return found

    right = record(1, 1, 1.0)
    found = [first_difference(record(*odd), right) for odd in ((2, 2, 2.0), (1, 2, 2.0), (1, 1, 2.0), (1, 2, 1.0))]
    assert [(each.path, each.aside) for each in found if each] == [
        ("batch", False),
        ("count", False),
        ("loss", False),
        ("count", True),
    ]
    assert first_difference(record_of((2, "batch", 1), (2, "loss", 1.0)), right) is None


def test_what_two_of_the_same_have_differently_is_not_compared() -> None:
    records = [record_of((1, "time", time), (1, "x", x)) for time, x in ((1, 1.0), (2, 1.0), (3, 2.0))]
    noise = [*differences(records[0].marks, records[1].marks)]
    assert first_difference(records[0], records[1], noise=noise) is None
    assert str(first_difference(records[0], records[2], noise=noise)) == "at update 1, in x: 1.0 against 2.0"


def test_kept_values_have_an_exact_size() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    other = tensor.clone()
    other[1, 1] += 0.5
    found = first_difference(record_of((1, "x", other), keep=True), record_of((1, "x", tensor), keep=True))
    assert str(found) == "at update 1, in x: 1 of 12 entries, by up to 0.5"


def test_a_value_that_changes_in_place_is_kept_as_it_was() -> None:
    tensor = torch.ones(2)
    record = record_of((1, "x", tensor), keep=True)
    tensor.zero_()
    assert first_difference(record, record_of((1, "x", torch.ones(2)), keep=True)) is None


def test_a_mark_that_a_kill_has_cut_is_left_out(tmp_path: Path) -> None:
    record = record_of((1, "a", 1), (1, "b", torch.ones(2)), path=tmp_path / "record")
    with (tmp_path / "record").open("a") as file:
        file.write('[1, "c')
    assert Record.read(tmp_path / "record").marks == record.marks
    assert Record.read(tmp_path / "nowhere").marks == []


# -- values -----------------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
APART: list[tuple[Any, Any, str]] = [
    (torch.zeros(2), -torch.zeros(2), "2 of 2 entries, by up to 0"),
    (torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0]), "1 of 2 entries, by up to inf"),
    (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 5]), "1 of 3 entries"),
    (torch.zeros(2), torch.zeros(3), "float32(2,) against float32(3,)"),
    (torch.zeros(2), torch.zeros(2).double(), "float32(2,) against float64(2,)"),
    (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64) * 1j, "2 of 2 entries, by up to 1.41"),
    ({"a": [1, 2.0]}, {"a": [1, 3.0]}, "2.0 instead of 3.0"),
    ({"a": "x"}, {"a": "y"}, "'x' instead of 'y'"),
    ({"a": 1}, {"a": True}, "1 instead of True"),
    ({"w": torch.zeros(3)}, {}, "only the first has it, a tensor of float32(3,)"),
    ({"n": 1}, {"n": 1, "w": torch.zeros(3)}, "only the second has it, a tensor of float32(3,)"),
    ({"a": torch.zeros(2)}, {"a": None}, "a tensor of float32(2,) instead of None"),
]


@pytest.mark.parametrize(("one", "other", "said"), APART)
def test_values_that_differ_are_told_with_their_size(one: Any, other: Any, said: str) -> None:
    found = first_difference(one, other)
    assert found is not None
    assert found.distance.text == said
    with pytest.raises(AssertionError, match="They differ in "):
        assert_same(one, other)


SAME: list[tuple[Any, Any]] = [
    (torch.tensor([NAN, INF]), torch.tensor([NAN, INF])),
    (torch.ones(3, 2), torch.ones(2, 3).t()),
    (torch.tensor([NAN, 1.0], dtype=torch.bfloat16), torch.tensor([NAN, 1.0], dtype=torch.bfloat16)),
    (torch.zeros(0, 4), torch.zeros(0, 4)),
    ({"a": NAN, "b": []}, {"b": [], "a": NAN}),
    (nn.Linear(1, 1, bias=False).requires_grad_(False), None),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_values_that_are_the_same_pass(one: Any, other: Any) -> None:
    assert_same(one, copy.deepcopy(one) if other is None else other)


def test_a_distance_is_relative_to_the_largest_entry() -> None:
    found = tensor_difference(torch.tensor([1.0, 100.0]), torch.tensor([2.0, 100.0]))
    assert found is not None
    assert (found.absolute, found.relative) == (1.0, 0.01)
    assert_same(torch.tensor([1.0, 100.0]), torch.tensor([2.0, 100.0]), tolerance=0.01)
    with pytest.raises(AssertionError, match="1 of 2 entries"):
        assert_same(torch.tensor([1.0, 100.0]), torch.tensor([2.0, 100.0]), tolerance=0.009)


@pytest.mark.parametrize("keep", [False, True])
def test_a_value_that_is_noise_is_held_against_the_largest_of_its_kind(keep: bool) -> None:
    one, other = Record(keep=keep), Record(keep=keep)
    for record, noise in ((one, 2e-6), (other, 1e-6)):
        values = {"weight": torch.tensor(10.0), "bias": torch.tensor(noise)}
        record.mark("", values, update=1, kind="the gradients")
    (found,) = differences(one.marks, other.marks, 1e-3)
    assert (found.path, found.distance.relative) == ("bias", pytest.approx(1e-4))
    assert first_difference(one, other, tolerance=1e-3) is None
    assert first_difference(one, other, tolerance=1e-5) is not None


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1000, 1001),
        (torch.tensor([1000]), torch.tensor([1001])),
        (torch.arange(9999), torch.arange(1, 10000)),
        ("a", "b"),
    ],
)
def test_no_tolerance_excuses_whole_numbers_and_texts(one: Any, other: Any, keep: bool) -> None:
    records = [record_of((1, "x", value), keep=keep) for value in (one, other)]
    assert first_difference(*records, tolerance=0.5) is not None


@pytest.mark.gpu
def test_a_host_and_a_device_agree_up_to_rounding() -> None:
    def on(device: str) -> Program:
        def program(record: Record) -> None:
            torch.manual_seed(0)
            model, batch = nn.Linear(8, 8), torch.randn(4, 8)
            model.to(device)
            record.watch(model)
            record.mark("loss", model(batch.to(device)).square().mean())

        return program

    assert twin(on("cpu"), on("cuda"), tolerance=1e-3) is None
