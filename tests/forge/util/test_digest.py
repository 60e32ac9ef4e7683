"""One digest: equal for equal values wherever they are, and another for whatever differs."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from forge.util import digest as digests
from forge.util.digest import agrees, digest, lasting, sketch


@dataclass
class Point:
    x: int
    more: list[int] = field(default_factory=list)


class Plain:
    def __init__(self, x: Any):
        self.x = x


class Other(Plain):
    pass


DIFFERENT = [
    (np.zeros(3), np.ones(3)),
    (np.zeros(4), np.zeros((2, 2))),
    (np.zeros(1, np.int32), np.zeros(1, np.float32)),
    (np.float32(1), np.float32(2)),
    (np.array([Plain(1)]), np.array([Plain(2)])),
    (torch.zeros(2), -torch.zeros(2)),
    (Point(1), Point(2)),
    (Point(1, [2]), Point(1, [3])),
    ({1, 2}, {1, 3}),
    (Plain(1), Plain(2)),
    (Plain([np.zeros(1)]), Plain([np.ones(1)])),
    (Plain(1), Other(1)),
    (nn.Linear(2, 2), nn.Linear(2, 2)),
    ([1, 23], [12, 3]),
    ([1, [2]], [[1], 2]),
    ({"a": 1}, {"a": 2}),
    (object(), iter(())),
    (len, max),
    (Plain, Other),
    ([], None),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_a_digest_sees_what_differs(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    assert digest([one]) != digest([other])


@pytest.mark.parametrize("value", [pair[0] for pair in DIFFERENT if not isinstance(pair[0], type(len))])
def test_a_copy_has_the_same_digest(value: Any) -> None:
    assert digest(copy.deepcopy(value)) == digest(value)


def test_a_value_that_holds_itself_has_a_digest() -> None:
    one, other = Plain(1), Plain(2)
    one.me, other.me = one, other  # pyright: ignore[reportAttributeAccessIssue]
    assert digest(one) != digest(other)


SHAPES = {"small": (3, 5), "large": (701, 700), "empty": (0, 3), "one": (1, 1)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_order_of_memory_makes_no_difference(shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape)
    for same in (tensor.t().contiguous().t(), tensor.clone(), torch.stack([tensor, tensor])[1], tensor.to_sparse()):
        assert digest(same) == digest(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_one_entry_of_a_large_tensor_changes_its_digest(dtype: torch.dtype) -> None:
    one = torch.ones(2**21, dtype=dtype)
    other = one.clone()
    other[12345] = 0
    swapped = other.roll(1)
    assert len({digest(one), digest(other), digest(swapped)}) == 3


def test_large_tensors_of_other_signs_shapes_and_types_differ() -> None:
    zeros = torch.zeros(2**20)
    same_bits = [zeros, -zeros, zeros.view(2, -1), zeros.view(torch.int32)]
    assert len({digest(value) for value in same_bits}) == 4
    nans = torch.full((2**20,), math.nan)
    assert digest(nans) == digest(nans.clone())


def test_another_process_gives_the_same_digest() -> None:
    program = "import torch; from forge.util.digest import digest; "
    program += "print(digest([torch.arange(9e5), {'a', 'b', 'c'}, {'x': 1.5}]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest([torch.arange(9e5), {"a", "b", "c"}, {"x": 1.5}])


@given(st.integers(2, 9000), st.floats(1e-6, 1.0), st.integers(0, 2**31))
def test_sketches_are_about_as_far_apart_as_tensors(size: int, far: float, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    one = torch.randn(size, generator=numbers, dtype=torch.float64)
    other = one + far * torch.randn(size, generator=numbers, dtype=torch.float64)
    ratio = math.dist(sketch(one), sketch(other)) / float((one - other).norm())
    assert 0.2 < ratio < 2.5


@pytest.mark.parametrize("change", [1e-3, torch.randn(2**21, generator=torch.Generator().manual_seed(1)) * 1e-3])
def test_a_sketch_of_many_rows_estimates_a_shift_as_well_as_noise(change: float | Tensor, monkeypatch: Any) -> None:
    monkeypatch.setattr(digests, "CHUNK", 2**19)
    one = torch.randn(2**21, generator=torch.Generator().manual_seed(0))
    share = math.dist(sketch(one), sketch(one + change)) / math.hypot(*sketch(one))
    assert 0.3e-3 < share < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_device_gives_the_digest_of_the_host(shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape)
    assert digest(tensor.cuda()) == digest(tensor)
    assert sketch(tensor.cuda()) == pytest.approx(sketch(tensor))


def test_a_lasting_digest_of_another_form_tells_nothing() -> None:
    kept = lasting([torch.ones(3)])
    assert agrees(kept, [torch.ones(3)])
    assert not agrees(kept, [torch.zeros(3)])
    assert agrees("0123456789abcdef", [torch.zeros(3)])  # as older checkpoints have it
