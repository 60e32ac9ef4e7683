"""The page of hooks and the picture of the rhythm are what forge/contract/hooks.py says."""

from __future__ import annotations

import re

from forge.contract.stack import SPECS
from tests.conftest import REPO
from tests.support.docs_pages import load_script


def test_the_page_of_hooks_is_the_contract() -> None:
    made = load_script("make_hooks").page()
    assert (REPO / "docs" / "hooks.md").read_text() == made, "python docs/make_hooks.py writes docs/hooks.md again"
    assert re.findall(r"^### (\w+)$", made, flags=re.MULTILINE) == list(SPECS)


def test_the_picture_of_the_rhythm_is_the_contract() -> None:
    picture = (REPO / "docs" / "pictures" / "rhythm.svg").read_text()
    assert picture == load_script("make_rhythm").svg(), "python docs/make_rhythm.py draws rhythm.svg again"
