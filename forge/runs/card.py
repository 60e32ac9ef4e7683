"""Write the run card (what ran, with which options, on which machine) and the record of its end."""

from __future__ import annotations

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
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from forge.contract.plugin import snake_case
from forge.contract.run import AnyRecipe, Run
from forge.errors import Interrupted
from forge.options import plain
from forge.runs import attempts, wording
from forge.runs.folder import FORMAT, JOB, RunFolder, current_metrics
from forge.runs.job import job_of, name_of
from forge.snapshot.frozen_modules import described
from forge.spans import goodput
from forge.util.files import atomic_write, make_folder
from forge.version import __version__

END = "end.json"
"""Written when a fit ends, in any way that still permits it; removed when the run resumes."""


def new_run_dir(group: str) -> Path:
    """Return a unique name `runs/<group>/<time>-<id>`, with the time in UTC."""
    return Path("runs") / group / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def group_of(recipe: AnyRecipe | None, task: str) -> str:
    """Return the folder that runs are grouped in: the recipe's name, or the task's if the recipe names no task."""
    if recipe is not None and "name" in (recipe.config.get("task") or {}):
        return recipe.name
    return snake_case(task)


def make_card(trainer: Run, resumed_from: int | None = None) -> dict[str, Any]:
    """Return everything needed to understand a run later, as plain data."""
    task, job = trainer.task, job_of(trainer)
    return {
        **FORMAT,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": command(sys.argv),
        "recipe": trainer.recipe.name if trainer.recipe is not None else None,
        "group": group_of(trainer.recipe, name_of(task)),
        "task": {
            **job["task"],
            "parameters": sum(p.numel() for p in task.parameters() if not is_lazy(p)),
            "trainable": sum(p.numel() for p in task.parameters() if p.requires_grad and not is_lazy(p)),
        },
        **({"frozen": frozen} if (frozen := described(task)) else {}),
        "data": job["data"],
        "optimizers": {name or "optimizer": type(o).__name__ for name, o in trainer.optimizers.items()},
        "stack": job["stack"],
        "trainer": trainer.settings,
        "planned_updates": trainer.planned_updates,
        "resumed_from": resumed_from,
        "resume": None,
        **({"job": os.environ[JOB]} if os.environ.get(JOB) else {}),
        "kept_options": [plain(option._asdict()) for option in trainer.optimizers.kept],
        "seed": trainer.seed,
        "device": device_name(trainer.env.device),
        "world": trainer.env.world,
        "versions": {"forge": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "git": git_state(Path()),
    }


def command(words: list[str]) -> str:
    """Return the command line without the program's folder."""
    program = Path(words[0])
    shown = f"python -m {program.parent.name}" if program.name == "__main__.py" else shlex.quote(program.name)
    return " ".join([shown, *map(shlex.quote, words[1:])])


def write_card(card: dict[str, Any], folder: Path, more: str = "", config: str | None = None) -> None:
    """Write `card.json` for programs, `card.md` for people, with `more` at its end, and `config.yaml`."""
    make_folder(folder)
    (folder / END).unlink(missing_ok=True)  # it describes the previous attempt
    _write(card, folder, more, {} if config is None else {"config.yaml": config})


def amend_card(folder: Path, resume: str) -> None:
    """Write into the card of a run what is known of resuming it."""
    run = RunFolder(folder)
    if run.card:
        _write(run.card | {"resume": resume}, folder, _history(run))


def _history(run: RunFolder) -> str:
    """Return the sections of the card about attempts and where their time went."""
    spent = goodput.spent(run.spans)
    return attempts.as_markdown(attempts.attempts_of(run)) + ("" if spent is None else f"\n{spent.markdown()}")


def _write(card: dict[str, Any], folder: Path, more: str, files: dict[str, str] | None = None) -> None:
    texts = {"card.json": json.dumps(card, indent=2) + "\n", "card.md": card_as_markdown(card) + more, **(files or {})}
    for name, text in texts.items():
        with atomic_write(folder / name) as beside:
            beside.write_text(text)


def config_text(trainer: Run, card: dict[str, Any]) -> str | None:
    """Return `config.yaml`: the recipe, if any, under comments on what it does not show of this run."""
    if trainer.recipe is None:
        return None
    notes = ["Plugins were given in code too: the whole stack is in card.json."] if trainer.has_plugins_in_code else []
    kept = wording.kept_options(card["kept_options"])
    if kept:
        notes.append(
            f"Resumed from update {card['resumed_from']} with the optimizer's options as saved: {kept}. Their values "
            "in this recipe had no effect; in a new run they would."
        )
    return "".join(f"# {' '.join(note.split())}\n" for note in notes) + trainer.recipe.to_yaml()


def write_end(trainer: Run, started: str, error: BaseException | None, seconds: float) -> None:
    """Write `end.json`: how and when the fit that began at `started` ended, and its current metrics."""
    assert trainer.run_dir is not None
    progress = trainer.progress
    status, reason = ending(trainer, error)
    current = current_metrics(trainer.metrics, trainer.logged)
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
    with atomic_write(trainer.run_dir / END) as beside:
        beside.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    if (trainer.run_dir / goodput.FILE).exists():
        run = RunFolder(trainer.run_dir)
        with atomic_write(trainer.run_dir / "card.md") as beside:
            beside.write_text(card_as_markdown(run.card) + _history(run))


def ending(trainer: Run, error: BaseException | None) -> tuple[str, str]:
    """Return (finished, interrupted or failed, reason) of a fit that ends now."""
    if error is None:
        return "finished", trainer.stop_reason or trainer.limit_reached or ""
    if isinstance(error, SystemExit) and type(error.code) is int and error.code > 128:
        return "interrupted", f"signal {error.code - 128}: the state was not saved."
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return "interrupted", str(error) or type(error).__name__
    return "failed", f"{type(error).__name__}: {error}"[:500]


def card_as_markdown(card: dict[str, Any]) -> str:
    """Return the card as a short Markdown page."""
    task, git = card["task"], card["git"]
    repo = f"`{git['commit'][:12]}` on {git['branch']}{', with local changes' if git['dirty'] else ''}" if git else "–"
    rows = {
        "started": card["started"],
        "command": f"`{card['command']}`",
        "task": f"{task['class']}({_arguments(task['options'])}), {task['trainable']:,} trainable parameters",
        **({"frozen": "; ".join(_frozen(*item) for item in card["frozen"].items())} if "frozen" in card else {}),
        "optimizer": ", ".join(card["optimizers"].values()),
        "planned updates": card["planned_updates"],
        **({} if card["resumed_from"] is None else {"resumed from": f"update {card['resumed_from']}"}),
        **({} if card.get("resume") is None else {"resume": card["resume"]}),
        **({"job": card["job"]} if "job" in card else {}),
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


def _frozen(path: str, held: dict[str, Any]) -> str:
    file = f" from `{held['file']}`" if "file" in held else ""
    name = f" on {held['name']}" if "name" in held else ""
    return f"{path}{name}{file}, weights {held['sha256'][:12]}"


def device_name(device: torch.device) -> str:
    """ "cuda:0 (NVIDIA H200)", "cpu (aarch64)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()})"


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit, branch and whether the folder's repository has local changes; None outside a repository."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        here = folder.resolve()
        if "GIT_DIR" not in os.environ and not any((above / ".git").exists() for above in (here, *here.parents)):
            return None  # without the milliseconds of a process that would say so
        return {
            "commit": git("rev-parse", "HEAD"),
            "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _arguments(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items())
