"""The run folder, the run card (what ran, with what, on what) and the word at its end (what it came to)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import secrets
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from forge import __version__, options
from forge.errors import Interrupted
from forge.contract.plugin import Callback, Plugin, snake_case
from forge.util.files import replacing
from forge.runs import wording
from forge.runs.folder import still_logged

if TYPE_CHECKING:
    from forge.contract.task import TaskModule
    from forge.engine.trainer import Trainer

END = "end.json"
"""Written when a fit ends, in whatever way it can still write; removed when the run goes on."""


def new_run_dir(group: str) -> Path:
    """`runs/<group>/<time>-<id>`: a name that no other run has."""
    return Path("runs") / group / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def group_of(trainer: Trainer) -> str:
    """Runs are grouped by recipe; a stack recipe, which names no task, leaves the task's name."""
    recipe = trainer.recipe
    names_task = recipe is not None and "name" in (recipe.config.get("task") or {})
    return recipe.name if recipe is not None and names_task else snake_case(name_of(trainer.task))


def name_of(task: TaskModule) -> str:
    """What a task is called: its class, unless it has a `task_name`, as one that stands for another module does."""
    given = getattr(task, "task_name", None)
    return given if isinstance(given, str) and given else type(task).__name__


def make_card(trainer: Trainer, resumed_from: int | None = None) -> dict[str, Any]:
    """Everything needed to understand a run later, as plain data."""
    task = trainer.task
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": command(sys.argv),
        "recipe": trainer.recipe.name if trainer.recipe is not None else None,
        "group": group_of(trainer),
        "task": {
            "class": name_of(task),
            "options": {key: plain(value) for key, value in task.init_args.items()},
            "parameters": sum(p.numel() for p in task.parameters() if not is_lazy(p)),
            "trainable": sum(p.numel() for p in task.parameters() if p.requires_grad and not is_lazy(p)),
        },
        "optimizers": {name or "optimizer": type(o).__name__ for name, o in trainer.optimizers.items()},
        "stack": [{"name": p.name, "class": type(p).__name__, "options": plugin_options(p)} for p in trainer.stack],
        "trainer": trainer.settings,
        "planned_updates": trainer.planned_updates,
        "resumed_from": resumed_from,
        "kept_options": [plain(option._asdict()) for option in trainer.optimizers.kept],
        "seed": trainer.seed,
        "device": device_name(trainer.env.device),
        "world": trainer.env.world,
        "versions": {"forge": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "git": git_state(Path.cwd()),
    }


def command(words: list[str]) -> str:
    """What the user has typed, without the folders that the program lies in."""
    program = Path(words[0])
    shown = f"python -m {program.parent.name}" if program.name == "__main__.py" else shlex.quote(program.name)
    return " ".join([shown, *map(shlex.quote, words[1:])])


def write_card(card: dict[str, Any], folder: Path, more: str = "") -> None:
    """`card.json` for programs, `card.md` for people, with `more` at its end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / END).unlink(missing_ok=True)  # a new life has begun: what the last one came to holds no more
    for name, text in {
        "card.json": json.dumps(card, indent=2) + "\n",
        "card.md": card_as_markdown(card) + more,
    }.items():
        with replacing(folder / name) as beside:
            beside.write_text(text)


def config_text(trainer: Trainer, card: dict[str, Any]) -> str:
    """`config.yaml`: the recipe, under comments about what it does not say of this run."""
    assert trainer.recipe is not None
    notes = ["Plugins were given in code too: the whole stack is in card.json."] if trainer.plugins_in_code else []
    kept = wording.kept_options(card["kept_options"])
    if kept:
        notes.append(
            f"Continued from update {card['resumed_from']} with the optimizer's options as saved: {kept}. What this "
            "recipe says of them had no effect; in a new run it would have."
        )
    return "".join(f"# {' '.join(note.split())}\n" for note in notes) + trainer.recipe.to_yaml()


def write_end(trainer: Trainer, started: str, error: BaseException | None, seconds: float) -> None:
    """`end.json`: how the fit ended whose card says `started`, after how long, and every metric that it still logs."""
    assert trainer.run_dir is not None
    progress = trainer.progress
    status, reason = ending(trainer, error)
    current = still_logged(trainer.metrics, trainer.logged)
    numbers = {name: value for name, value in current.items() if isinstance(value, (int, float))}
    record = {
        "status": status,
        "reason": reason,
        "started": started,
        "ended": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "seconds": round(seconds, 3),
        "updates": progress.update,
        "epochs": progress.epoch,
        "samples": progress.sample,
        "metrics": {name: value if math.isfinite(value) else None for name, value in numbers.items()},
    }
    with replacing(trainer.run_dir / END) as beside:
        beside.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")


def ending(trainer: Trainer, error: BaseException | None) -> tuple[str, str]:
    """(finished, interrupted or failed, why) of a fit that ends now."""
    if error is None:
        return "finished", trainer._stop_reason or trainer._end or ""
    if isinstance(error, SystemExit) and type(error.code) is int and error.code > 128:
        return "interrupted", f"signal {error.code - 128}: the state was not saved."
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return "interrupted", str(error) or type(error).__name__
    return "failed", f"{type(error).__name__}: {error}"[:500]


def card_as_markdown(card: dict[str, Any]) -> str:
    """The card as a short Markdown page."""
    task, git = card["task"], card["git"]
    repo = f"`{git['commit'][:12]}` on {git['branch']}{', with local changes' if git['dirty'] else ''}" if git else "–"
    rows = {
        "started": card["started"],
        "command": f"`{card['command']}`",
        "task": f"{task['class']}({_arguments(task['options'])}), {task['trainable']:,} trainable parameters",
        "optimizer": ", ".join(card["optimizers"].values()),
        "planned updates": card["planned_updates"],
        **({} if card["resumed_from"] is None else {"resumed from": f"update {card['resumed_from']}"}),
        **({"kept as saved": wording.kept_options(card["kept_options"])} if card["kept_options"] else {}),
        "seed": card["seed"],
        "device": card["device"],
        "versions": ", ".join(f"{name} {version}" for name, version in card["versions"].items()),
        "machine": card["machine"],
        "git": repo,
    }
    title = card["recipe"] if card["recipe"] == card["group"] else task["class"]
    lines = [f"# {title}", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {'–' if value is None else value} |" for key, value in rows.items()]
    lines += ["", "## Stack, outermost first", ""]
    lines += [f"{i}. **{p['name']}**({_arguments(p['options'])})" for i, p in enumerate(card["stack"], 1)]
    return "\n".join([*lines, "" if card["stack"] else "no plugins", ""])


def plugin_options(plugin: Plugin) -> dict[str, Any]:
    """A plugin's options as plain data."""
    if isinstance(plugin, Callback):
        return {"event": plugin.event, **({"every": str(plugin.every)} if plugin.every else {})}
    return {o.name: plain(getattr(plugin.config, o.name)) for o in options.of_config(type(plugin).Config)}


def plain(value: Any) -> Any:
    """The value if JSON can hold it, else how it prints."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else repr(value)[:200]


def device_name(device: torch.device) -> str:
    """ "cuda:0 (NVIDIA H200)", "cpu (aarch64)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()})"


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and whether there are local changes, of the repository the user stands in; None outside one."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _arguments(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items())
