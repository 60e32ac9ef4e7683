"""The page of findings is made from the code and the planted bugs."""

from __future__ import annotations

from tests.conftest import REPO
from tests.support.docs_pages import load_script


def test_the_page_of_findings_is_up_to_date() -> None:
    made = load_script("make_findings").page()
    assert (REPO / "docs" / "findings.md").read_text() == made, "python docs/make_findings.py writes it"
