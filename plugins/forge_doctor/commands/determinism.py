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

GROUP = "check"
AFTER = "verify-resume"
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
FORWARD = [
    f"{UNSEEDED} (a torch.Generator or numpy.random.default_rng without a seed) in the forward pass.",
    "State kept outside the task: a cache, a global, a file.",
    SET_ORDER,
]
CAUSES = {
    "device": ["The two runs were on different devices."],
    "first parameter": [f"{UNSEEDED} in the task's __init__.", SET_ORDER],
    "first buffer": [f"{UNSEEDED} in the task's __init__.", SET_ORDER],
    "batch": [
        f"{UNSEEDED} in the dataset, its transforms or the collate function.",
        SET_ORDER,
        "Data workers that return samples in the order in which they finish.",
    ],
    "rng before": [
        "Code that seeds or draws random numbers a different number of times before the forward pass: the data in this "
        "process, a validation, a plugin."
    ],
    "output": FORWARD,
    "loss": FORWARD,
    "gradient": ["A custom backward, or a hook on a tensor, that uses an unseeded source."],
    "parameter": ["The gradients were equal: check the optimizer, and plugins that change gradients or weights."],
    "buffer": ["A buffer that the forward pass fills from an unseeded source."],
    "optimizer": ["A learning-rate schedule or an optimizer that reads the time, or keeps state of its own."],
    "rng": ["Code that draws random numbers a different number of times: a loop over a set, a condition on the time."],
    "order": ["A branch that depends on the time, on the order of a set, or on state outside the task."],
}
"""Likely causes of the first difference by its kind, without kernels."""
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
    from forge.twin.record import Record
    from forge_doctor.witness import Witness

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
    for number in (1, 2):
        show.console().print(f"Run {number} of 2: {args.updates} updates ...", style="dim")
        own = folder / str(number)
        own.mkdir()
        # a random seed orders the sets of a process: the two runs get different ones, unless the user has fixed it
        environment = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", str(number))}
        subprocesses.run_verb("determinism", args, ["--life", str(own), "--updates", str(args.updates)], environment)
    one, other = (Record.read(folder / name / RECORD) for name in "12")
    found, hidden = parted(one, other)
    if one.marks[-1].update == 0:
        raise ForgeError("The run made no update, so nothing can be compared. Check the data and trainer.max_updates.")
    if found is None:
        updates = one.marks[-1].update or 0
        show.console().print(equal_text(updates, sum(not mark.aside for mark in one.marks)), soft_wrap=True)
        return 0
    console = show.console()
    console.print(Text(f"Not the same: {told(found)}.", "bold red"), soft_wrap=True)
    if hidden:
        console.print(f"Attributes of the task outside its state_dict that differ as well: {few(hidden)}.")
    console.print()
    console.print(show.heading("Likely causes"))
    for cause in causes(found, one.marks[0].path, bool(settings.get("deterministic"))):
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
        f"Compared {values:,} values: batches, outputs of modules, losses, gradients, parameters, buffers, "
        "optimizer state and the state of random numbers."
    )


def told(found: Difference) -> str:
    """Return where two runs part, in words."""
    from forge_doctor.witness import KINDS

    when = f"at update {found.update}" if found.update else "before the first update"
    text = found.distance.text
    size = f", {text}" if text.startswith(("by ", "in ")) else f": {text}" if text else ""
    return f"{when}, {KINDS[found.kind].format(found.path)} is the first value that differs{size}"


def causes(found: Difference, device: str, deterministic: bool) -> list[str]:
    """Return possible causes of a difference, the likeliest first."""
    known = list(CAUSES["order" if found.distance.text.startswith("only") else found.kind])
    if found.kind not in ("output", "loss", "gradient", "parameter", "buffer"):
        return known
    kernel = EXTERNAL_KERNEL if deterministic else KERNEL
    is_small = found.distance.relative < ROUNDING
    return [kernel, *known] if is_small or (found.kind == "gradient" and device != "cpu") else [*known, kernel]
