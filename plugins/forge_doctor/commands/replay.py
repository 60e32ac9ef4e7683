"""`forge replay`: run the window of an anomaly report again, and compare the findings."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forge.cli import target
from forge.errors import ForgeError, NonFiniteError
from forge.util import show

if TYPE_CHECKING:
    from forge.contract.plugin import Plugin
    from forge.contract.task import TaskModule

GROUP = "check"
EXAMPLES = """\
examples:
  forge replay runs/quickstart/RUN/anomaly/update-00000123
  forge replay runs/my_task/RUN/anomaly/update-00000123 --task my_task.py:MyTask
"""
PARTS = {"model", "buffers", "rng", "window", "turn", "progress", "task", "recipe", "stack", "trainer", "finding"}
OF_THIS_RUN = {"place", "samples", "batch_changed"}
"""Parts of a finding that belong to its run: lines of a file that may have been edited, positions in a dataset."""


def parser() -> ArgumentParser:
    parser = show.new_parser("replay", "Run a window again that the plugin anomaly saved.", EXAMPLES)
    parser.add_argument("bundle", metavar="BUNDLE", help="RUN/anomaly/update-XXXXXXXX")
    parser.add_argument("--task", metavar="FILE.py:Task", help="the task, or a function that makes it")
    parser.add_argument("--device", metavar="NAME", help="device to run on (default: the run's own)")
    return parser


def run(args: Namespace) -> int:
    """Return 0 if the finding was reproduced, else 1."""
    tree = _load(Path(args.bundle))
    task = _make_task(tree, args.task)
    finding, as_text = _run_again(tree, task, args.device)
    recorded = tree["finding"]
    console = show.console()
    if finding is None:
        console.print(Text("This time everything is finite. Not reproduced."))
        console.print(Text(as_text(recorded, title="Recorded:")), soft_wrap=True)
        return 1
    _name_samples(finding, recorded)
    console.print(Text(as_text(finding)), soft_wrap=True)
    if not _same(finding, recorded):
        console.print(Text(as_text(recorded, title="Not reproduced exactly. Recorded:")), soft_wrap=True)
        return 1
    console.print(Text("Reproduced exactly.", "green"))
    return 0


def _load(path: Path) -> dict[str, Any]:
    from forge.checkpoint import StoredCheckpoint, captured, manifest
    from forge.checkpoint.checkpoint import NAME

    if not path.is_dir():
        what = f"{path} is a file, no replay bundle" if path.exists() else f"No replay bundle {path}"
        raise ForgeError(f"{what}. {_bundles_in(path.parent)}")
    if not NAME.fullmatch(path.name) and not (path / manifest.NAME).exists():
        raise ForgeError(
            f"{path} is no replay bundle. {_bundles_in(path if path.name == 'anomaly' else path / 'anomaly')}"
        )
    tree = StoredCheckpoint(path).load()
    if not tree.keys() >= PARTS:
        raise ForgeError(f"{path} is no replay bundle; those are in RUN/anomaly/, written by the plugin anomaly.")
    captured.check(tree, str(path), ("progress",))
    if tree["window"] is None:
        where = f" Its samples have these indices in the dataset: {tree['indices']}." if tree.get("indices") else ""
        raise ForgeError(
            f"{path} has no batches: they were not plain tensors, numbers and strings, so they were not saved.{where}"
        )
    return tree


def _bundles_in(folder: Path) -> str:
    from forge.checkpoint import Checkpoints

    found = [f"  {bundle}" for bundle in Checkpoints(folder).all()] if folder.name == "anomaly" else []
    if found:
        return "\n".join([f"Bundles in {folder}:", *found])
    return "Bundles are RUN/anomaly/update-XXXXXXXX, written by the plugin anomaly."


def _make_task(tree: Mapping[str, Any], given: str | None) -> TaskModule:
    """Build the task with the options it had: the class given, or the one of its registered name."""
    from forge import options, registry

    recorded, recipe = tree["task"], tree["recipe"] or {}
    name = recipe.get("task", {}).get("name")
    values, lost = recorded["options"], recorded["not_saved"]
    if given is not None:
        kind, _ = target.task_maker(given)
        if not isinstance(kind, type):
            values, lost = recipe.get("task", {}), []
    elif name is not None:
        kind = registry.load("task", name)
    else:
        raise ForgeError(f"The bundle's task {recorded['class']!r} is not installed by name: add --task FILE.py:Task.")
    if lost:
        raise ForgeError(
            f"{recorded['class']} was built with {', '.join(lost)}, which is no plain data, so it cannot be rebuilt "
            "from a file: name a function that makes it, --task FILE.py:function."
        )
    task = kind(**options.check(options.of_callable(kind), values, f"task of {recorded['class']}"))
    try:
        task.load_state_dict(tree["model"])
    except RuntimeError as error:
        raise ForgeError(f"The weights in the bundle do not fit {kind.__name__}: {error}") from error
    return task


def _run_again(tree: Mapping[str, Any], task: TaskModule, device: str | None) -> tuple[dict[str, Any] | None, Any]:
    """Return the finding of a second run, or None, and the function that turns findings into text."""
    from forge.config.build import make_plugin
    from forge.engine.trainer import Trainer

    anomaly: Any = make_plugin("anomaly", {})
    settings, turn = tree["trainer"], tree["turn"]
    trainer = Trainer(
        max_updates=tree["progress"]["update"] + 1,
        plugins=[_restore_window(tree), *_stack(tree["stack"]), anomaly],
        run_dir=False,
        device=device or settings["device"],
        deterministic=settings["deterministic"],
        validate_every=None,
    )
    task.check_first_batch = False  # pyright: ignore[reportAttributeAccessIssue]
    if turn is not None:
        task.takes_turn = lambda name, update: name == turn
    try:
        trainer.fit(task, list(tree["window"]))
    except NonFiniteError:
        if not anomaly.findings:
            raise
    return (anomaly.findings[0] if anomaly.findings else None), anomaly.as_text


def _stack(recorded: list[Mapping[str, Any]]) -> list[Plugin]:
    """Build the recorded plugins, without those that observe, save, or handle values that are not finite."""
    from forge import registry
    from forge.config.build import make_plugin
    from forge.snapshot.left_out import is_left_out

    plugins: list[Plugin] = []
    for entry in recorded:
        if entry["observer"]:
            continue
        if entry["name"].partition("@")[0] not in registry.installed("plugin"):
            show.warning(f"the plugin {entry['name']!r} is not installed: it is left out.")
            continue
        plugin = make_plugin(entry["name"], entry["options"])
        if not is_left_out(plugin):
            plugins.append(plugin)
    return plugins


def _restore_window(tree: Mapping[str, Any]) -> Plugin:
    """Return an outermost plugin that restores the counters, buffers and random numbers of the window's start."""
    import torch

    from forge.contract.hooks import hookimpl
    from forge.contract.plugin import Plugin
    from forge.rng import RNGState

    class RestoreWindow(Plugin):
        @hookimpl
        def forge_start(self, trainer: Any) -> None:
            for field, value in tree["progress"].items():
                setattr(trainer.progress, field, value)
            with torch.no_grad():
                for name, value in tree["buffers"].items():
                    trainer.task.get_buffer(name).copy_(value)

        @hookimpl(wrapper=True)
        def forge_train_step(self, step: Any) -> Any:
            RNGState.from_tree(tree["rng"]).restore(step.trainer.env.device)
            return (yield)

    return RestoreWindow()


def _name_samples(found: dict[str, Any], recorded: Mapping[str, Any]) -> None:
    """Copy the dataset indices of the recorded finding, which the window alone does not have."""
    for mine, theirs in [(found, recorded), *zip(found["data"], recorded["data"], strict=False)]:
        mine["samples"] = theirs.get("samples") if mine.get("rows") == theirs.get("rows") else None


def _same(found: Any, recorded: Any) -> bool:
    """Return whether two findings are equal; NaN equals NaN."""
    if isinstance(found, Mapping) and isinstance(recorded, Mapping):
        keys = (found.keys() | recorded.keys()) - OF_THIS_RUN
        return all(key in found and key in recorded and _same(found[key], recorded[key]) for key in keys)
    if isinstance(found, (list, tuple)) and isinstance(recorded, (list, tuple)):
        return len(found) == len(recorded) and all(map(_same, found, recorded))
    return found == recorded or (found != found and recorded != recorded)
