"""The pages of findings are made from the code and the planted bugs."""

from __future__ import annotations

from tests.conftest import REPO
from tests.support.docs_pages import load_script


def test_the_pages_of_findings_are_up_to_date() -> None:
    made = load_script("make_findings").pages()
    stale = [path for path, text in made.items() if (REPO / "docs" / path).read_text() != text]
    assert not stale, "python docs/make_findings.py writes them"
    assert {path.name for path in (REPO / "docs" / "findings").glob("*.md")} == {
        path.removeprefix("findings/") for path in made if "/" in path
    }
