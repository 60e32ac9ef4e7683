"""The list of public names is that of the code; files of a newer version are told."""

from __future__ import annotations

import difflib

import pytest

from forge.version import newer
from tests.truth import public


def test_the_list_is_that_of_the_code() -> None:
    listed, now = public.LIST.read_text(encoding="utf-8"), public.text(public.names())
    changed = "\n".join(difflib.unified_diff(listed.splitlines(), now.splitlines(), "listed", "now", n=0, lineterm=""))
    assert not changed, f"{changed}\nSay it in CHANGELOG.md, then: python -m tests.truth.public"


def test_a_newer_format_is_told_in_one_line() -> None:
    assert newer(3, 2, "runs/a") == "runs/a has format version 3; this forge reads up to 2. Use a newer forge."
    assert [newer(version, 2, "") for version in (None, 1, 2, "3", True)] == [""] * 5


def test_a_run_of_a_newer_forge_is_read_with_a_warning(tmp_path) -> None:
    from forge.runs.folder import FORMAT, RunFolder

    (tmp_path / "card.json").write_text('{"format": "forge-run", "version": 99, "seed": 7}')
    with pytest.warns(UserWarning, match=f"format version 99; this forge reads up to {FORMAT['version']}"):
        assert RunFolder(tmp_path).card["seed"] == 7
