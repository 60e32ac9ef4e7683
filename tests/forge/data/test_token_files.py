"""tokenize_to_memmap: the tokens of whole texts, read in pieces, as numpy reads them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.data import TokenStream, tokenize_to_memmap
from forge.data.token_files import _cut
from forge.errors import DataError
from tests.support.profiles import few

TEXT = (
    "It's 12  o'clock.\n\nThe bell, near by, rings\t twice; who's there?  Nay:\nanswer me. Stand, and unfold yourself! "
    * 20
)
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)


def words(text: str) -> list[int]:
    """A tokenizer to which only letters matter."""
    return [ord(letter) for letter in text]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "b.txt", tmp_path / "a.txt"]
    for number, path in enumerate(paths):
        path.write_bytes((TEXT[number * 7 :] + "é\r\n").encode())
    return paths


def read(path: Path, dtype: str = "<u2") -> list[int]:
    return np.fromfile(path, dtype).tolist()


def merged(pattern: str) -> Any:
    tiktoken: Any = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)}
    for pair in (b"th", b"he", b" t", b"\n\n", b"  ", b".\n", b"wh", b" a", b"an", b" an", b"e.", b":\n"):
        ranks[pair] = len(ranks)
    return tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<end>": len(ranks)})


@pytest.mark.parametrize("chunk", [1, 7, 100, 10**6])
@pytest.mark.parametrize("pattern", [GPT2, CL100K], ids=["gpt2", "cl100k"])
def test_pieces_give_tiktokens_tokens_of_the_whole(files: list[Path], pattern: str, chunk: int) -> None:
    tokenizer = merged(pattern)
    out = tokenize_to_memmap(files, tokenizer, files[0].with_name("out.bin"), end=999, chunk=chunk)
    wholes = [path.read_bytes().decode() for path in files]
    assert read(out) == [token for text in wholes for token in [*tokenizer.encode_ordinary(text), 999]]


def test_a_tokenizer_of_tokenizers_gives_the_same(files: list[Path]) -> None:
    library: Any = pytest.importorskip("tokenizers")
    tokenizer = library.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, show_progress=False)
    inner = tokenizer._tokenizer
    out = tokenize_to_memmap(files, inner, files[0].with_name("out.bin"), chunk=50)
    assert read(out) == [token for path in files for token in inner.encode(path.read_bytes().decode()).ids]


@few
@given(st.text(alphabet="ab \n\t.", max_size=60), st.integers(1, 20))
def test_a_cut_is_before_a_single_blank(text: str, chunk: int) -> None:
    place = _cut(text)
    assert place == 0 or (
        text[place] == " " and text[place - 1 : place + 2].split() == [text[place - 1], text[place + 1]]
    )
    later = [i for i in range(1, len(text) - 1) if text[i] == " " and not (text[i - 1] + text[i + 1]).isspace()]
    assert place == max([i for i in later if not text[i - 1].isspace() and not text[i + 1].isspace()], default=0)


def test_windows_of_the_file_feed_a_task(files: list[Path]) -> None:
    out = tokenize_to_memmap(files[0], words, files[0].with_name("out.bin"))
    plain = torch.tensor(words(files[0].read_bytes().decode()))
    inputs, targets = next(iter(TokenStream(out, window=8, batch_size=2, mode="sequential")))
    assert torch.equal(inputs, plain[:16].reshape(2, 8))
    assert torch.equal(targets, plain[1:17].reshape(2, 8))


def test_an_interrupted_call_leaves_the_older_file(files: list[Path]) -> None:
    out = files[0].with_name("out.bin")
    tokenize_to_memmap(files[0], words, out)
    before, calls = out.read_bytes(), iter(range(2))

    def breaks(text: str) -> list[int]:
        return [next(calls)]

    with pytest.raises((StopIteration, RuntimeError)):
        tokenize_to_memmap(files, breaks, out, chunk=50)
    assert out.read_bytes() == before
    assert {path.name for path in out.parent.iterdir()} == {"a.txt", "b.txt", "out.bin"}


@pytest.mark.parametrize(
    ("tokenizer", "options", "said"),
    [
        (lambda text: [70_000], {}, 'Pass dtype="uint32"'),
        (lambda text: [-1], {}, "Check the tokenizer"),
        (lambda text: [0.5], {}, "whole numbers in a row"),
        (3, {}, "no tokenizer"),
        (words, {"dtype": "int8"}, "not supported"),
        (words, {"encoding": "ascii"}, "Pass encoding="),
    ],
)
def test_mistakes_name_the_fix(files: list[Path], tokenizer: Any, options: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        tokenize_to_memmap(files, tokenizer, files[0].with_name("out.bin"), **options)
    assert not files[0].with_name("out.bin").exists()
