"""What is written down of the public surface; newer files."""

from __future__ import annotations

import pytest

from forge.version import newer
from tests.support.docs_pages import load_script

stability = load_script("make_stability")


def test_the_list_was_written_by_the_script_and_since_the_changelog_changed() -> None:
    first, *lines = stability.LIST.read_text(encoding="utf-8").splitlines()
    told = stability.digest([stability.CHANGELOG.read_text(encoding="utf-8")])
    assert first == stability.head(lines, told), "python docs/make_stability.py writes it"


def test_the_page_is_that_of_the_list() -> None:
    assert stability.PAGE.read_text(encoding="utf-8") == stability.page(), "python docs/make_stability.py writes it"


def test_a_change_needs_a_line_in_the_changelog(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    changelog, lines = tmp_path / "CHANGELOG.md", tmp_path / "public.txt"
    changelog.write_text("## 1.0.0\n")
    for name, value in {"CHANGELOG": changelog, "LIST": lines, "PAGE": tmp_path / "page.md"}.items():
        monkeypatch.setattr(stability, name, value)
    monkeypatch.setattr(stability, "page", lambda: "")
    offered = {"name": {"name forge.Trainer"}}
    monkeypatch.setattr(stability, "collected", lambda: (offered, []))
    stability.main()
    stability.main()  # nothing changed, nothing to say
    offered["name"] = {"name forge.Trainer", "name forge.Winner"}
    with pytest.raises(SystemExit, match=r"provisional name forge\.Winner"):
        stability.main()
    changelog.write_text("## 1.0.0\n\n- `forge.Winner`.\n")
    stability.main()
    changelog.write_text("## 1.0.0\n\n- `forge.Winner`, who wins.\n")  # an edit of before excuses no later change
    stability.main()
    offered["name"] = {"name forge.Trainer"}
    with pytest.raises(SystemExit, match=r"- provisional name forge\.Winner"):
        stability.main()
    assert lines.read_text().splitlines()[1:] == ["stable name forge.Trainer", "provisional name forge.Winner"]


# ---------------------------------------------------------------------------------------------------------------------
# Files of a newer version


def test_a_newer_format_is_told_in_one_line() -> None:
    assert newer(3, 2, "runs/a") == "runs/a has format version 3; this forge reads up to 2. Use a newer forge."
    assert [newer(version, 2, "") for version in (None, 1, 2, "3", True)] == [""] * 5


def test_a_run_of_a_newer_forge_is_read_with_a_warning(tmp_path) -> None:
    from forge.runs.folder import FORMAT, RunFolder

    (tmp_path / "card.json").write_text('{"format": "forge-run", "version": 99, "seed": 7}')
    with pytest.warns(UserWarning, match=f"format version 99; this forge reads up to {FORMAT['version']}"):
        assert RunFolder(tmp_path).card["seed"] == 7
