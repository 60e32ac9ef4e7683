"""What a user can name, as a set of lines: one fact a line, and the first word is its kind.

    name forge.Trainer                              a public name of forge, forge.data, forge.kernels, ...
    argument forge.Trainer max_epochs = None        of a public function or class
    member forge.Trainer.fit                        a documented method or attribute
    verb ckpt                                       of the command line
    positional ckpt 1 paths +                       its place, name and how many values it takes
    flag ckpt --json 0 = False                      how many values it takes, and its default
    choice ckpt action show
    plugin clip, option clip.max_norm: ... = 1.0    also: task, data and their options; kernel
    recipe quickstart, setting quickstart trainer.seed = 42
    hook forge_backward(step, loss) action
    group forge.plugins                             of entry points
    exit 85                                         a code that the command line ends with
    format forge-run 1                              of files, with its newest version
    fixture forge_run                               of pytest
    import forge.data Splits                        `from forge.data import Splits` in documentation

A line that is new is no loss, so laws on this set compare one way. Everything is asked for in ways that users have too:
public modules, entry points, the command line. Nothing here knows in which package a thing lives.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any
from unittest import mock

from forge import cli, options, registry
from forge.config import list_recipes, read_recipe
from forge.contract import hooks

MODULES = ("forge", "forge.data", "forge_kernels", "forge.testing", "forge.tuning")
FIXTURES = ("event_trace", "forge_run", "tiny_task")

REPO = Path(__file__).resolve().parents[2]
PACKAGES = sorted(REPO.glob("plugins/forge_*/pyproject.toml"))

Lines = Iterator[str]


def collect(known: Iterable[str] = ()) -> tuple[dict[str, set[str]], list[str]]:
    """Return all lines by kind, and what could not be looked at, with its error. Those of imports come from
    `documented_imports`. Public names and verbs of `known` lines are looked for even where no list has them."""
    found: dict[str, set[str]] = {}
    errors: list[str] = []
    for things, describe in _sources(list(known)):
        for thing in things:
            try:
                for line in describe(thing):
                    found.setdefault(line.partition(" ")[0], set()).add(line)
            except Exception as error:
                errors.append(f"{getattr(thing, 'name', thing)}: {type(error).__name__}: {error}")
    return found, errors


def _sources(known: list[str]) -> Iterator[tuple[Iterable[Any], Callable[[Any], Lines]]]:
    """Things, and how each is described."""
    names = {f"{path}.{name}" for path in MODULES for name in import_module(path).__all__}
    names |= {f"forge.{name}" for name in registry.installed("name")}
    yield sorted(names | {line.split()[1] for line in known if line.startswith("name ")}), _name
    verbs = {
        verb.split()[0]
        for verb in (*cli.verbs(), *(line.removeprefix("verb ") for line in known if line.startswith("verb ")))
    }
    choices = {tuple(line.split()[1:]) for line in known if line.startswith("choice ")}
    yield sorted(verbs), lambda verb: _verb(verb, choices)
    yield _offered("forge.plugins"), _plugin
    yield _offered("forge.tasks"), lambda entry: _maker("task", entry)
    yield _offered("forge.data"), lambda entry: _maker("data", entry)
    yield _offered("forge.kernels"), _kernel
    yield list_recipes(), _recipe
    yield [name for name in vars(hooks) if name.startswith("forge_")], _hook
    yield set(registry.GROUPS.values()), lambda group: iter([f"group {group}"])
    yield FIXTURES, lambda name: iter([f"fixture {name}"])
    yield exit_codes(), lambda code: iter([f"exit {code}"])
    yield formats().items(), lambda item: iter([f"format {item[0]} {item[1]}"])


def _offered(group: str) -> list[EntryPoint]:
    """What the packages of this repository offer, and none of another that happens to be installed."""
    ours = {tomllib.loads(path.read_text())["project"]["name"] for path in (REPO / "pyproject.toml", *PACKAGES)}
    return [entry for entry in entry_points(group=group) if entry.dist is not None and entry.dist.name in ours]


def exit_codes() -> dict[int, str]:
    """The codes of the command line with their meaning, as its page tells them."""
    table = (REPO / "docs" / "cli.md").read_text(encoding="utf-8").partition("## Exit codes")[2]
    return {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", table, flags=re.MULTILINE)}


def formats() -> dict[str, int]:
    """The kinds of files that carry a version, each with the newest that is written."""
    from forge.checkpoint import manifest
    from forge.runs import folder, group
    from forge_doctor.ready import report
    from forge_plugins import conformance
    from forge_ship import card

    found = {
        made["format"]: made["version"] for made in (folder.FORMAT, group.FORMAT, report.FORMAT, conformance.FORMAT)
    }
    return {**found, manifest.FORMAT: manifest.SHARED_VERSION, "forge-export": card.VERSION}


# -- Python -----------------------------------------------------------------------------------------------------------


def _name(path: str) -> Lines:
    module, _, name = path.rpartition(".")
    value = getattr(import_module(module), name)
    yield f"name {path}"
    if inspect.ismodule(value) or (inspect.isclass(value) and issubclass(value, BaseException)):
        return
    if callable(value):
        yield from (f"argument {path} {text}" for text in _arguments(value))
    if inspect.isclass(value):
        yield from (f"member {path}.{member}" for member in _members(value))


def _arguments(function: Callable[..., Any]) -> Lines:
    try:
        # of a class its __init__, unless it declares a signature: a metaclass's __call__ would hide it
        declared = inspect.isclass(function) and "__signature__" not in vars(function)
        known = inspect.signature(getattr(function, "__init__") if declared else function)  # noqa: B009
    except (TypeError, ValueError):
        return
    for parameter in known.parameters.values():
        if parameter.name not in ("self", "cls") and parameter.kind not in (2, 4):
            is_required = parameter.default is parameter.empty
            yield parameter.name + ("" if is_required else f" = {_shown(parameter.default)}")


def _members(kind: type) -> set[str]:
    """Documented methods, properties and attributes, those of forge's bases too."""
    ours = [base for base in kind.__mro__ if base.__module__.partition(".")[0].startswith("forge")]
    found: set[str] = set()
    for base in ours:
        for name, value in vars(base).items():
            what = getattr(value, "__func__", value)
            if (inspect.isfunction(what) or isinstance(what, property)) and inspect.getdoc(what):
                found.add(name)
        found |= _described_attributes(base)
        if dataclasses.is_dataclass(base):
            found |= {field.name for field in dataclasses.fields(base)}
    return {name for name in found if not name.startswith("_")}


def _described_attributes(kind: type) -> set[str]:
    """Attributes with a string under them, in the class's body or in its methods."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):
        return set()
    found = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or not isinstance(body, list):
            continue
        for statement, below in itertools.pairwise(body):
            match statement, below:
                case (
                    ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name)])
                    | ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name)),
                    ast.Expr(value=ast.Constant(value=str())),
                ):
                    found.add(name)
    return found


def _hook(name: str) -> Lines:
    function = getattr(hooks, name)
    kind = "action" if function.forge_spec["firstresult"] else "event"
    yield f"hook {name}({', '.join(inspect.signature(function).parameters)}) {kind}"


def _shown(value: Any) -> str:
    """The value, where it prints the same in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_shown(below)}" for key, below in value.items()) + "}"
    return type(value).__name__


# -- the command line -------------------------------------------------------------------------------------------------


def _verb(verb: str, choices: set[tuple[str, ...]]) -> Lines:
    """A verb with what packages add to it: the command `tune speed` is a choice of `tune`, and its flags are flags of
    it; so are those of `plan --cluster`."""
    parser = parser_of(verb)
    yield f"verb {verb}"
    yield from _of_parser(verb, parser)
    for action in parser._actions:
        label = action.option_strings[-1] if action.option_strings else action.dest
        yield from (
            f"choice {' '.join(words)}"
            for words in choices
            if words[:-1] == (verb, label) and _takes(action, words[-1])
        )
    for command in entry_points(group="forge.commands"):
        first, *more = command.name.split()
        if first == verb and more:
            added = parser_of(f"{command.name} VALUE" if more[-1].startswith("-") else command.name)
            yield from (line for line in _of_parser(verb, added) if line.startswith("flag "))
            yield from (f"choice {' '.join(words)}" for words in choices if words[0] == verb and [words[-1]] == more)


def _takes(action: argparse.Action, word: str) -> bool:
    """Whether a word is a choice of an argument that checks it by a function: it is taken, and nonsense is not."""
    if not callable(action.type):
        return False
    try:
        action.type(word)
    except Exception:
        return False
    try:
        action.type("no such choice")
    except Exception:
        return True
    return False


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser that prints `forge COMMAND --help`, wherever it comes from."""
    seen: list[argparse.ArgumentParser] = []
    see = mock.patch.object(argparse.ArgumentParser, "print_help", lambda self, file=None: seen.append(self))
    errors = io.StringIO()
    with see, contextlib.redirect_stderr(errors):
        code = cli.main([*command.split(), "--help"])
    if code or not seen:
        raise AssertionError(f"forge {command} --help ended with {code} and said: {errors.getvalue() or 'nothing'}")
    return seen[0]


def _of_parser(words: str, parser: argparse.ArgumentParser) -> Lines:
    place = 0
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield f"verb {words} {word}"
                yield from _of_parser(f"{words} {word}", below)
            continue
        several = action.nargs if action.nargs is not None else 1
        if not action.option_strings:
            yield f"positional {words} {place} {action.dest} {several}"
            place += 1
        for flag in action.option_strings:
            default = "" if action.default == argparse.SUPPRESS else f" = {_shown(action.default)}"
            yield f"flag {words} {flag} {several}{default}"
        for word in action.choices or ():
            yield f"choice {words} {action.option_strings[-1] if action.option_strings else action.dest} {word}"


# -- what is installed ------------------------------------------------------------------------------------------------


def _plugin(entry: EntryPoint) -> Lines:
    kind = entry.load()
    yield f"plugin {entry.name}"
    yield from _options(entry.name, options.of_config(kind.Config))


def _options(owner: str, known: Any) -> Lines:
    for option in known:
        default = "" if option.required else f" = {_shown(option.default)}"
        yield f"option {owner}.{option.name}: {options.type_name(option.type)}{default}"


def _maker(kind: str, entry: EntryPoint) -> Lines:
    maker = entry.load()
    yield f"{kind} {entry.name}"
    yield from _options(f"{kind}:{entry.name}", options.of_callable(maker))


def _kernel(entry: EntryPoint) -> Lines:
    entry.load()
    yield f"kernel {entry.name}"


def _recipe(name: str) -> Lines:
    config = read_recipe(name).config
    yield f"recipe {name}"
    yield from (f"setting {name} {text}" for text in _settings(config))


def _settings(values: dict[str, Any], above: str = "") -> Lines:
    for key, value in values.items():
        if isinstance(value, dict):
            yield f"{above}{key}"
            yield from _settings(value, f"{above}{key}.")
        elif f"{above}{key}" != "description":  # may be said better
            yield f"{above}{key} = {_shown(value)}"


# -- imports in documentation -----------------------------------------------------------------------------------------

IMPORT = re.compile(r"\bfrom (forge[\w.]*) import (\([^)]*\)|[A-Za-z_][\w, ]*)|\bimport (forge[\w.]*)")
ROOTS = ("forge", "forge_kernels", "forge_lightning", "forge_plugins", "forge_recipes")
PROGRAMS = ("benchmarks/doctor/*/**/*.py", "benchmarks/examples/**/*.py", "benchmarks/lightning_modules/*/**/*.py")
"""Programs written as users write; other files of benchmarks/ and docs/*.py measure and describe forge's insides."""


def documented_imports(repo: Path) -> set[str]:
    """Return what documentation imports: pages, docstrings of public modules, examples and templates."""
    pages = [*repo.glob("docs/**/*.md"), *repo.glob("*.md"), *repo.glob("benchmarks/**/*.md")]
    examples = [*repo.glob("plugins/example-*/**/*.md"), *repo.glob("plugins/example-*/**/*.py")]
    programs = [path for pattern in PROGRAMS for path in repo.glob(pattern)]
    templates = [path for path in repo.glob("**/templates/**/*") if path.is_file() and ".venv" not in path.parts]
    texts = [path.read_text(encoding="utf-8") for path in (*pages, *examples, *programs, *templates)]
    texts += [import_module(module).__doc__ or "" for module in MODULES]
    public = {(module, name) for module in (*MODULES, "forge_plugins") for name in import_module(module).__all__}
    measuring = "\n".join(path.read_text(encoding="utf-8") for path in repo.glob("benchmarks/**/*.py"))
    found = {pair for text in texts for pair in _imports(text)} | (public & set(_imports(measuring)))
    return {f"import {module} {name}".strip() for module, name in found if module.partition(".")[0] in ROOTS}


def _imports(text: str) -> Iterator[tuple[str, str]]:
    for module, names, alone in IMPORT.findall(text):
        if alone:
            yield alone.rstrip("."), ""
        for name in names.strip("()").split(","):
            first = name.split("#")[0].split()
            if first:
                yield module, first[0]


def import_line(line: str) -> None:
    """Do what a line of imports says."""
    _, module, *names = line.split()
    loaded = import_module(module)
    for name in names:
        if not hasattr(loaded, name):
            import_module(f"{module}.{name}")
