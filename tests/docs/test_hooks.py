"""The page of hooks and the picture of the rhythm are what forge/contract/hooks.py says."""

from __future__ import annotations

import re

import pytest

from forge.contract.stack import SPECS
from tests.conftest import REPO
from tests.support.docs_pages import load_script


def test_the_page_of_hooks_is_the_contract() -> None:
    made = load_script("make_hooks").page()
    assert (REPO / "docs" / "hooks.md").read_text() == made, "python docs/make_hooks.py writes docs/hooks.md again"
    assert re.findall(r"^### (\w+)$", made, flags=re.MULTILINE) == list(SPECS)


def test_every_hook_says_its_kind_and_who_implements_it() -> None:
    made = load_script("make_hooks").page()
    clip = made.partition("### forge_edit_grads")[2].partition("###")[0]
    assert "def forge_edit_grads(self, step: Step) -> None: ..." in clip
    assert "**Event.**" in clip
    assert "Implemented by [clip](plugins/clip.md)." in clip
    forward = made.partition("### forge_forward")[2].partition("###")[0]
    assert "Wrapped by [amp](plugins/amp.md)" in forward
    assert "| [clip](plugins/clip.md) |  |  | `edit_grads` | provides clip; capturable |" in made


@pytest.fixture(scope="module")
def picture() -> str:
    return (REPO / "docs" / "pictures" / "rhythm.svg").read_text()


def test_the_picture_of_the_rhythm_is_the_contract(picture: str) -> None:
    assert picture == load_script("make_rhythm").svg(), "python docs/make_rhythm.py draws rhythm.svg again"
