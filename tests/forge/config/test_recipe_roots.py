"""Where data is looked for: the recipe's root, then $FORGE_DATA, then the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_recipes.roots import data_root


def test_a_root_that_is_given_wins(small_data: Path, tmp_path: Path) -> None:
    assert data_root(str(tmp_path), "FashionMNIST") == tmp_path / "FashionMNIST"


def test_forge_data_is_used_for_what_is_in_it(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_root(None, "FashionMNIST") == small_data / "FashionMNIST"
    assert data_root(None, "else") == tmp_path / "forge" / "else"


def test_without_either_it_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORGE_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert data_root(None, "FashionMNIST") == Path.home() / ".cache" / "forge" / "FashionMNIST"
    assert data_root("~/mine", "FashionMNIST") == Path.home() / "mine" / "FashionMNIST"
