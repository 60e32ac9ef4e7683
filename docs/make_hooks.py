"""Write docs/hooks.md: every hook with its arguments, its whole docstring, and which of forge's plugins implement it.

    python docs/make_hooks.py

tests/docs/test_hooks.py says so when the page is not the contract any more.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from pathlib import Path

from forge import registry
from forge.contract import hooks
from forge.contract.stack import ACTIONS, ONE_BY_ONE, SPECS

PAGE = Path(__file__).parent / "hooks.md"
INTRODUCTION = """\
# Hooks

Every hook of forge: what it is for, when it fires, and who may own or wrap it. This page is made from
`forge/contract/hooks.py`, the contract between the Trainer and every plugin. How a plugin uses them:
[writing plugins](writing-plugins.md).

![The rhythm of a run, with every hook in its place](pictures/rhythm.svg)

An **action** is done exactly once, by the Trainer's own default unless a plugin owns it: does the work and returns
something that is not None. Any number of plugins may wrap it. An **event** calls everybody, in the order of the stack.
A method takes any subset of the arguments, by name."""
SECTIONS = {
    "forge_configure": "Build",
    "forge_plan_step": "One update",
    "forge_prepare_batch": "Every stage",
    "forge_evaluate": "Around the updates",
    "forge_state_dict": "State, errors, the end",
}
"""The hook that each part of the page begins with."""


def page() -> str:
    """The whole page."""
    return "\n\n".join([INTRODUCTION, table(), *(part for hook in SPECS for part in described(hook))]) + "\n"


def table() -> str:
    """Every hook in one line."""
    rows = ["| hook | kind | what |", "|---|---|---|"]
    rows += [f"| [`{hook}`](#{hook}) | {_kind(hook)} | {first_sentence(hook)} |" for hook in SPECS]
    return "\n".join(rows)


def described(hook: str) -> list[str]:
    """One hook: signature, kind, docstring, and who implements it."""
    head = [f"## {SECTIONS[hook]}"] if hook in SECTIONS else []
    kind = f"**{_kind(hook).capitalize()}.**"
    if hook in ONE_BY_ONE:
        kind += " Called plugin by plugin, so that one cannot keep another from its turn: it cannot be wrapped."
    _, paragraphs = _docstring(hook)
    return [*head, f"### {hook}", f"```python\n{signature(hook)}\n```", kind, *paragraphs, *_implemented(hook)]


def signature(hook: str) -> str:
    """The specification's own signature, with its types as they are written."""
    spec = getattr(hooks, hook)
    words = [f"{name}: {_bare(p.annotation)}" for name, p in inspect.signature(spec).parameters.items()]
    return f"def {hook}(self, {', '.join(words)}) -> {_bare(inspect.signature(spec).return_annotation)}: ..."


def first_sentence(hook: str) -> str:
    """What a hook is for; a condition ("only in fit") comes with what it does."""
    kind, paragraphs = _docstring(hook)
    sentences = re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraphs[0])
    return " ".join(sentences[: 1 if kind.endswith(".") else 2])


def _docstring(hook: str) -> tuple[str, list[str]]:
    """(Its first word, "Action." or "Event,"; the paragraphs behind it, each on one line)."""
    text = inspect.getdoc(getattr(hooks, hook)) or ""
    kind, _, first = " ".join(text.partition("\n\n")[0].split()).partition(" ")
    assert kind.rstrip(".,").lower() == _kind(hook), hook
    others = [" ".join(part.split()) for part in text.split("\n\n")[1:]]
    # in reStructuredText ``this`` is code
    return kind, [part.replace("``", "`") for part in (first[0].upper() + first[1:], *others)]


def _implemented(hook: str) -> list[str]:
    """Which of forge's own plugins implement it, in which role."""
    roles: dict[str, list[str]] = defaultdict(list)
    for name, entry in registry.installed("plugin").items():
        if not entry.value.startswith("forge_plugins."):
            continue
        method = getattr(entry.load(), hook, None)
        if method is not None:
            wraps = method.forge_impl.get("wrapper")
            role = "wrapped by" if wraps else "owned by" if hook in ACTIONS else "implemented by"
            roles[role].append(f"[{name}](plugins/{name}.md)")
    told = "; ".join(f"{role} {', '.join(names)}" for role, names in sorted(roles.items()))
    return [f"{told[0].upper()}{told[1:]}."] if told else []


def _kind(hook: str) -> str:
    return "action" if hook in ACTIONS else "event"


def _bare(annotation: object) -> str:
    """A type as the source has it."""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
