"""A tree comes back from a checkpoint as it went in: type, bits and shape; what cannot is refused by its path."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from forge.checkpoint import StoredCheckpoint, check_savable, write_checkpoint
from forge.checkpoint.tensors import DTYPES, NOTED, as_bytes
from forge.checkpoint.tree import MAX_DEPTH, join, split
from forge.errors import CheckpointError

ALL_DTYPES = [*DTYPES.values(), *NOTED.values()]
SHAPES = [(), (0,), (1,), (5,), (3, 4), (2, 0, 3), (2, 3, 4), (1, 1, 7)]


def same(a: Any, b: Any) -> bool:
    """Equal in type and in every bit, NaN and -0.0 included."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return bytes(as_bytes(plain(a))) == bytes(as_bytes(plain(b)))
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(type(x) is type(y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A tensor of random bits: NaNs with odd payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        return (data % 2).bool().reshape(shape)
    if dtype.is_complex:
        return torch.view_as_complex(data.view(dtype.to_real()).reshape(*shape, 2))
    return data.view(dtype).reshape(shape)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    tensor = tensor_of(draw(st.sampled_from(ALL_DTYPES)), draw(st.sampled_from(SHAPES)), draw(st.integers(0, 99)))
    layout = draw(st.sampled_from(["as it is", "transposed", "every other", "expanded", "conjugate"]))
    if layout == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1)
    if layout == "every other" and tensor.ndim:
        return tensor[..., ::2]
    if layout == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if layout == "conjugate" and tensor.is_complex():
        return tensor.conj()
    return tensor


texts = st.text(st.characters(exclude_categories=())) | st.sampled_from(["$state", "$dict", "\ud800\udc00", "a.b", ""])
floats = st.floats() | st.sampled_from([-0.0, math.nan, -math.nan, math.inf, -math.inf, 5e-324])
leaves = st.none() | st.booleans() | st.integers() | st.integers(-(2**200), 2**200) | floats | texts | tensors()
keys = texts | st.integers()


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    return lists | lists.map(tuple) | st.dictionaries(keys, inner, max_size=4)


trees = st.dictionaries(keys | st.just("model"), st.recursive(leaves, containers, max_leaves=15), max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(tree=trees)
def test_what_is_saved_is_what_is_loaded(tree: dict[Any, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "update-00000001", tree)
    assert same(StoredCheckpoint(tmp_path / "update-00000001").load(), tree)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_and_shape_keeps_its_bits(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tree = {"model": {"w": tensor_of(dtype, shape)}, "state": [tensor_of(dtype, shape, seed=1)]}
    write_checkpoint(tmp_path / "it", tree)
    assert same(StoredCheckpoint(tmp_path / "it").load(), tree)


@pytest.mark.parametrize(
    "value",
    [
        *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**5000, -(10**5000)),
        *(-0.0, math.nan, -math.inf, 1e308, 5e-324, 0.1),
        struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0],
        *("", "\x00", "é", "\ud800", "\ud800\udc00", "\U00010000", '"\\'),
        *((), (1,), [()], {}, {1: 2}, {"1": 2, 1: 3}, {-5: None}, {"$tuple": [1]}, {"$state": "w", "b": 1}),
        {"$dict": [[1, 2]]},
        {"$model": ["w", "complex64"]},
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) else f"{value.bit_length()} bits",
)
def test_plain_values_are_exact(value: Any) -> None:
    document = split({"value": value}).document
    assert same(join(document, "state.json", 0, lambda *_: None), {"value": value})


def test_an_ordered_dict_comes_back_as_a_dict() -> None:
    tree = {"model": OrderedDict(a=1)}
    assert same(join(split(tree).document, "state.json", 0, lambda *_: None), {"model": {"a": 1}})


def test_a_parameter_comes_back_as_a_tensor(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(3))
    write_checkpoint(tmp_path / "it", {"model": {"w": weight}})
    loaded = StoredCheckpoint(tmp_path / "it").load()["model"]["w"]
    assert type(loaded) is Tensor
    assert not loaded.requires_grad
    assert torch.equal(loaded, weight)


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    weight = torch.randn(100)
    parts = split(
        {"state": {"copy": weight}, "model": {"first": weight, "second": weight.view(100), "own": weight[:50]}}
    )
    assert list(parts.model) == ["first", "own"]
    assert not parts.state
    write_checkpoint(tmp_path / "it", {"model": {"first": weight, "second": weight}, "state": {"copy": weight}})
    loaded = StoredCheckpoint(tmp_path / "it").load()
    assert loaded["model"]["first"] is loaded["model"]["second"] is loaded["state"]["copy"]


def test_every_loaded_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "it", {"state": [torch.zeros(3), torch.zeros(3)]})
    first, second = StoredCheckpoint(tmp_path / "it").load()["state"]
    assert first.untyped_storage().nbytes() == first.nbytes
    assert first.data_ptr() != second.data_ptr()


def test_names_that_read_alike_stay_apart(tmp_path: Path) -> None:
    names = ("a.b", "__metadata__", "", "dtype", "shape", "data_offsets")
    tree = {"model": {**{name: torch.full((1,), i) for i, name in enumerate(names)}, "a": {"b": torch.ones(1)}}}
    write_checkpoint(tmp_path / "it", tree)
    assert same(StoredCheckpoint(tmp_path / "it").load(), tree)


def test_splitting_copies_no_tensor() -> None:
    weight = torch.randn(3)
    assert split({"model": {"w": weight}}).model["w"] is weight


Point = namedtuple("Point", "x")


@pytest.mark.parametrize(
    "value",
    [
        *(object(), b"bytes", {1, 2}, np.zeros(2), np.float64(1), np.int64(1), 1j, Path("x"), Point(1), Counter("a")),
        *(torch.Size([1]), torch.float32, range(3), type, lambda: None),
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).to_sparse(),
        nn.UninitializedParameter(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused_by_their_path(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"plugins\.mine\.1\.deep"):
        check_savable({"plugins": {"mine": [0, {"deep": value}]}})


@pytest.mark.parametrize("key", [None, True, 1.5, (1,), b"x"], ids=repr)
def test_other_keys_are_refused_by_their_path(key: Any) -> None:
    with pytest.raises(CheckpointError, match=r"plugins\.mine has the key"):
        check_savable({"plugins": {"mine": {key: 1}}})


@pytest.mark.parametrize("tree", [None, [1], torch.zeros(1), (1,)], ids=lambda tree: type(tree).__name__)
def test_a_tree_is_a_dict(tree: Any) -> None:
    with pytest.raises(CheckpointError, match="dict"):
        check_savable(tree)


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {"a": []}
    tree["a"].append(tree["a"])
    with pytest.raises(CheckpointError, match="contains itself"):
        check_savable(tree)


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {1: x}], ids=["list", "tuple", "dict"])
def test_the_deepest_tree_that_can_be_saved_can_be_loaded(wrap: Any, tmp_path: Path) -> None:
    value: Any = torch.ones(1)
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    write_checkpoint(tmp_path / "it", {"a": value})
    assert same(StoredCheckpoint(tmp_path / "it").load(), {"a": value})
    with pytest.raises(CheckpointError, match="nested deeper"):
        check_savable({"a": wrap(value)})


def test_a_list_in_place_of_a_tensor_is_refused_at_the_save() -> None:
    with pytest.raises(CheckpointError, match="as tensors"):
        check_savable({"order": list(range(400_000))})


@pytest.mark.slow
def test_too_many_names_for_a_header_are_refused_at_the_save(tmp_path: Path) -> None:
    tree = {"state": {f"{i:0200d}": torch.zeros(1) for i in range(20_000)}}
    with pytest.raises(CheckpointError, match=r"limit"):
        write_checkpoint(tmp_path / "it", tree)
    assert not list(tmp_path.iterdir())
