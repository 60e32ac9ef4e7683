"""The command line: one module per verb, imported when the verb is used; verbs that run nothing do not import torch."""

from __future__ import annotations

import errno
import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any

from forge import registry
from forge.cli import ranks, target
from forge.distributed.worker_exit import exit_code, is_first_to_fail
from forge.errors import ForgeError, Interrupted, NegativeVerdict
from forge.util import show, tracebacks
from forge.util.files import absolute
from forge.version import __version__

GROUPS = ("train", "look", "check", "ship", "scale", "extend")
"""The groups of verbs in `forge --help`, in the order of use; a verb of a package says its own: GROUP = "ship"."""
VERBS = {
    "fit": ("train", "Train a recipe, or a task from your own file."),
    "validate": ("train", "Evaluate weights on the validation split."),
    "test": ("train", "Evaluate weights on the test split."),
    "predict": ("train", "Write a task's predictions to a file."),
    "tune": ("train", "Measure a learning rate, the largest batch, or the data workers."),
    "runs": ("look", "List runs with their results, or compare some."),
    "report": ("look", "Write one or several runs as one HTML page."),
    "ckpt": ("look", "Show, verify, compare or export checkpoints."),
    "plan": ("check", "Show what a recipe runs: plugins by hook, every value and its origin."),
    "verify-resume": ("check", "Kill and resume a recipe, and compare it bit for bit with an uninterrupted run."),
    "determinism": ("check", "Run a recipe twice, in fresh processes, and name the first tensor that differs."),
    "env": ("check", "Print versions, devices and what is installed, for bug reports."),
    "recipes": ("extend", "List recipes, or show one to start from."),
    "plugins": ("extend", "List installed plugins, or show one's options and hooks."),
    "new": ("extend", "Start a task or a plugin package from a working template."),
}

HELP = f"""\
usage: forge VERB ...

forge {__version__}, a PyTorch training framework: one readable step rhythm, plugins
that compose.

{{verbs}}

examples
  forge fit quickstart                              train the example recipe
  forge fit quickstart --resume                     go on after an interruption
  forge fit quickstart task.hidden=64 -p no:PLUGIN  an option; without a plugin
  forge fit my_task.py:MyTask --recipe fast         train a task of your own
  forge VERB --help                                 all options of a verb
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 success, 1 a crash or a negative verdict, 2 a mistake that the
    message explains, 85 a signal after which the run can be resumed."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    finally:
        _flush_streams()


def _main(words: list[str]) -> int:
    try:
        return _run(words)
    except Interrupted as leaving:
        if ranks.rank() == 0 and not getattr(leaving, "__forge_printed__", False):
            show.message(str(leaving), style="yellow")
        return exit_code(leaving.EXIT_CODE, str(leaving))
    except SystemExit as leaving:  # argparse: --help, or a usage error it has printed
        return exit_code(leaving.code) if isinstance(leaving.code, int) else 0
    except KeyboardInterrupt as leaving:
        if not _is_reported(leaving):
            show.message("interrupted", style="yellow")
        return exit_code(130)
    except BrokenPipeError:  # `forge plugins | head`: the reader has seen enough
        return 141
    except ForgeError as error:
        if not _is_reported(error):
            show.error("\n".join([str(error), *getattr(error, "__notes__", ())]))
        return exit_code(error.EXIT_CODE, str(error), final=True) if isinstance(error, NegativeVerdict) else 2
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            show.error(f"{str(error.filename)[:80]}…: {error.strerror}. Choose another name, or fewer links.")
            return 2
        if not _is_reported(error):
            _print_crash(error)
        return 1


def _print_crash(error: Exception) -> None:
    """Print the user's frames and the notes: plugin, hook, update, cure."""
    frames = len(tracebacks.walk(error.__traceback__))
    tracebacks.shorten(error)
    with suppress(OSError):
        print(tracebacks.as_text(error), end="", file=sys.stderr)
    if len(tracebacks.walk(error.__traceback__)) < frames:
        show.message(f"Frames of forge and torch are left out; {tracebacks.FULL}=full shows them.", style="dim")


def _flush_streams() -> None:
    """Flush stdout and stderr, and redirect a stream whose reader is gone to /dev/null. Python flushes both again at
    exit, and would change the exit code to 120 if that failed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_reported(error: BaseException) -> bool:
    """Return whether this error was printed already, by this rank as the first cause or by another rank."""
    return getattr(error, "__forge_printed__", False) or not is_first_to_fail()


def verbs() -> dict[str, str]:
    """Return every verb with its one-line description, by group: forge's own, and those of installed packages."""
    return {verb: text for group in by_group().values() for verb, text in group.items()}


def by_group() -> dict[str, dict[str, str]]:
    """Return the verbs of each group with their descriptions, in the order in which they are used: the verb of a
    package follows the one that its module names (AFTER = "plan"), or ends its group."""
    order = {group: [verb for verb, (home, _) in VERBS.items() if home == group] for group in GROUPS}
    texts = {verb: text for verb, (_, text) in VERBS.items()}
    offered = {verb: entry for verb, entry in registry.installed("command").items() if " " not in verb}
    after = {verb: registry.constant(entry, "AFTER") for verb, entry in offered.items() if verb not in VERBS}
    for verb in sorted(after, key=lambda verb: bool(after[verb])):
        group = registry.constant(offered[verb], "GROUP")
        there = order[group if group in GROUPS else GROUPS[-1]]
        there.insert(there.index(after[verb]) + 1 if after[verb] in there else len(there), verb)
        texts[verb] = _described(offered[verb])
    return {group: {verb: texts[verb] for verb in there} for group, there in order.items()}


def additions(verb: str) -> dict[str, str]:
    """Return what packages add to a verb, as "VERB WORD" or "VERB --OPTION", with its one-line description."""
    offered = registry.installed("command")
    return {name: _described(entry) for name, entry in offered.items() if name.startswith(f"{verb} ")}


def _described(entry: EntryPoint) -> str:
    text = re.sub(r"^`.*?`: ", "", registry.summary(entry))  # a module may begin with its own command
    return text[:1].upper() + text[1:]


def module_of(command: str) -> Any:
    """Import the module of a command, which has `parser()` and `run(args)`."""
    own = f"forge.cli.{command.replace('-', '_')}"
    return import_module(own) if command in VERBS else registry.load("command", command)


def parser_of(command: str) -> ArgumentParser:
    """Return the parser of a command. Its help ends with what packages add to it."""
    parser = module_of(command).parser()
    if added := additions(command):
        lines = [f"  forge {name}  {text}" for name, text in added.items()]
        told = ["added by packages, with options of their own:", *lines, ""]
        parser.epilog = "\n".join([parser.epilog or "", *told])
    return parser


def command_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command that words ask for, and the rest of them.

    A package may add to a verb: its command "VERB WORD" takes `forge VERB WORD ...`, its command "VERB --OPTION" every
    `forge VERB ...` that has the option.
    """
    verb, *rest = words
    for name in registry.installed("command"):
        first, _, second = name.partition(" ")
        if first != verb or not second:
            continue
        if second.startswith("-") and any(word.partition("=")[0] == second for word in rest):
            return name, rest
        if rest and rest[0] == second:
            return name, rest[1:]
    for word in rest:
        if missing := registry.to_install("command", f"{verb} {word.partition('=')[0]}"):
            raise ForgeError(missing)
    return verb, rest


def _nearest(word: str) -> str:
    """Suggest verbs that are spelt alike, or else verbs that say the word in their description: `train` is said by
    `fit`."""
    texts = {verb: text.lower() for verb, text in verbs().items()}
    near = get_close_matches(word, texts, n=1, cutoff=0.6)
    stem = re.escape(re.sub(r"(ing|ed|e|s)$", "", word.lower()))
    for pattern in (rf"\b{re.escape(word.lower())}\b", rf"\b{stem}" if len(stem) > 2 else "$^"):
        near = near or [verb for verb in texts if re.search(pattern, texts[verb])]
    if not near:
        return " `forge --help` lists all verbs."
    return f" Did you mean {' or '.join(f'`forge {command}`' for command in dict.fromkeys(near[:3]))}?"


def _group(group: str, verbs: dict[str, str]) -> str:
    """Return the lines of a group of verbs in `forge --help`."""
    also = {verb: f" Also: {', '.join(added)}." for verb in verbs if (added := additions(verb))}
    columns = show.console().width
    lines = (f"  {verb:<15} {text}{also.get(verb, '')}" for verb, text in verbs.items())
    return "\n".join([group, *(show.wrapped(line, columns, 18) for line in lines)])


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(
            HELP.format(verbs="\n\n".join(_group(group, verbs) for group, verbs in by_group().items() if verbs)), end=""
        )
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"forge {__version__}")
        return 0
    verb, rest = command_of(words)
    known = {*VERBS, *registry.installed("command")}
    if verb not in known:
        raise ForgeError(registry.to_install("command", verb) or f"forge has no verb {verb!r}.{_nearest(verb)}")
    # intermixed: overrides may come before, between and after the options
    parser = parser_of(verb)
    if {"-h", "--help"} & set(rest):  # before argparse misses what an option before it wants
        parser.print_help()
        return 0
    args, unknown = parser.parse_known_intermixed_args(rest)
    if unknown:
        target.refuse_options(verb, args, unknown, parser)
    absolute(".")  # refuses a working directory that was deleted
    with show.plain_messages(), ranks.only_first_talks(ranks.rank()):
        return module_of(verb).run(args)
