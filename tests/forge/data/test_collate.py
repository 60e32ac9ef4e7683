"""pad_collate: sequences of different lengths become one tensor, and it is plain what in it is padding."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forge
from forge.data.accumulation_windows import batch_size
from forge.data.collate import Padded, pad_collate
from forge.env import move


@given(
    rows=st.lists(st.lists(st.integers(-9, 9), max_size=7), min_size=1, max_size=6),
    side=st.sampled_from(["left", "right"]),
    multiple=st.integers(1, 5),
    fill=st.integers(-100, 100),
)
def test_the_mask_gives_back_what_went_in(rows: list[list[int]], side: Any, multiple: int, fill: int) -> None:
    values, lengths, mask = pad_collate(rows, side=side, multiple_of=multiple, value=fill)
    assert values.dtype == torch.int64
    assert [row[m].tolist() for row, m in zip(values, mask, strict=True)] == rows
    assert (values[~mask] == fill).all()
    assert lengths.tolist() == mask.sum(1).tolist() == [len(row) for row in rows]
    longest = max(map(len, rows))
    assert values.shape == mask.shape == (len(rows), -(-longest // multiple) * multiple)
    edge = mask.flip(1) if side == "left" else mask
    assert (edge.int().diff(dim=1) <= 0).all()  # data stands together, at its side


def test_samples_of_every_form_keep_their_form() -> None:
    Pair = namedtuple("Pair", "tokens label")
    t = torch.tensor
    tuples = pad_collate([(t([1, 2]), 0), (t([3]), 1)])
    assert type(tuples) is tuple
    assert tuples[0].values.tolist() == [[1, 2], [3, 0]]
    assert tuples[1].tolist() == [0, 1]
    named = pad_collate([Pair([1], 0), Pair([1, 2], 1)])
    assert (type(named), named.tokens.lengths.tolist(), named.label.tolist()) == (Pair, [1, 2], [0, 1])
    nested = pad_collate([{"a": {"b": [1]}, "c": ["x", 2.5]}, {"a": {"b": [1, 2]}, "c": ["y", 1.5]}])
    assert nested["a"]["b"].values.tolist() == [[1, 0], [1, 2]]
    assert nested["c"][0] == ["x", "y"]
    assert nested["c"][1].tolist() == [2.5, 1.5]


def test_only_the_first_dimension_is_padded() -> None:
    values, lengths, mask = pad_collate([torch.ones(1, 2, 3), torch.ones(4, 2, 3)], side="left", multiple_of=3)
    assert values.shape == (2, 6, 2, 3)
    assert mask.sum().item() * 6 == values.sum().item() == 30
    assert values[0, -1].sum() == 6
    assert lengths.tolist() == [1, 4]


def test_only_the_fields_that_are_named_are_padded() -> None:
    batch = [{"tokens": torch.ones(n), "image": torch.zeros(3, 4, 4)} for n in (1, 2)]
    collated = pad_collate(batch, fields=["tokens"])
    assert isinstance(collated["tokens"], Padded)
    assert collated["image"].shape == (2, 3, 4, 4)
    first, second = pad_collate([([1], [1, 2]), ([1, 2], [3, 4])], fields=[0])
    assert first.lengths.tolist() == [1, 2]
    assert [column.tolist() for column in second] == [[1, 3], [2, 4]]


def test_forge_counts_and_moves_what_comes_out() -> None:
    batch = pad_collate([{"id": "a", "tokens": [1, 2], "y": 0}, {"id": "b", "tokens": [1], "y": 1}])
    assert batch_size(batch) == batch_size(batch["tokens"]) == 2
    moved = move(batch, torch.device("meta"))["tokens"]
    assert type(moved) is Padded
    assert moved.mask.device.type == "meta"


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ([{"x": torch.zeros(2, 3)}, {"x": torch.zeros(1, 4)}], r"field 'x' .*\(2, 3\), \(1, 4\).*Only the first"),
        ([{"a": (0, torch.zeros(2, 3))}, {"a": (0, torch.zeros(2))}], r"field 'a.1' .*\(2, 3\), \(2,\)"),
        ([torch.zeros(2, 3), torch.zeros(2)], "the sample itself has sequences that differ"),
        ([{"a": 1}, {"b": 1}], r"sample 0 of the batch has the keys 'a', sample 1 has the keys 'b'"),
        ([(1, 2), (1, 2), (1,)], "sample 0 of the batch has 2 fields, sample 2 has 1 fields"),
        ([{"x": (1,)}, {"x": 1}], "field 'x' is not of one form.*1 fields, sample 1 has a int"),
        ([{"x": None}, {"x": None}], "field 'x' cannot be collated"),
        ([{"x": torch.zeros(())}, {"x": torch.zeros(2)}], "field 'x' cannot be collated"),
        ([], "empty batch"),
    ],
)
def test_samples_that_do_not_fit_together_are_refused_by_field(batch: list[Any], says: str) -> None:
    with pytest.raises(forge.DataError, match=says):
        pad_collate(batch)


def test_senseless_options_are_refused() -> None:
    with pytest.raises(forge.DataError, match="side is 'top'"):
        pad_collate([[1]], side="top")  # pyright: ignore[reportArgumentType]
    with pytest.raises(forge.DataError, match="multiple_of is 0"):
        pad_collate([[1]], multiple_of=0)
