"""`forge verify-resume`: kill and resume a recipe, and compare it bit for bit with an uninterrupted run."""

from __future__ import annotations

import signal
from argparse import SUPPRESS, ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from forge.cli import subprocesses, target
from forge.errors import ForgeError
from forge.util import show

if TYPE_CHECKING:
    from forge.twin.compare import Difference

EXAMPLES = """\
examples:
  forge verify-resume quickstart
  forge verify-resume my_task.py:MyTask --kills 5 --updates 200
"""


def parser() -> ArgumentParser:
    parser = show.new_parser(
        "verify-resume", "Run a recipe uninterrupted, and killed and resumed; compare every update.", EXAMPLES
    )
    target.add_arguments(parser)
    parser.add_argument("--kills", type=int, default=3, metavar="N", help="number of kills (default: %(default)s)")
    parser.add_argument(
        "--updates", type=int, default=60, metavar="N", help="number of updates to compare (default: %(default)s)"
    )
    parser.add_argument("--keep", metavar="DIR", help="keep both runs and their traces in this folder")
    parser.add_argument("--life", help=SUPPRESS)
    parser.add_argument("--kill-at", type=int, help=SUPPRESS)
    parser.add_argument("--every", type=int, help=SUPPRESS)
    return parser


def run(args: Namespace) -> int:
    if args.life:
        return run_child(args)
    if args.kills < 1 or args.updates < 2:
        raise ForgeError("--kills must be at least 1 and --updates at least 2.")
    with subprocesses.folder_for(args.keep, "verify") as folder:
        return verify(args, folder)


def run_child(args: Namespace) -> int:
    """Run one attempt in this process: continue from the newest checkpoint; it may be killed."""
    from forge import registry
    from forge.snapshot.evidence import traced

    folder = Path(args.life)
    recipe = target.load(args, to_train=True)
    if recipe.trainer.get("seed") is None:  # without one, attempts before the first checkpoint differ by design
        recipe = recipe.with_trainer({"seed": 0})
    trainer, task, data = target.build(recipe, folder / "run")
    trainer.resume = "auto"
    trainer.max_updates = min(args.updates, trainer.max_updates or args.updates)
    for name in [plugin.name for plugin in trainer.stack if getattr(plugin, "forge_save", None) is not None]:
        trainer.stack.remove(name)
    for name in registry.providers("checkpoints")[:1]:
        trainer.stack.add(registry.load("plugin", name)(every=f"{args.every} updates"))
    trainer.stack.add(traced(folder, args.kill_at))
    trainer.fit(task, data.train, data.val)
    return 0


def verify(args: Namespace, folder: Path) -> int:
    from forge.snapshot.evidence import attempts_apart, cure, read_traces
    from forge.twin.compare import differences, first_difference

    console = show.console()

    def say(text: str, style: str = "") -> None:
        told = show.wrapped(text, console.width) if console.is_terminal else text
        console.print(told, style=style, soft_wrap=True)

    every = max(1, args.updates // 7)
    console.print(f"Uninterrupted run: {args.updates} updates ...", style="dim")
    _run_attempt(args, folder / "straight", every, None)
    straight = read_traces(folder / "straight")[0]
    if not straight.marks:
        raise ForgeError("The uninterrupted run made no update, so nothing can be compared. Check the data.")
    last = straight.updates[-1]
    kills = choose_kills(args.kills, last)
    for attempt, kill in enumerate([*kills, None], 1):
        end = f"to its end at update {last}" if kill is None else f"to a kill after update {kill}"
        console.print(f"Killed run, attempt {attempt} of {len(kills) + 1}: {end} ...", style="dim")
        _run_attempt(args, folder / "killed", every, kill)
    attempts = read_traces(folder / "killed")
    fresh, begun = attempts[0], straight.where(lambda mark: mark.update in attempts[0].updates)
    began = first_difference(fresh, begun)
    if began is not None and not began.aside:
        console.print(f"Two runs differ before any is resumed. First difference {began}.", style="bold red")
        say("The task is not deterministic: forge determinism names the operation.")
        return 1
    noise = [*differences(fresh.marks, begun.marks)]
    difference = attempts_apart(straight, attempts, noise) or _weights_apart(folder, last)
    if difference is None:
        say(equal_text(last, kills, [update for attempt in attempts for update in attempt.updates]))
        return 0
    say(unequal_text(difference, last), "bold red")
    say(cure(difference))
    return 1


def choose_kills(count: int, last: int) -> list[int]:
    """Return the updates after which to kill: at equal distances, so that a checkpoint is on disk at the last."""
    return sorted({max(1, last * number // (count + 1)) for number in range(1, count + 1)} - {last})


def _run_attempt(args: Namespace, folder: Path, every: int, kill_at: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = ["--updates", str(args.updates), "--life", str(folder), "--every", str(every)]
    words += ["--kill-at", str(kill_at)] if kill_at is not None else []
    subprocesses.run_verb("verify-resume", args, words, expected=-signal.SIGKILL if kill_at is not None else 0)


def _weights_apart(folder: Path, last: int) -> Difference | None:
    """Compare the files of weights, which what saves them may have averaged or changed."""
    from forge.snapshot.evidence import WEIGHTS
    from forge.twin.compare import Difference, Distance

    ends = [(folder / name / "run" / "weights.safetensors").read_bytes() for name in ("straight", "killed")]
    return None if ends[0] == ends[1] else Difference(last, "weights.safetensors", Distance(""), WEIGHTS)


def unequal_text(difference: Difference, last: int) -> str:
    """Name a difference, and say so if it has not shown in the results."""
    if not difference.aside:
        return f"Not the same. First difference {difference}."
    return (
        f"Not the same: what no checkpoint holds has drifted. First difference {difference}. It has not shown in the "
        f"batches, losses, random numbers, optimizer state or weights of these {last} updates yet."
    )


def equal_text(last: int, kills: list[int], made: list[int]) -> str:
    """Summarise a comparison without a difference; `made` are the updates of all attempts of the killed run."""
    return (
        f"Bit for bit the same: {last} updates. Killed after update {' and '.join(map(str, kills))}, the run took "
        f"{len(kills) + 1} attempts and {len(made)} updates. Each had the same batch, loss, random numbers, optimizer "
        f"state and weights as in the uninterrupted run, and the same generators, attributes and globals of the task "
        "and its dataset."
    )
