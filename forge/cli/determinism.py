"""`forge determinism`: run a recipe twice, compare bit for bit, and name the first tensor that differs."""

from __future__ import annotations

import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from forge.cli import subprocesses, target
from forge.errors import ForgeError
from forge.runs.wording import counted
from forge.util import show
from forge.util.text import few

if TYPE_CHECKING:
    from forge.twin.compare import Difference
    from forge.twin.record import Record

EXAMPLES = """\
Exit code 0: the two runs are equal bit for bit; 1: they are not.

examples:
  forge determinism quickstart
  forge determinism my_task.py:MyTask --updates 50
  forge determinism my_task.py:MyTask trainer.deterministic=true
"""

UNSEEDED = "A source that the seed does not reach: os.urandom, secrets, uuid, the time, or a generator of its own"
SET_ORDER = "The order of a set, or of the results of os.listdir and glob: sort them."
KERNEL = "A kernel that sums in no fixed order: trainer.deterministic=true allows none."
EXTERNAL_KERNEL = "A kernel outside torch that sums in no fixed order: an extension, a Triton kernel."
RECORD = "record.jsonl"
ROUNDING = 1e-5
"""A difference below this share of a tensor looks like a sum in another order."""


def parser() -> ArgumentParser:
    parser = show.new_parser(
        "determinism", "Run a recipe twice, in fresh processes, and name the first tensor that differs.", EXAMPLES
    )
    target.add_arguments(parser)
    parser.add_argument(
        "--updates", type=int, default=20, metavar="N", help="number of updates to compare (default: %(default)s)"
    )
    parser.add_argument("--keep", metavar="DIR", help="keep both runs and their records in this folder")
    parser.add_argument("--life", help=SUPPRESS)
    return parser


def run(args: Namespace) -> int:
    if args.life:
        return run_child(args)
    if args.updates < 1:
        raise ForgeError("--updates must be at least 1.")
    with subprocesses.folder_for(args.keep, "determinism") as folder:
        return compare(args, folder)


def run_child(args: Namespace) -> int:
    """Run one of the two runs, in this process."""
    from forge.cli.witness import Witness
    from forge.twin.record import Record

    folder = Path(args.life)
    trainer, task, data = target.build(target.load(args, to_train=True), folder / "run")
    trainer.stack.add(Witness(Record(folder / RECORD), args.updates))
    trainer.fit(task, data.train, data.val)
    return 0


def compare(args: Namespace, folder: Path) -> int:
    from forge.twin.record import Record

    settings = target.load(args, to_train=True).trainer
    if settings.get("seed") is None:
        show.warning("the recipe sets no seed, so every fit differs. Both runs use trainer.seed=0 here.")
        args.overrides.append("trainer.seed=0")
    console = show.console()
    for number in (1, 2):
        console.print(f"Run {number} of 2: {args.updates} updates ...", style="dim")
        own = folder / str(number)
        own.mkdir()
        # a random seed orders the sets of a process: the two runs get different ones, unless the user has fixed it
        environment = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", str(number))}
        subprocesses.run_verb("determinism", args, ["--life", str(own), "--updates", str(args.updates)], environment)
    one, other = (Record.read(folder / name / RECORD) for name in "12")
    if not one.updates[-1]:
        raise ForgeError("The run made no update, so nothing can be compared. Check the data and trainer.max_updates.")
    found, outside = parted(one, other)
    if found is None:
        console.print(equal_text(one.updates[-1], sum(not mark.aside for mark in one.marks)), soft_wrap=True)
        return 0
    console.print(Text(f"Not the same. First difference {found}.", "bold red"), soft_wrap=True)
    if outside:
        console.print(f"Attributes of the task outside its state_dict that differ as well: {few(outside)}.")
    console.print()
    console.print(show.heading("Likely causes"))
    for cause in causes(found, bool(settings.get("deterministic"))):
        console.print(f"  - {cause}", soft_wrap=True)
    return 1


def parted(one: Record, other: Record) -> tuple[Difference | None, list[str]]:
    """Return where two records part, and the paths of what no checkpoint holds that differs in the same update."""
    from forge.twin.compare import differences

    found = list(differences(one.marks, other.marks))
    first = next((each for each in found if not each.aside), None)
    return first, [each.path for each in found if first is not None and each.aside and each.update == first.update]


def equal_text(updates: int, values: int) -> str:
    return (
        f"Bit for bit the same: two runs of {counted(updates, 'update')}, each in a process of its own. "
        f"Compared {values:,} values: batches, outputs of modules, losses, gradients, weights, optimizer state and the "
        "state of random numbers."
    )


def causes(found: Difference, deterministic: bool) -> list[str]:
    """Return possible causes of a difference, the likeliest first."""
    from forge.cli.witness import LOSS, NUMBERS_BEFORE
    from forge.snapshot.evidence import BATCH, NUMBERS, OPTIMIZER, WEIGHTS
    from forge.twin.record import GRADIENTS, OUTPUTS

    if found.distance.text.startswith("only"):
        return ["A branch that depends on the time, on the order of a set, or on state outside the task."]
    if not found.update:
        return [f"{UNSEEDED} in the task's __init__.", SET_ORDER]
    forward = [
        f"{UNSEEDED} (a torch.Generator or numpy.random.default_rng without a seed) in the forward pass.",
        "State kept outside the task: a cache, a global, a file.",
        SET_ORDER,
    ]
    known = {
        BATCH: [
            f"{UNSEEDED} in the dataset, its transforms or the collate function.",
            SET_ORDER,
            "Data workers that return samples in the order in which they finish.",
        ],
        NUMBERS_BEFORE: [
            "Code that seeds or draws random numbers a different number of times before the forward pass: the data in "
            "this process, a validation, a plugin."
        ],
        OUTPUTS: forward,
        LOSS: forward,
        GRADIENTS: ["A custom backward, or a hook on a tensor, that uses an unseeded source."],
        WEIGHTS: [
            "The gradients were equal: check the optimizer, plugins that change gradients or weights, and buffers that "
            "the forward pass fills from an unseeded source."
        ],
        OPTIMIZER: ["A learning-rate schedule or an optimizer that reads the time, or keeps state of its own."],
        NUMBERS: [
            "Code that draws random numbers a different number of times: a loop over a set, a condition on the time."
        ],
    }[found.kind]
    if found.kind not in (OUTPUTS, LOSS, GRADIENTS, WEIGHTS):
        return known
    kernel = EXTERNAL_KERNEL if deterministic else KERNEL
    return [kernel, *known] if found.distance.relative < ROUNDING else [*known, kernel]
