"""Write docs/hooks.md: every hook with its arguments and docstring, and which built-in plugins implement it.

    python docs/make_hooks.py

tests/docs/test_hooks.py fails when the page is out of date.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from pathlib import Path

from forge import registry
from forge.cli import plugin_page
from forge.contract import hooks
from forge.contract.plugin import Plugin
from forge.contract.stack import ACTIONS, ONE_BY_ONE, SPECS

PAGE = Path(__file__).parent / "hooks.md"
INTRODUCTION = """\
# Hooks reference

Every hook of forge: what it is for, when it is called, and which built-in plugins use it. This page is generated from
`forge/contract/hooks.py`, the contract between the Trainer and every plugin. To learn how to use hooks, start with
[writing plugins](writing-plugins.md).

![The rhythm of a run, with every hook in its place](pictures/rhythm.svg)

- An **action** runs exactly once. The Trainer has a default for it. A plugin **owns** the action if it implements it
  and returns something other than None; only one plugin may own it. Any number of plugins may **wrap** it.
- An **event** calls every plugin that implements it, in the order of the stack.

A method may take any subset of the hook's arguments, by name."""
PLUGINS = """\
## Hooks by plugin

Which hooks each built-in plugin owns, wraps or listens to, and what it declares to the stack. An instance may drop some
of them, depending on its options."""
SECTIONS = {
    "forge_configure": "Build",
    "forge_plan_step": "One update",
    "forge_prepare_batch": "Every stage",
    "forge_evaluate": "Around the updates",
    "forge_state_dict": "State, errors, the end",
}
"""The first hook of each section."""


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION, table(), *(part for hook in SPECS for part in described(hook)), PLUGINS, plugins()]
    return "\n\n".join(parts) + "\n"


def table() -> str:
    """Return every hook in one line."""
    rows = ["| hook | kind | what it is for |", "|---|---|---|"]
    rows += [f"| [`{hook}`](#{hook}) | {_kind(hook)} | {first_sentence(hook)} |" for hook in SPECS]
    return "\n".join(rows)


def described(hook: str) -> list[str]:
    """Return one hook: signature, kind, docstring, and the plugins that implement it."""
    head = [f"## {SECTIONS[hook]}"] if hook in SECTIONS else []
    kind = f"**{_kind(hook).capitalize()}.**"
    if hook in ONE_BY_ONE:
        kind += " Each plugin is called separately, so it cannot be wrapped."
    _, paragraphs = _docstring(hook)
    return [*head, f"### {hook}", f"```python\n{signature(hook)}\n```", kind, *paragraphs, *_implemented(hook)]


def signature(hook: str) -> str:
    """Return the hook's signature, with types as written in the source."""
    spec = getattr(hooks, hook)
    words = [f"{name}: {_bare(p.annotation)}" for name, p in inspect.signature(spec).parameters.items()]
    return f"def {hook}(self, {', '.join(words)}) -> {_bare(inspect.signature(spec).return_annotation)}: ..."


def first_sentence(hook: str) -> str:
    """Return the purpose of a hook, together with its condition ("only in fit") if it has one."""
    kind, paragraphs = _docstring(hook)
    sentences = re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraphs[0])
    return " ".join(sentences[: 1 if kind.endswith(".") else 2])


def _docstring(hook: str) -> tuple[str, list[str]]:
    """Return the first word, "Action." or "Event,", and the paragraphs after it, each on one line."""
    text = inspect.getdoc(getattr(hooks, hook)) or ""
    kind, _, first = " ".join(text.partition("\n\n")[0].split()).partition(" ")
    assert kind.rstrip(".,").lower() == _kind(hook), hook
    others = [" ".join(part.split()) for part in text.split("\n\n")[1:]]
    # reStructuredText marks code with two backticks
    return kind, [part.replace("``", "`") for part in (first[0].upper() + first[1:], *others)]


def plugins() -> str:
    """Return a table of the built-in plugins, with the hooks and declarations of each."""
    rows = ["| plugin | owns | wraps | events | declares |", "|---|---|---|---|---|"]
    for name, kind in _built_in().items():
        found = plugin_page.implemented(kind)
        by_role = [[hook for hook, role in found if role == wanted] for wanted in ("owns", "wraps", "event")]
        words = [", ".join(f"`{hook.removeprefix('forge_')}`" for hook in names) for names in by_role]
        rows.append(f"| [{name}](plugins/{name}.md) | {' | '.join(words)} | {'; '.join(plugin_page.declared(kind))} |")
    return "\n".join(rows)


def _implemented(hook: str) -> list[str]:
    """Return a line that names the built-in plugins that implement the hook, by role."""
    roles: dict[str, list[str]] = defaultdict(list)
    for name, kind in _built_in().items():
        method = getattr(kind, hook, None)
        if method is not None:
            wraps = method.forge_impl.get("wrapper")
            role = "wrapped by" if wraps else "owned by" if hook in ACTIONS else "implemented by"
            roles[role].append(f"[{name}](plugins/{name}.md)")
    line = "; ".join(f"{role} {', '.join(names)}" for role, names in sorted(roles.items()))
    return [f"{line[0].upper()}{line[1:]}."] if line else []


def _built_in() -> dict[str, type[Plugin]]:
    entries = registry.installed("plugin").items()
    return {name: entry.load() for name, entry in entries if entry.value.startswith("forge_")}


def _kind(hook: str) -> str:
    return "action" if hook in ACTIONS else "event"


def _bare(annotation: object) -> str:
    """Return a type as written in the source."""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
