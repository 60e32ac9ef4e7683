"""The command line: one module per verb, imported when the verb is used; verbs that run nothing do not import torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from forge import registry
from forge.cli import ranks
from forge.distributed.worker_exit import exit_code, is_first_to_fail
from forge.errors import ForgeError, Interrupted, NegativeVerdict, did_you_mean
from forge.util import show, tracebacks
from forge.util.files import absolute
from forge.version import __version__

VERBS = {
    "fit": "Train a recipe, or a task from your own file.",
    "validate": "Measure weights on the validation split.",
    "test": "Measure weights on the test split.",
    "predict": "Write a task's predictions to a file.",
    "board": "Show runs in TensorBoard, on this machine.",
    "verify-resume": "Kill and resume a recipe, and compare it bit for bit with an uninterrupted run.",
    "determinism": "Run a recipe twice and name the first tensor that differs.",
    "tune": "Measure a learning rate, the largest batch, or the data workers.",
    "runs": "List runs with their results, or compare some.",
    "report": "Write one or several runs as one HTML page.",
    "ckpt": "Show, verify, compare or export checkpoints.",
    "plan": "Show what a recipe runs: plugins by hook, every value and its origin.",
    "recipes": "List recipes, show one, or copy one to start from.",
    "plugins": "List installed plugins, or show one's options and hooks.",
    "new": "Start a task or a plugin package from a working template.",
}

HELP = f"""\
usage: forge VERB ...

forge {__version__}, a PyTorch training framework: one readable step rhythm, plugins that compose.

{{verbs}}

  forge fit quickstart                                   train the example recipe
  forge fit quickstart --resume                          continue its newest run after an interruption
  forge fit quickstart clip.max_norm=0.5 -p no:jsonl     change an option, remove a plugin
  forge fit my_task.py:MyTask --recipe fast              train a task of your own
  forge VERB --help                                      all options of a verb
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
    """Return every verb with its one-line description: forge's own, and those of installed packages."""
    offered = {name: registry.summary(entry) for name, entry in registry.installed("command").items()}
    return {**VERBS, **{name: text for name, text in offered.items() if name not in VERBS}}


def module_of(verb: str) -> Any:
    """Import the module of a verb, which has `parser()` and `run(args)`."""
    return import_module(f"forge.cli.{verb.replace('-', '_')}") if verb in VERBS else registry.load("command", verb)


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


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP.format(verbs="\n".join(f"  {verb:<13} {text}" for verb, text in verbs().items())), end="")
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"forge {__version__}")
        return 0
    verb, rest = command_of(words)
    known = {*VERBS, *registry.installed("command")}
    if verb not in known:
        missing = registry.to_install("command", verb)
        raise ForgeError(missing or f"forge has no verb {verb!r}.{did_you_mean(verb, known)}")
    module = module_of(verb)
    # intermixed: overrides may come before, between and after the options
    args = module.parser().parse_intermixed_args(rest)
    absolute(".")  # refuses a working directory that was deleted
    with show.plain_messages(), ranks.only_first_talks(ranks.rank()):
        return module.run(args)
