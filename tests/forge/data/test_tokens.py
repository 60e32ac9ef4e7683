"""TokenStream: windows of a token file of any length, wherever a run has to continue."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forge
from forge.data.tokens import TokenStream
from tests.forge.data.test_tensor import global_rng, same

MODES = ["random", "sequential", "shuffled"]


def write(path: Path, tokens: Any, dtype: str = "<u2") -> Path:
    np.asarray(tokens).astype(dtype).tofile(path)
    return path


@given(
    lengths=st.lists(st.integers(5, 60), min_size=1, max_size=3),
    window=st.integers(1, 4),
    size=st.integers(1, 7),
    mode=st.sampled_from(MODES),
    seed=st.integers(-3, 2**40),
    epoch=st.integers(0, 5),
    data=st.data(),
)
def test_seeking_gives_the_tail_of_the_straight_epoch(
    lengths: list[int], window: int, size: int, mode: Any, seed: int, epoch: int, data: st.DataObject
) -> None:
    stream = TokenStream([np.arange(n) for n in lengths], window, size, mode=mode, seed=seed)
    stream.set_epoch(epoch)
    before = global_rng()
    straight = list(stream)
    assert global_rng() == before
    batch = data.draw(st.integers(0, len(stream)))
    stream.seek(epoch, min(batch * size, stream.samples))
    assert same(list(stream), straight[batch:])
    assert same(list(stream), straight)
    assert len(straight) == len(stream)


@given(
    lengths=st.lists(st.integers(5, 60), min_size=1, max_size=4),
    window=st.integers(1, 4),
    mode=st.sampled_from(MODES),
    epoch=st.integers(0, 5),
)
def test_a_window_is_of_one_file_and_targets_one_token_later(
    lengths: list[int], window: int, mode: Any, epoch: int
) -> None:
    ends = np.cumsum([0, *lengths])
    tokens = [np.arange(a, b) for a, b in itertools.pairwise(ends)]  # a token is its own place
    stream = TokenStream(tokens, window, 3, mode=mode)
    stream.set_epoch(epoch)
    starts = []
    for inputs, targets in stream:
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        assert torch.equal(inputs + 1, targets)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(window))
        assert (
            np.searchsorted(ends, inputs[:, 0].numpy(), "right")
            == np.searchsorted(ends, targets[:, -1].numpy(), "right")
        ).all()
        starts += inputs[:, 0].tolist()
    assert starts == stream.sample_indices(epoch, 0, stream.samples)
    assert starts[1:3] == stream.sample_indices(epoch, 1, 3)
    if mode != "random":
        every = [a + i * window for a, n in zip(ends, lengths, strict=False) for i in range((n - 1) // window)]
        assert (starts if mode == "sequential" else sorted(starts)) == every


def test_modes_differ_between_epochs_and_seeds_as_they_should() -> None:
    def epochs(mode: Any) -> set[tuple[int, ...]]:
        found = set()
        for seed in (1, 2):
            stream = TokenStream(np.arange(400), 4, 8, mode=mode, seed=seed)
            found |= {tuple(stream.sample_indices(epoch, 0, stream.samples)) for epoch in range(3)}
        return found

    assert [len(epochs(mode)) for mode in MODES] == [6, 1, 6]


@pytest.mark.parametrize(("dtype", "stored"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_files_are_little_endian_and_the_largest_token_survives(tmp_path: Path, dtype: Any, stored: str) -> None:
    largest = np.iinfo(dtype).max
    path = write(tmp_path / "t.bin", [1, 258, largest, 4], stored)
    ((inputs, targets),) = list(TokenStream(path, 3, 1, mode="sequential", dtype=dtype))
    assert (inputs.tolist(), targets.tolist()) == ([[1, 258, largest]], [[258, largest, 4]])


def test_files_arrays_and_tensors_are_the_same_stream(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 60_000, 100)
    sources = [write(tmp_path / "t.bin", tokens), str(tmp_path / "t.bin"), tokens, torch.from_numpy(tokens)]
    first, *others = [list(TokenStream(source, 5, 4, seed=2)) for source in sources]
    assert all(same(first, other) for other in others)


def test_more_than_two_to_the_31_tokens_are_read_right(tmp_path: Path) -> None:
    count, path = 2**31 + 5000, tmp_path / "long.bin"
    with path.open("wb") as file:  # sparse: it takes no room
        file.truncate(2 * count)
        file.seek(2 * (2**31 + 2))
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    stream = TokenStream(path, 2, 1, mode="sequential")
    assert len(stream) == (count - 1) // 2
    stream.seek(0, 2**30 + 1)
    inputs, targets = next(iter(stream))
    assert (inputs.tolist(), targets.tolist()) == ([[7, 8]], [[8, 9]])
    assert max(TokenStream(path, 2, 1).sample_indices(0, 10**6, 10**6 + 2000)) > 2**31 - 10**8


def test_the_short_last_batch_is_given_or_dropped() -> None:
    tokens = np.arange(4 * 5 + 1)
    assert [len(x) for x, _ in TokenStream(tokens, 4, 2)] == [2, 2, 1]
    assert [len(x) for x, _ in TokenStream(tokens, 4, 2, drop_last=True)] == [2, 2]
    with pytest.raises(forge.DataError, match="less than one batch of 6"):
        TokenStream(tokens, 4, 6, drop_last=True)


def test_the_fingerprint_knows_the_data_and_the_window() -> None:
    stream = TokenStream([np.arange(30), np.arange(20)], 4, 2, mode="shuffled", seed=5)
    assert stream.fingerprint() == {
        "samples": 11,
        "batch_size": 2,
        "seed": 5,
        "order": "shuffled",
        "drop_last": False,
        "window": 4,
        "tokens": 50,
        "files": 2,
    }


@pytest.mark.slow
def test_a_pickled_stream_holds_no_tokens_and_goes_on(tmp_path: Path) -> None:
    stream = TokenStream(write(tmp_path / "t.bin", np.arange(50_000)), 8, 4, seed=1)
    straight = list(stream)
    stream.seek(0, 8)
    stored = pickle.dumps(stream)
    assert len(stored) < 2000
    assert same(list(pickle.loads(stored)), straight[2:])


def test_a_file_that_changes_its_size_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.bin", np.arange(100))
    stream = TokenStream(path, 4, 2)
    write(path, np.arange(50))
    with pytest.raises(forge.DataError, match=r"changed its size.*Open it again"):
        next(iter(stream))


def test_files_that_cannot_be_a_stream_are_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(forge.DataError, match=r"no file .*gone.bin.*Check the path"):
        TokenStream(tmp_path / "gone.bin", 4, 2)
    with pytest.raises(forge.DataError, match=r"no file"):
        TokenStream(tmp_path, 4, 2)
    (tmp_path / "odd.bin").write_bytes(b"12345")
    with pytest.raises(forge.DataError, match=r"odd.bin' has 5 bytes.*2-byte tokens.*dtype not uint16"):
        TokenStream(tmp_path / "odd.bin", 4, 2)
    with pytest.raises(forge.DataError, match=r"short.bin' has 4 tokens; a window of 4 needs 5.*smaller window"):
        TokenStream([np.arange(9), write(tmp_path / "short.bin", np.arange(4))], 4, 2)
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(forge.DataError, match="has 0 tokens"):
        TokenStream(tmp_path / "empty.bin", 4, 2)
    with pytest.raises(forge.DataError, match="empty list"):
        TokenStream([], 4, 2)


@pytest.mark.parametrize("source", [np.zeros(9), np.zeros((9, 9), int), torch.zeros(9, device="meta"), 5, [1, 2, 3]])
def test_sources_that_are_no_tokens_are_refused(source: Any) -> None:
    with pytest.raises(forge.DataError, match="one-dimensional arrays or host tensors of integers; it got a"):
        TokenStream(source, 4, 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": 0}, "window is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"mode": "randon"}, "unknown mode 'randon'.*'random'"),
        ({"dtype": "int64"}, "'int64' is not supported"),
        ({"mode": "shuffled", "samples": 3}, "samples is for mode='random'"),
        ({"samples": 0}, "samples is 0"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(forge.DataError, match=says):
        TokenStream(np.arange(99), **{"window": 4, "batch_size": 2, **options})
