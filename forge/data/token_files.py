"""tokenize_to_memmap: write the tokens of text files as one raw file, which TokenStream maps."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from forge.data.tokens import TOKEN_TYPES
from forge.errors import DataError, did_you_mean
from forge.util.files import atomic_write

CHUNK = 1 << 20
"""Characters that are read at once."""
LONGEST = 16
"""Chunks without a place to cut, after which the text is cut anyway."""


def tokenize_to_memmap(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    tokenizer: Any,
    out: str | os.PathLike[str],
    *,
    dtype: Literal["uint16", "uint32"] = "uint16",
    end: int | None = None,
    encoding: str = "utf-8",
    chunk: int = CHUNK,
    tell: Callable[[int], Any] | None = None,
) -> Path:
    """Write the tokens of text files, in the order given, to `out`; return its path.

    ::

        import tiktoken

        path = tokenize_to_memmap("corpus/*.txt", tiktoken.get_encoding("gpt2"), "train.bin", end=50256)
        train = TokenStream(path, window=1024, batch_size=16)

    `tokenizer` is a function from a text to numbers, or what tiktoken, tokenizers and transformers provide; special
    tokens are not added, but for `end`, one after each file. `str.encode` gives bytes. A path may be a pattern; its
    files are sorted.

    Files are read piece by piece and never held whole. A piece ends before a single blank between two letters or
    signs, where the tokenizers of GPT-2 and its successors begin a new word too: the tokens are those of the whole
    text. `out` appears when it is complete; an interrupted call leaves an older one as it was. The same files and
    tokenizer give the same bytes. `tell` is called with the number of tokens so far.
    """
    if dtype not in TOKEN_TYPES:
        raise DataError(f"tokenize_to_memmap: dtype {dtype!r} is not supported.{did_you_mean(dtype, TOKEN_TYPES)}")
    if chunk < 1:
        raise DataError(f"tokenize_to_memmap: chunk is {chunk}; it must be at least 1.")
    paths, encode = _paths(files), as_encoder(tokenizer)
    target, count = Path(out), 0
    if target.resolve() in [path.resolve() for path in paths]:
        raise DataError(f"tokenize_to_memmap: out is {str(target)!r}, one of the files to read. Name another file.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as beside, open(beside, "wb") as file:
        for path in paths:
            for text in _pieces(path, encoding, chunk):
                count += _append(file, encode(text), dtype, path)
                if tell is not None:
                    tell(count)
            if end is not None:
                count += _append(file, [end], dtype, path)
    return target


def as_encoder(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Return the function from a text to numbers of a tokenizer, without special tokens."""
    if hasattr(tokenizer, "encode_ordinary"):  # tiktoken
        return tokenizer.encode_ordinary
    if hasattr(tokenizer, "convert_ids_to_tokens"):  # transformers
        return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if hasattr(tokenizer, "token_to_id") and hasattr(tokenizer, "encode"):  # tokenizers
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    if hasattr(tokenizer, "encode") and not isinstance(tokenizer, (str, type)):  # sentencepiece, a user's
        return tokenizer.encode
    if callable(tokenizer):
        return cast(Callable[[str], Sequence[int]], tokenizer)
    raise DataError(
        f"tokenize_to_memmap: a {type(tokenizer).__name__} is no tokenizer. Pass a function from a text to numbers, or "
        "an object with encode."
    )


def _paths(files: Any) -> list[Path]:
    given = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    found: list[Path] = []
    for name in map(os.fspath, given):
        matches = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        if not matches:
            raise DataError(f"tokenize_to_memmap: no file {name!r}. Check the path and the working directory.")
        found += [Path(match) for match in matches]
    if not found:
        raise DataError("tokenize_to_memmap got an empty list of files. Check the pattern that made it.")
    return found


def _pieces(path: Path, encoding: str, chunk: int) -> Iterator[str]:
    held = ""
    try:
        with open(path, encoding=encoding, newline="") as file:  # line ends stay as they are
            while more := file.read(chunk):
                held += more
                cut = _cut(held)
                if not cut and len(held) >= LONGEST * chunk:
                    cut = len(held)
                if cut:
                    yield held[:cut]
                    held = held[cut:]
    except UnicodeDecodeError as error:
        raise DataError(f"tokenize_to_memmap: {str(path)!r} is no {encoding} text: {error}. Pass encoding=.") from error
    if held:
        yield held


def _cut(text: str) -> int:
    """Return the place of the last single blank between two other characters; 0 without one."""
    place = text.rfind(" ", 1, len(text) - 1)
    while place > 0 and (text[place - 1].isspace() or text[place + 1].isspace()):
        place = text.rfind(" ", 1, place)
    return max(0, place)


def _append(file: Any, tokens: Sequence[int], dtype: str, path: Path) -> int:
    numbers = np.asarray(tokens if not isinstance(tokens, (bytes, bytearray)) else np.frombuffer(tokens, np.uint8))
    if not numbers.size:
        return 0
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise DataError(
            f"tokenize_to_memmap: the tokenizer returned a {type(tokens).__name__} of shape {numbers.shape} and type "
            f"{numbers.dtype}; it must return whole numbers in a row."
        )
    low, high, most = int(numbers.min()), int(numbers.max()), np.iinfo(dtype).max
    if low < 0 or high > most:
        fix = 'Pass dtype="uint32".' if low >= 0 and dtype == "uint16" else "Check the tokenizer."
        raise DataError(
            f"tokenize_to_memmap: {str(path)!r} gives the token {low if low < 0 else high}; {dtype} holds 0 to {most}. "
            + fix
        )
    file.write(numbers.astype(TOKEN_TYPES[dtype]).tobytes())
    return numbers.size
