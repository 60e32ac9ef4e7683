"""Hooks of mkdocs, so that the same Markdown works in the repository and as a site.

A page may link to any file of the repository: `../forge/contract/hooks.py`, `../benchmarks/README.md`. In the site such
a file becomes a page under source/. A navigation entry that ends in / stands for a folder: its index page, followed by
every page that the index links to, in that order. The search finds pages of the guide first, and no
files of the repository. The version is that of the package.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<!!)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^ *```.*?^ *```[ ]*$", flags=re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".md": "markdown"}
NOT_SHOWN = {".png", ".svg", ".gif"}
SHOWN: dict[str, Path] = {}
"""Pages under source/, each with the file that its links are relative to."""
SEARCHED = ("source/CHANGELOG.md", "source/CONTRIBUTING.md", "source/SECURITY.md")
"""What the search finds of source/."""
BOOST = {
    **{"source/": 0.1, "api.md": 0.3, "hooks.md": 0.3, "architecture.md": 0.5},
    "findings.md": 0.3,  # its headings are made of the words of every task
    "faq.md": 2,  # its headings are what people type
}
"""How much a page counts in the search beside a page of the guide."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace folders in the navigation by their pages; put the version under every page."""
    config.nav = [_expanded(entry, Path(config.docs_dir)) for entry in config.nav or []]
    project = tomllib.loads((Path(config.docs_dir).parent / "pyproject.toml").read_text())["project"]
    config.extra["forge_version"] = project["version"]
    config.copyright = f"forge {project['version']}, {project['license']}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make pages of the repository's files that pages link to, recursively."""
    docs = Path(config.docs_dir)
    root = docs.parent
    waiting = [(file.content_string, docs / file.src_uri) for file in files.documentation_pages()]
    while waiting:
        text, path = waiting.pop()
        for target in _outside(text, path, docs):
            uri = _source_uri(target, root)
            if files.get_file_from_path(uri) is None:
                content = _shown(target, root)
                files.append(File.generated(config, uri, content=content))
                SHOWN[uri] = target / "README.md" if target.is_dir() else target
                if SHOWN[uri].suffix == ".md":
                    waiting.append((content, SHOWN[uri]))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to those pages, and rank the page in the search."""
    docs = Path(config.docs_dir)
    root = docs.parent
    uri = page.file.src_uri
    if uri.startswith("source/") and uri not in SEARCHED:
        page.meta["search"] = {"exclude": True}
    elif boost := next((boost for start, boost in BOOST.items() if uri.startswith(start)), None):
        page.meta["search"] = {"boost": boost}
    here = SHOWN.get(uri, docs / uri)

    def moved(match: re.Match[str]) -> str:
        target = _target(match[1], here)
        if target is None or not target.is_relative_to(root):
            return match[0]
        if target.is_relative_to(docs):
            new = target.relative_to(docs).as_posix()
        elif target.exists() and target.suffix not in NOT_SHOWN:
            new = _source_uri(target, root)
        else:
            return match[0]
        return f"]({posixpath.relpath(new, posixpath.dirname(uri) or '.')}{match[2] or ''})"

    parts = _split(markdown)
    return "".join(text if is_code else LINK.sub(moved, text) for text, is_code in parts)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Show the version beside the site's name."""
    name = re.compile(rf'(<span class="md-ellipsis">\s*{config.site_name})(\s*</span>)')
    return name.sub(rf'\1 <small class="version">{config.extra["forge_version"]}</small>\2', output, count=1)


# ---------------------------------------------------------------------------------------------------------------------
# Parts


def _expanded(entry: Any, docs: Path) -> Any:
    if not isinstance(entry, dict):
        return entry
    ((title, value),) = entry.items()
    if isinstance(value, list):
        return {title: [_expanded(item, docs) for item in value]}
    if not value.endswith("/"):
        return entry
    index = next(path for name in ("index.md", "README.md") if (path := docs / value / name).exists())
    sections: list[Any] = [index.relative_to(docs).as_posix()]
    for part in re.split(r"^## ", index.read_text(), flags=re.MULTILINE):
        heading, _, text = part.partition("\n")
        names = dict.fromkeys(re.findall(r"\]\((\w[\w-]*\.md)\)", text))
        pages = [f"{value}{name}" for name in names if (docs / value / name).exists()]
        if pages:
            sections += [{heading: pages}]
    return {title: sections}


def _split(markdown: str) -> list[tuple[str, bool]]:
    """Return the text and the fenced code blocks, alternating."""
    parts, at = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [(markdown[at : fence.start()], False), (fence[0], True)]
        at = fence.end()
    return [*parts, (markdown[at:], False)]


def _target(link: str, here: Path) -> Path | None:
    if "://" in link or link.startswith(("#", "mailto:")):
        return None
    return (here.parent / link).resolve()


def _outside(text: str, path: Path, docs: Path) -> list[Path]:
    """Return the files of the repository outside docs/ that a page links to."""
    links = [link for part, is_code in _split(text) if not is_code for link, _ in LINK.findall(part)]
    found = [target for link in links if (target := _target(link, path)) is not None and target.exists()]
    return [
        target
        for target in found
        if target.is_relative_to(docs.parent) and not target.is_relative_to(docs) and target.suffix not in NOT_SHOWN
    ]


def _source_uri(target: Path, root: Path) -> str:
    """Return the page of a file. A README becomes its folder's page: mkdocs would make a section of an index page."""
    shown = target.parent if target.name == "README.md" else target
    name = shown.relative_to(root).as_posix() if shown != root else root.name
    return f"source/{name}" if shown.suffix == ".md" else f"source/{name}.md"


def _shown(target: Path, root: Path) -> str:
    name = target.relative_to(root).as_posix()
    if target.is_dir():
        readme = target / "README.md"
        return readme.read_text() if readme.exists() else f"# {name}\n"
    text = target.read_text()
    if target.suffix == ".md":
        return text
    return f"# {name}\n\n````{LANGUAGES.get(target.suffix, 'text')}\n{text}\n````\n"
