"""Sizes and paths as people read and type them."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.util.text import format_bytes, short_path


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1023 * 1024, "1023 KiB"),
        (200 << 20, "200 MiB"),
        (int(17.84 * 2**20), "17.8 MiB"),
        (3 << 30, "3 GiB"),
        (5 << 50, "5120 TiB"),
        (0.4, "0 B"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_a_size_has_three_digits_that_matter_and_its_unit(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_a_path_below_the_current_folder_is_told_from_there(empty_folder: Path) -> None:
    assert short_path(empty_folder / "runs" / "first") == "runs/first"
    assert short_path(str(empty_folder / "task.py")) == "task.py"
    assert short_path(empty_folder / "..odd" / "file") == "..odd/file"
    assert short_path(empty_folder) == "."


def test_any_other_path_is_told_as_it_is(empty_folder: Path) -> None:
    assert short_path(empty_folder.parent / "elsewhere") == str(empty_folder.parent / "elsewhere")
    assert short_path("../elsewhere") == "../elsewhere"
    assert short_path("<string>") == "<string>"
