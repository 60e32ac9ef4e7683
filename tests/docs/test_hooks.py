"""The page of hooks and the picture of the rhythm are what forge/contract/hooks.py says."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from forge.contract.stack import ACTIONS, SPECS
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


def test_the_picture_has_every_hook_in_its_color(picture: str) -> None:
    parts = [part for part in ElementTree.fromstring(picture).iter() if part.get("class")]
    kinds = [part.get("class") for part in parts]
    shown = {
        f"forge_{part.text}": kinds[i - 1] for i, part in enumerate(parts) if part.get("class") == "name" and part.text
    }
    assert SPECS.keys() - shown.keys() == {"forge_state_dict", "forge_load_state_dict"}  # whenever a state is needed
    assert shown == {hook: "action" if hook in ACTIONS else "event" for hook in shown}


def test_nothing_in_the_picture_is_wider_than_it(picture: str) -> None:
    module = load_script("make_rhythm")
    for note in re.findall(r'class="note" x="330" y="\d+">([^<]*)<', picture):
        assert 330 + 6.6 * len(note) < module.WIDTH, note
