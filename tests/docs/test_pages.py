"""Pages hold together: blocks have a language, data in them parse, links lead on, and what is named exists."""

from __future__ import annotations

import json
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

from forge import cli, registry
from forge.config.files import list_recipes
from tests.conftest import REPO
from tests.support.docs_pages import ALL_PAGES, DOCS, PAGES, all_blocks, blocks, parts, prose, read

LANGUAGES = {"python", "py", "bash", "yaml", "text", "console", "toml", "json", "cpp", "cmake", "diff"}
"""python and bash are run, py where its packages are installed (test_streams.py), yaml is loaded,
toml and json are parsed; a diff is made by a script (test_findings.py); text and console show what cannot be."""


@pytest.mark.parametrize("page", ALL_PAGES)
def test_every_block_has_a_language_that_tests_know(page: str) -> None:
    for block in all_blocks(page):
        assert block.language in LANGUAGES, f"{page}:{block.line}: {block.language or 'no language'}"
    # a fence that is not closed, or closed elsewhere, would hide code from all tests
    assert len(all_blocks(page)) * 2 == len(re.findall(r"^ *```", read(page), flags=re.MULTILINE)), page


@pytest.mark.parametrize("page", PAGES)
def test_toml_and_json_on_a_page_parse(page: str) -> None:
    for block in blocks(page, "toml"):
        tomllib.loads(block.text)
    for block in blocks(page, "json"):
        for document in filter(None, block.text.splitlines() if _is_jsonl(block.text) else [block.text]):
            json.loads(document)


def _is_jsonl(text: str) -> bool:
    return all(line.startswith("{") and line.endswith("}") for line in text.splitlines() if line)


@pytest.mark.parametrize(
    "page",
    [*ALL_PAGES, "plugins/example-lookahead/README.md", "plugins/example-image-sampler/README.md", "CHANGELOG.md"],
)
def test_every_link_leads_somewhere(page: str) -> None:
    for target, _, anchor in (link.partition("#") for link in links(page)):
        path = (REPO / page).parent.joinpath(target) if target else REPO / page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{target}#{anchor}"


def links(page: str) -> list[str]:
    """Links and pictures that stay in the repository."""
    text = prose(page)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href|srcset)="([^"]+)"', text)
    return [link for link in found if "://" not in link]


def anchors(path: Path) -> set[str]:
    """The headings of a page as GitHub and the site link to them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_that_is_named_exists(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", read(page))) <= targets


def test_every_page_is_in_the_index() -> None:
    pages = {*(path.name for path in DOCS.glob("*.md")), "deployment/index.md"} - {"index.md"}
    assert pages <= {link.partition("#")[0] for link in links("docs/index.md")}


def test_nothing_is_left_to_measure() -> None:
    marker = re.compile(r"TO MEASURE|^ *[A-Z]{6,}$", flags=re.MULTILINE)  # or a word that stands for a table
    assert [page for page in PAGES if marker.search(read(page))] == []


def test_every_recipe_and_its_page_is_in_the_overview() -> None:
    overview = read("docs/recipes/index.md")
    named = set(re.findall(r"^\| \[?`(\w+)`", overview, flags=re.MULTILINE))
    assert named == {name for name, recipe in list_recipes().items() if recipe.path.is_relative_to(REPO)}
    for path in (DOCS / "recipes").glob("*.md"):
        assert path.name == "index.md" or f"]({path.name})" in overview, path.name


@pytest.mark.parametrize("verb", [words for verb in cli.verbs() for words in (verb, *cli.additions(verb))])
def test_the_examples_in_a_verbs_help_parse(verb: str) -> None:
    parser = cli.module_of(verb).parser()
    # what stands behind two spaces is said about the command
    lines = [line.strip().partition("  ")[0] for line in (parser.epilog or "").splitlines()]
    for words in (words for line in lines if line.startswith(f"forge {verb} ") for words in parts(line)):
        if words[:2] == ["forge", verb]:
            command, rest = cli.command_of(words[1:])  # a package may add to a verb
            cli.module_of(command).parser().parse_intermixed_args(rest)


def test_pages_that_scripts_write_are_known() -> None:
    assert registry.installed("plugin").keys() >= {path.stem for path in (DOCS / "plugins").glob("[!R]*.md")}


def test_the_names_of_the_reference_are_there() -> None:
    names = re.findall(r"^::: ([\w.]+)$", read("docs/api.md"), flags=re.MULTILINE)
    assert [name for name in names if pkgutil.resolve_name(name).__doc__] == names != []
